"""The parameters of a unit's modules: ShardTensors, or the unsharded views that they compute with.

Modules must not compute with anything else, so this file also finds out what user code did to the parameters: replaced
them, or wrote to them where the write would be lost.

A leaf, such as a large output layer, is unsharded only in its own forward. Models also read such parameters directly,
as in `F.linear(h, self.head.weight)`. While the root is unsharded, its leaves therefore show LeafParameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from towpath.engine import eager
from towpath.engine.aliases import exchanged
from towpath.engine.layout import Holder
from towpath.engine.parameters.bucket import Bucket
from towpath.engine.parameters.shard_tensor import in_backward
from towpath.errors import ShardError, StepError


@final
class ModuleParameters:
    """The parameters that the modules of one unit have. `Unit` holds it as `shown`.

    `views` are the unsharded parameters, `owners` the modules that hold the unit's parameters. `rank` is this rank, as
    errors name it.
    """

    def __init__(self, unit: str, buckets: Sequence[Bucket], rank: int) -> None:
        self._unit, self._rank = unit or "root", rank
        pairs = [pair for b in buckets for pair in zip(b.layout.places, b.views, strict=True)]
        self._places, self.views = [place for place, _ in pairs], tuple(view for _, view in pairs)
        self._frozen = {id(view) for bucket in buckets if not bucket.trainable for view in bucket.views}
        self._is_gathered = any(not bucket.always_whole for bucket in buckets)
        self._entries = [
            # Written past nn.Module.__setattr__, which would call the registration hooks for each (`executor.py`).
            (module._parameters, attribute, view, place.parameter)  # pyright: ignore[reportPrivateUsage]
            for place, view in pairs
            for module, attribute in place.owners
        ]
        # Lists, dicts and attributes that hold parameters too, with what they hold while the parameters are unsharded,
        # and what they hold otherwise.
        self._kept = [
            (holder, key, exchanged(holder[key], place.parameter, view), holder[key])
            for place, view in pairs
            for holder, key in place.kept
        ]
        # What modules show of the parameters while these are sharded: the ShardTensors, or in a leaf LeafParameters.
        self._sharded: Sequence[nn.Parameter] = [parameter for *_, parameter in self._entries]
        self.leaf_parameters: list[LeafParameter] = []
        # By parameter and grad mode, its copy in this forward of the root, and the version of the copy.
        self._copies: dict[tuple[int, bool], tuple[torch.Tensor, int]] = {}
        self._is_unsharded = False  # the modules' parameters are the unsharded views
        self._versions: list[int] = []  # versions of the views, as the engine left them
        self.note_versions()
        self.owners = list({id(m): m for place in self._places for m, _ in place.owners}.values())
        # Recurrent modules compute with a list of their weights, which has to change with the parameters.
        self._recurrent = [m for m in self.owners if isinstance(m, nn.RNNBase)]

    def swap(self, unsharded: bool) -> None:
        """Give the modules the unsharded views as parameters if `unsharded`, otherwise the ShardTensors."""
        self._is_unsharded = unsharded
        for (parameters, attribute, view, _), sharded in zip(self._entries, self._sharded, strict=True):
            parameters[attribute] = view if unsharded else sharded
        for holder, key, shown, hidden in self._kept:
            found = _held(holder, key)
            # Otherwise the user has put something else there.
            if found is shown or found is hidden:
                holder[key] = shown if unsharded else hidden
        for module in self._recurrent:
            names = module._flat_weights_names  # pyright: ignore[reportPrivateUsage]
            module._flat_weights = [module._parameters.get(n) for n in names]  # pyright: ignore

    def make_leaf_parameters(self, module: nn.Module) -> None:
        """Prepare LeafParameters for a leaf, whose forward is that of `module`."""
        for index, (place, view) in enumerate(zip(self._places, self.views, strict=True)):
            shape = place.shape if place.parallel is None else view.shape
            self.leaf_parameters.append(LeafParameter(shape, view, module, index))  # pyright: ignore[reportCallIssue]

    def show_leaf_parameters(self, inside: bool) -> None:
        """Let modules show LeafParameters while the root is unsharded (`inside`), and otherwise ShardTensors."""
        parameters = [parameter for *_, parameter in self._entries]
        self._sharded = self.leaf_parameters if inside else parameters
        for made, parameter in zip(self.leaf_parameters, parameters, strict=True):
            made.requires_grad_(parameter.requires_grad)
        if not self._is_unsharded:
            self.swap(False)
        if not inside:
            # Copies hold the full parameter, and must not outlive the forward of the root.
            self._copies.clear()

    def copy_of(self, index: int, unsharded: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        """Return a copy of an unsharded parameter. All reads in one forward of the root share it."""
        # A backward pass may recompute parts of a forward, each in a graph of its own. So each of these gets its own
        # copy, as do reads after the forward. A read without gradients may be recomputed later. So each of these counts
        # as a forward of its own. `unsharded` calls a function as a forward of the unit.
        view, key = self.views[index], (index, torch.is_grad_enabled())
        shared = self._sharded is self.leaf_parameters and not in_backward()
        if not shared or key not in self._copies:
            copy = unsharded(lambda: view.clone() if self._is_gathered else view.view_as(view))
            if shared:
                self._copies[key] = copy, _version_of(copy)
            return copy
        copy, _ = self._copies[key]
        return copy if torch.is_grad_enabled() else unsharded(lambda: copy)

    def check(self) -> None:
        """Raise `StepError` if a module's parameter was replaced. Follow changes of `requires_grad`."""
        # The engine calls this before a forward, and whenever modules or parameters were registered.
        for parameters, attribute, view, parameter in self._entries:
            found = parameters.get(attribute)
            if found is not parameter and found is not view and not isinstance(found, LeafParameter):
                raise StepError(self._replaced(self._name(view), found))
            if parameter.requires_grad != view.requires_grad:
                if id(view) in self._frozen:
                    raise StepError(
                        f"parameter {self._name(view)!r} of unit {self._unit!r} was frozen at shard() and has "
                        "no gradient buffers. Call requires_grad_() before shard()."
                    )
                view.requires_grad_(parameter.requires_grad)

    def _replaced(self, name: str, by: object) -> str:
        if is_transformed(by):
            return (
                f"rank {self._rank}: torch.func put a tensor of its own in place of parameter {name!r} of unit "
                f"{self._unit!r}. A sharded model computes with its own parameters. Call loss.backward() for their "
                "gradients; for all else in torch.func take the same model without shard()."
            )
        return (
            f"rank {self._rank}: parameter {name!r} of unit {self._unit!r} was replaced by another tensor "
            "after shard(). Write into it instead: p.copy_(full_tensor), or load_state_dict() without assign=True. "
            "torch.func.functional_call() replaces parameters, too: it takes a model without shard()."
        )

    def _name(self, view: nn.Parameter) -> str:
        return next(place.names[0] for place, other in zip(self._places, self.views, strict=True) if other is view)

    def note_versions(self) -> None:
        """Note the versions of the views, so that `check_unwritten` finds writes from now on."""
        self._versions = [view._version for view in self.views]

    def check_unwritten(self) -> None:
        """Raise `StepError` if the forward that just ended wrote to the unsharded parameters, or to copies of them."""
        before = self._versions
        self.note_versions()
        now = self._versions
        if now == before and all(_version_of(copy) == version for copy, version in self._copies.values()):
            return
        found = [index for index, (was, is_) in enumerate(zip(before, now, strict=True)) if was != is_]
        found += [index for (index, _), (copy, version) in self._copies.items() if _version_of(copy) != version]
        written = [repr(self._places[index].names[0]) for index in found]
        raise StepError(
            f"rank {self._rank}: {', '.join(written)} was written to inside the forward of unit {self._unit!r}, where "
            "the parameters are a copy. The write is lost with it, or differs between ranks. Write after "
            "optimizer.step() instead: to the parameter itself, or inside `with towpath.full_parameters(model):`. To "
            "compute with changed weights take torch.nn.utils.parametrize."
        )

    def invalidate_views(self, invalid: bool) -> None:
        """Make autograd refuse the views while their memory may hold another unit's weights, or allow them again."""
        # Autograd compares the version of each tensor with the version that it saved. Invalid views have a raised
        # version, which is restored when the weights are unsharded again. Only a tensor that left the unit unseen by
        # Towpath, for example through an attribute, meets the raised version.
        self.raise_versions(1 if invalid else -1)

    def raise_versions(self, by: int) -> None:
        self._versions = [view._version + by for view in self.views]
        # Private. `torch.autograd._unsafe_preserve_version_counter`, with which FSDP2 hides its all-gathers, uses it.
        torch._C._autograd._unsafe_set_version_counter(self.views, tuple(self._versions))  # pyright: ignore


def _version_of(tensor: torch.Tensor) -> int:
    # Nothing counts the writes in inference mode.
    return 0 if tensor.is_inference() else tensor._version


def is_transformed(value: object) -> bool:
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore


def _held(holder: Holder, key: Any) -> object:
    try:
        return holder[key]
    except LookupError:
        return None


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
