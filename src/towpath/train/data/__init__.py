"""What training reads: texts, tokens, and windows of tokens."""
