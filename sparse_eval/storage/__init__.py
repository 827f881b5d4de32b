"""What results.py and cache.py are made of: columns, journal, cells, files."""
