"""`LeafParameter`, what a model sees of a leaf's parameter outside of the leaf's own forward.

A leaf, such as a large output layer, is unsharded only in its own forward. Models also read such parameters directly,
as in `F.linear(h, self.head.weight)`. While the root is unsharded, its leaves therefore show LeafParameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from towpath.errors import ShardTensorError

_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_quantized is_sparse layout ndim requires_grad shape"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point nelement numel requires_grad_ "
    "size stride"
)
# What is known without the values, as functions that PyTorch passes to `__torch_function__`.
_KNOWN: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *(torch.is_complex, torch.is_floating_point, torch.numel),
    }
)


class LeafParameter(nn.Parameter):
    """A parameter without memory. Any operation on it gathers the leaf, and computes with a copy of its parameter.

    `read` returns the copy. Gradients of the copy are gradients of the parameter.
    """

    read: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(  # pyright: ignore[reportInconsistentConstructor]
        cls: type[LeafParameter], shape: torch.Size, view: torch.Tensor, read: Callable[[], torch.Tensor]
    ) -> LeafParameter:
        """Make the parameter. `view` is the unsharded one, `shape` the shape that it has when it is unsharded."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=view.dtype, device=view.device, requires_grad=view.requires_grad
        )
        made.read = read
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: `__new__` has set all attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the copy has, such as the placements of a DTensor."""
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _KNOWN:
            args, kwargs = tree_map_only(cls, lambda tensor: tensor.read(), (tuple(args), kwargs))
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardTensorError(
            f"{func} reached a sharded parameter past __torch_function__, and cannot gather it there."
        )
