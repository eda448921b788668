"""The data of a training run: texts, tokens, and windows of tokens."""
