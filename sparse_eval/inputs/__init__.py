"""What models.py, prompts.py and fetch.py are made of: checkpoints, texts, the hub."""
