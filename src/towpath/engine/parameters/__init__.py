"""The parameters and gradients of one rank: units, buckets, sharded tensors, and the memory of optimizers."""
