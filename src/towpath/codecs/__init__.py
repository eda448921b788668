"""Codecs send values in fewer bits: kernels for CPUs and GPUs, a reference in plain torch, and codecs of users.

    kernels/     encode and decode, by back end       packing.py  the messages of a reduction in hops
    low_rank.py  matrices in low rank (PowerSGD)      exact/      fewer bytes, and the same bits

`register` makes a codec from two functions (docs/guides/extending.md).
May import: core, topology.cluster, errors.
"""

from towpath.codecs.kernels.plain import register

__all__ = ["register"]
