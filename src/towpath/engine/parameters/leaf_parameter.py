"""`LeafParameter`, what a model sees of a leaf's parameter outside of the leaf's own forward.

A leaf, such as a large output layer, is unsharded only in its own forward. Models also read such parameters directly,
as in `F.linear(h, self.head.weight)`. While the root is unsharded, its leaves therefore show LeafParameters.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from towpath.engine import eager
from towpath.engine.parameters.shard_tensor import in_backward
from towpath.errors import ShardError

_PROPERTIES = (
    "device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_quantized is_sparse layout ndim requires_grad shape"
)
_METHODS = (
    "__len__ dim element_size get_device is_complex is_contiguous is_floating_point nelement numel "
    "register_post_accumulate_grad_hook requires_grad_ size stride"
)
# What is known without the values, as functions that PyTorch passes to `__torch_function__`.
_KNOWN: frozenset[Any] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(torch.Tensor, name) for name in _METHODS.split()),
        *(torch.is_complex, torch.is_floating_point, torch.numel, torch.Tensor.grad.__set__),  # pyright: ignore
    }
)


class LeafParameter(nn.Parameter):
    """A parameter without memory. Any operation on it gathers the leaf, and computes with a copy of its parameter.

    Gradients of the copy become gradients of `unsharded`, the unsharded parameter. A `torch.autograd.Function` does not
    pass through `__torch_function__`: its result is a gradient of the LeafParameter. The engine accepts both.
    """

    unsharded: nn.Parameter
    position: tuple[weakref.ref[nn.Module], int]  # the leaf, and the index of `unsharded` in its unit

    @staticmethod
    def __new__(  # pyright: ignore[reportInconsistentConstructor]
        cls: type[LeafParameter], shape: torch.Size, unsharded: nn.Parameter, module: nn.Module, index: int
    ) -> LeafParameter:
        """Make the parameter. `shape` is the one that `unsharded` has whenever it has memory."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=unsharded.dtype, device=unsharded.device, requires_grad=unsharded.requires_grad
        )
        # A weak reference: a module that referred to itself would stay until the garbage collector runs.
        made.unsharded, made.position = unsharded, (weakref.ref(module), index)
        return made

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: `__new__` has set all attributes."""

    @eager
    def read(self) -> torch.Tensor:
        """Gather the leaf, and return a copy of the parameter."""
        module, index = self.position
        return cast(Any, module()).towpath_forward.read(index)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that only the copy has, such as the placements of a DTensor."""
        return getattr(self.read(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _KNOWN:
            # A compiled or custom backward pass reads weights by their address, which is none while the leaf is
            # sharded.
            if func is torch.Tensor.data_ptr and in_backward():
                raise ShardError(
                    "a backward pass asks for the address of a large layer's parameter, which is sharded then. Save "
                    "weight.clone() in the forward, or pass units= to shard(): other layers then belong to the root."
                )
            args, kwargs = tree_map_only(cls, lambda tensor: tensor.read(), (tuple(args), kwargs))
        # The function would else come back here with the same arguments.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ShardError(f"{func} reached a sharded parameter past __torch_function__, and cannot gather it there.")
