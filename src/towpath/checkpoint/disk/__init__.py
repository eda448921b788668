"""A checkpoint as files: nothing in here knows of ranks."""
