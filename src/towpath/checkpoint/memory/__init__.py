"""What a checkpoint holds, in memory: model, optimizer, random numbers."""
