"""Optimizers that need full matrices (Muon, Shampoo, Adafactor), under every strategy.

    muon = towpath.optim.owner_stepped(torch.optim.Muon(matrices, lr=0.02))

Elementwise optimizers such as AdamW step the slices of a sharded model directly, and need no wrapper. Optimizers that
compute with a full matrix need `owner_stepped`. Each matrix then has an owner among the ranks that hold one copy of
the optimizer states. The owner gathers the matrix, lets the wrapped optimizer step it, and sends the slices back
(`core/owner_stepped.py`). `chain` combines several optimizers in one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from towpath.core.transport import Transport
from towpath.engine.executor import Engine
from towpath.engine.optimizer_steps import OptimizerSettings, coupling, options_of
from towpath.engine.parameters.matrix_steps import FullMatrix, MatrixSteps
from towpath.engine.parameters.shard_tensor import ShardTensor, engine_of_parameter
from towpath.errors import ShardError, StepError
from towpath.topology.together import together

__all__ = ["ChainedOptimizer", "OwnerSteppedOptimizer", "chain", "owner_stepped"]


_INSTEAD = (
    "try it without owner_stepped(): elementwise steps and norms work on slices, and all else raises an error there. "
    "Or pass an optimizer that handles each parameter by itself, such as torch.optim.Muon or torch.optim.Adafactor"
)
_ADVICE = "Make the same optimizer of the same parameters on every rank."


def owner_stepped(optimizer: Optimizer, *, gradients: str | Transport = "none") -> OwnerSteppedOptimizer:
    """Wrap an optimizer so that it steps full parameters, each on the rank that owns it.

    Use it for optimizers that need full matrices and handle each parameter by itself, such as Muon. Every rank must
    call it with the same arguments, after `shard` and before the first step. Call it before `shard` only if an
    integration shards the model, as Accelerate's `prepare()` does.

    Args:
        optimizer: An optimizer of a sharded model's parameters, which has not stepped yet.
        gradients: The codec in which owners receive gradients, such as "int8:64", or a `Transport`. By default
            they are sent unchanged, and the results are bit-identical to those of `optimizer` on full parameters. Use
            a codec if links between nodes are slow.

    Returns:
        The optimizer to use in place of `optimizer`.

    Raises:
        ShardError: The optimizer couples its parameters, has stepped already, or has parameters that are not sharded.
        MismatchError: Ranks passed different optimizers.
        ConfigError: The codec does not fit the parameters.
    """
    transport = gradients if isinstance(gradients, Transport) else Transport(codec=gradients)
    if not any(isinstance(p, ShardTensor) for p in _parameters(optimizer)):
        _check_optimizer(optimizer)
        return OwnerSteppedOptimizer(optimizer, transport)
    engines = _checked(optimizer)
    made = OwnerSteppedOptimizer(optimizer, transport)
    made.share_out(engines)
    return made


class OwnerSteppedOptimizer(Optimizer):
    """The optimizer that `owner_stepped` returns. It steps full parameters on the ranks that own them.

    Its groups are those of the wrapped optimizer, `inner`. Its `state` holds the states of the parameters that this
    rank owns.

    Args:
        inner: The wrapped optimizer.
        transport: How full matrices reach their owners.
    """

    def __init__(self, inner: Optimizer, transport: Transport) -> None:
        self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self._transport, self._is_made = inner, transport, True
        self._has_stepped = False
        self.parts: Sequence[MatrixSteps] = ()  # one for each sharded model whose parameters it steps
        # The wrapper takes over the step hooks, so that they run once in a step, not once in each of its rounds.
        hooks: Any = inner
        self._optimizer_step_pre_hooks = hooks._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = hooks._optimizer_step_post_hooks
        hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._stand_ins: dict[int, nn.Parameter] = {}  # parameters for the wrapped optimizer, by id of the real ones

    def share_out(self, engines: Sequence[Engine] | None = None) -> None:
        """Assign an owner to each parameter, once the parameters belong to sharded models. Every rank must call it.

        Args:
            engines: The engines of these models. By default, the parameters are checked, and their engines looked up.
        """
        found = _checked(self.inner) if engines is None else engines
        wanted = set(map(id, _parameters(self.inner)))
        self.parts = [MatrixSteps(engine, wanted, self._transport) for engine in found]

    # Called by training loops -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step all parameters that have a gradient. Every rank must call it.

        Args:
            closure: Computes the loss again, and is called once before the step. Default: None.

        Returns:
            The result of `closure`, or None.

        Raises:
            ShardError: The model is not sharded.
            StepError: The wrapped optimizer turned out to couple its parameters.
        """
        if not self.parts:
            raise ShardError(
                f"owner_stepped({self.kind}): no parameter of it is one of a sharded model. Make it after "
                "towpath.shard(model, …), of model.parameters(); or let an integration shard the model and give it the "
                "optimizer, as accelerator.prepare(model, optimizer). A model that is not sharded needs no wrapper."
            )
        self._has_stepped = True
        loss = _loss_of(closure)
        self._call("step", OptimizerSettings.of(self.inner))
        return loss

    def train(self) -> None:
        """Call the wrapped optimizer's `train()`, which schedule-free optimizers have. Every rank must call it."""
        self._switch("train")

    def eval(self) -> None:
        """Call the wrapped optimizer's `eval()`, which schedule-free optimizers have. Every rank must call it."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        method = getattr(self.inner, mode, None)
        if not callable(method):
            return
        if not self.parts:
            method()
            return
        # Trainers call train() before each batch. A first call without any parameters finds out whether that changes
        # the optimizer. If not, the optimizer is in this mode already on every rank, and nothing has to be sent.
        before = OptimizerSettings.of(self.inner)
        after = self._call_inner(mode, before, {}, {})
        if before.attributes != after.attributes or before.difference(after, tensors=False):
            self._call(mode, before)

    def _call(self, method: str, before: OptimizerSettings) -> None:
        """Call a method of the wrapped optimizer on each owner for the parameters that it owns, round by round."""
        after: list[OptimizerSettings] = []
        for part in self.parts:
            part.run(
                lambda wholes, part=part: after.append(self._iterate(part, wholes, method, before)),
                gradients=method == "step",
            )
        if not after:  # this rank owns no parameters, and calls the method for counters such as the number of steps
            after.append(self._call_inner(method, before, {}, {}))
        # The values that an optimizer writes to its groups, such as numbers of steps, must be equal after each call.
        for group, options in zip(self.param_groups, after[-1].options, strict=True):
            group.update(options)
        for each in after[:-1]:
            if difference := each.difference(after[-1], tensors=False):
                raise StepError(
                    f"owner_stepped({self.kind}): {method}() wrote values into its groups that depend on the "
                    f"parameters that it was called with: {difference}. It does not handle each parameter by itself, "
                    f"so this step is not that of one process. Go back to the last checkpoint, and {_INSTEAD}."
                )

    def _iterate(
        self, part: MatrixSteps, wholes: Sequence[FullMatrix], method: str, before: OptimizerSettings
    ) -> OptimizerSettings:
        """Call the wrapped optimizer for matrices that this rank owns. Return its options and attributes afterwards."""
        parameters = [part.parameters[whole.name] for whole in wholes]
        stand_ins: dict[int, nn.Parameter] = {}
        for whole, parameter in zip(wholes, parameters, strict=True):
            stand_in = self._stand_ins.setdefault(id(parameter), nn.Parameter(whole.weight))
            stand_in.data, stand_in.grad = whole.weight, whole.gradient
            stand_ins[id(parameter)] = stand_in
        states = {stand_ins[id(p)]: self.state[p] for p in parameters}
        found = self._call_inner(method, before, stand_ins, states)
        for whole, parameter in zip(wholes, parameters, strict=True):
            stand_in = stand_ins[id(parameter)]
            if stand_in.data_ptr() != whole.weight.data_ptr():  # the optimizer assigned .data instead of writing to it
                whole.weight.copy_(stand_in)
            stand_in.grad = None
            self.state[parameter] = _without_lent_memory(states[stand_in], [whole.weight, whole.gradient])
        return found

    def _call_inner(
        self,
        method: str,
        before: OptimizerSettings,
        stand_ins: Mapping[int, nn.Parameter],
        states: dict[nn.Parameter, dict[str, Any]],
    ) -> OptimizerSettings:
        """Call a method of the inner optimizer on some parameters, with the settings of `before`. Return the new ones.

        `stand_ins`: The parameters to step, by the id of the parameter that each replaces. All others are left out.
        `states`: Their states, updated in place. The optimizer keeps its own groups and states.
        """
        inner: Any = self.inner
        groups, state = inner.param_groups, inner.state
        inner.param_groups = [
            {**options, "params": [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins]}
            for options, group in zip(before.options, groups, strict=True)
        ]
        inner.state = defaultdict(dict, states)
        vars(inner).update(before.attributes)
        try:
            getattr(inner, method)()
            states.update({p: inner.state[p] for p in states.keys() & inner.state.keys()})
            return OptimizerSettings.of(inner)
        finally:
            inner.param_groups, inner.state = groups, state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ShardError`: add groups to the optimizer before it is wrapped.

        The constructor of the base class calls this too, and then it works.
        """
        if self._is_made:
            raise ShardError(
                "add_param_group() on owner_stepped(): its ranks have agreed on who owns which parameter. Add the "
                "group to the optimizer before it is wrapped."
            )
        super().add_param_group(param_group)

    # States -----------------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The name of the wrapped optimizer's class, which checkpoints store."""
        return type(self.inner).__name__

    def owns(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank owns `parameter`: it steps it, and has its states."""
        return isinstance(parameter, ShardTensor) and any(part.owns_parameter(parameter) for part in self.parts)

    def whole_states(self, device: torch.device | None, wanted: bool) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the states of all parameters, which their owners broadcast. Every rank must call it.

        In addition to its result it takes the memory of one tensor.

        Args:
            device: Where the results are stored. None means the model's device. Pass the CPU to save device memory.
            wanted: Whether this rank needs the results. If False, it takes part, and returns an empty dict.

        Raises:
            CheckpointError: A state is a tensor subclass made of other tensors.
        """
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for part in self.parts:
            for name, state in part.states_of_owners(self.state, device, wanted):
                found[part.parameters[name]] = state
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, if this rank owns all parameters (ddp), or before the first step.

        Raises:
            ShardError: Ranks own different parameters. Save with `towpath.checkpoint` instead.
        """
        if (self._has_stepped or self.state) and any(part.is_spread for part in self.parts):
            raise ShardError(
                f"state_dict() of owner_stepped({self.kind}): this rank has the states of parameters that it owns, "
                "and no others. Save with towpath.checkpoint, or let every rank call towpath.checkpoint."
                "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)), and rank 0 save what it gets."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load full states of all parameters. Every rank must pass them, and keeps those of the parameters it owns.

        Args:
            state_dict: A state dict as the wrapped optimizer's `state_dict()` returns it in a single process.
        """
        order = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = {number for number, p in zip(saved, order, strict=False) if self.owns(p)}
        states = {number: state for number, state in state_dict["state"].items() if number in mine}
        super().load_state_dict({**state_dict, "state": states})
        self.inner.param_groups = self.param_groups

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ShardError(f"owner_stepped({self.kind}) cannot be copied: make another optimizer, and wrap that.")


def chain(*optimizers: Optimizer) -> ChainedOptimizer:
    """Combine several optimizers in one, such as Muon for the matrices and AdamW for all other parameters.

    Use it where a training loop, a scheduler or a checkpoint takes one optimizer.

    Args:
        *optimizers: The optimizers, without parameters in common.

    Returns:
        An optimizer with the groups and states of all of them.

    Raises:
        ShardError: No optimizer was passed, or one that `chain` returned.
        ValueError: A parameter is in two of the optimizers.
    """
    return ChainedOptimizer(optimizers)


class ChainedOptimizer(Optimizer):
    """The optimizer that `chain` returns. Its groups and states are those of its members, in their order.

    Args:
        members: The optimizers.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members or any(isinstance(each, ChainedOptimizer) for each in members):
            raise ShardError(
                f"chain(): expected one or more optimizers that are not chained themselves; got {members}."
            )
        self.members = tuple(members)
        super().__init__([group for each in members for group in each.param_groups], {})
        for each in members:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        for each in self.members:  # one dict for all: only one member steps each parameter
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step all members, in their order.

        Args:
            closure: Computes the loss again, and is called once before the step. Default: None.

        Returns:
            The result of `closure`, or None.
        """
        loss = _loss_of(closure)
        for each in self.members:
            each.step()
        return loss

    def train(self) -> None:
        """Call `train()` on the members that have it, such as schedule-free optimizers. Every rank must call it."""
        self._switch("train")

    def eval(self) -> None:
        """Call `eval()` on the members that have it, such as schedule-free optimizers. Every rank must call it."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for each in self.members:
            method = getattr(each, mode, None)
            if callable(method):
                method()

    def state_dict(self) -> dict[str, Any]:
        """Return one state dict for all members.

        Raises:
            ShardError: A member steps full parameters, and ranks own different ones. Use `towpath.checkpoint` instead.
        """
        for each in owner_stepped_members(self):
            each.state_dict()  # raises if this rank's states are incomplete
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict that `state_dict` returned, and give each member its groups and states."""
        groups, first = list(state_dict["param_groups"]), 0
        for each in self.members:
            mine = groups[first : first + len(each.param_groups)]
            first += len(mine)
            numbers = {number for group in mine for number in group["params"]}
            states = {number: state for number, state in state_dict["state"].items() if number in numbers}
            each.load_state_dict({"state": states, "param_groups": mine})
        self.param_groups = [group for each in self.members for group in each.param_groups]
        self.state = defaultdict(dict, {p: state for each in self.members for p, state in each.state.items()})
        self._share()


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    with torch.enable_grad():
        return None if closure is None else closure()


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers that `chain` combined, or `(optimizer,)`."""
    return optimizer.members if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


def owner_stepped_members(optimizer: Optimizer) -> list[OwnerSteppedOptimizer]:
    """Return the members of `optimizer` that step full matrices."""
    return [each for each in members_of(optimizer) if isinstance(each, OwnerSteppedOptimizer)]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return an optimizer's parameters, or an empty list for any other object."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _without_lent_memory(state: dict[str, Any], lent: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """Return `state` with copies of the tensors that share memory with `lent`.

    That memory will hold other matrices in a later round.
    """
    memory = set[int]().union(*(_memory_of(tensor) for tensor in lent if tensor is not None))

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if memory & _memory_of(tensor) else tensor

    return tree_map_only(torch.Tensor, kept, state)


def _memory_of(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the storages of a tensor. A quantized state has one storage for each of its parts."""
    if is_traceable_wrapper_subclass(tensor):
        parts, _ = tensor.__tensor_flatten__()
        return set[int]().union(*(_memory_of(getattr(tensor, part)) for part in parts))
    return {tensor.untyped_storage().data_ptr()}


def _checked(inner: Optimizer) -> list[Engine]:
    """Return the engines of an optimizer's parameters, in their order. Raise on every rank if it cannot be wrapped."""
    parameters = _parameters(inner)
    found = [engine_of_parameter(p) for p in parameters]
    engines = list(dict.fromkeys(engine for engine in found if engine is not None))
    with ExitStack() as stack:
        ranks = [engine.comm.groups for engine in engines]
        descriptions = [stack.enter_context(together(each, "owner_stepped()", _ADVICE)) for each in ranks]
        _check_optimizer(inner)
        for parameter, engine in zip(parameters, found, strict=True):
            _check_parameter(parameter, engine)
        for lines in descriptions:
            lines += _description(inner)
    return engines


def _check_optimizer(inner: Optimizer) -> None:
    name = type(inner).__name__
    if not isinstance(inner, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardError(f"owner_stepped(): expected a torch optimizer, got {name}.")
    if isinstance(inner, OwnerSteppedOptimizer):
        raise ShardError("owner_stepped(): this optimizer is wrapped already.")
    if reason := coupling(inner):
        raise ShardError(
            f"owner_stepped(): {name} cannot step its parameters one at a time, each on the rank that owns it: "
            f"{reason}. {_INSTEAD.capitalize()}."
        )
    if inner.state:
        raise ShardError(f"owner_stepped(): this {name} has stepped already. Wrap it before its first step.")


def _check_parameter(parameter: torch.Tensor, engine: Engine | None) -> None:
    if not isinstance(parameter, ShardTensor) or engine is None:
        raise ShardError(
            f"owner_stepped(): got a parameter of shape {tuple(parameter.shape)} that is not of a sharded model. Call "
            "towpath.shard(model, …) first; a model that is not sharded needs no wrapper."
        )
    if parameter.shard_spec.parallel is not None:
        raise ShardError(
            f"owner_stepped(): {parameter.shard_spec.name} is a DTensor on a tensor-parallel mesh, and no rank can "
            "hold all of it. Give it to an elementwise optimizer."
        )
    if engine.strategy.optimizer_on_host and engine.comm.device.type != "cpu":
        raise ShardError(
            f"owner_stepped(): {parameter.shard_spec.name} is in host memory (offload='optimizer'), and owners step "
            f"on {engine.comm.device}. Leave out offload=, or give it to an elementwise optimizer."
        )


def _description(inner: Optimizer) -> list[str]:
    """Return the lines that describe an optimizer, which must be equal on all ranks."""
    lines = [f"optimizer {type(inner).__name__}"]
    for number, group in enumerate(inner.param_groups):
        lines.append(f"options of group {number}: {options_of(group)}")
        lines += [
            f"group {number}: {p.shard_spec.name if isinstance(p, ShardTensor) else p.shape}" for p in group["params"]
        ]
    return lines
