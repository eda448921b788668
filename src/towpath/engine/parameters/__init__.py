"""Parameters and gradients of one rank: units, buckets, the tensors that users see, and what optimizers work on."""
