"""Streams that run transfers concurrently with the computation, their queues, and the record of what ran when."""
