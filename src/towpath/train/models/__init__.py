"""The models that a configuration can name."""
