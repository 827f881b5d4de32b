"""Rows in, tables, pictures and pages out: what report.py and the terminal show."""
