"""lm-eval's tasks under selection policies: documents -> prompts -> batched decoding -> scores."""
