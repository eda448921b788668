"""What travels in fewer bits: kernels for CPUs and GPUs, their oracle in plain torch, and codecs of your own.

`register` makes a codec of two functions (docs/guides/extending.md).
May import: core, topology.cluster, errors.
"""

from towpath.codecs.kernels.registered import register

__all__ = ["register"]
