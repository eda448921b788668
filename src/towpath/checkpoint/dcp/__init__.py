"""Between Towpath and torch.distributed.checkpoint."""
