"""Optimizers that need whole matrices (Muon, Shampoo, Adafactor), under every strategy.

    muon = towpath.optim.whole_matrices(torch.optim.Muon(matrices, lr=0.02))

An elementwise optimizer steps the slices of a sharded model as they are, and needs no wrapper. One that computes with a
matrix as a whole does: each matrix has an owner among the ranks that hold one copy of the optimizer states, which
brings it together, lets the wrapped optimizer step it, and sends the slices back (`core/whole_matrices.py`).
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from towpath.core.wire import Wire
from towpath.engine.build import agree
from towpath.engine.checks.optimizers import Common, call_with, coupling, options_of
from towpath.engine.executor import Engine, engine_with
from towpath.engine.parameters.matrix_steps import MatrixSteps, Whole
from towpath.engine.parameters.shard_tensor import ShardTensor
from towpath.errors import ShardError, StepError, TowpathError

__all__ = ["Together", "WholeMatrices", "together", "whole_matrices"]

_INSTEAD = (
    "try it without whole_matrices(): elementwise steps and norms work on slices, and all else raises an error there. "
    "Or pass an optimizer that handles each parameter by itself, such as torch.optim.Muon or torch.optim.Adafactor"
)
_ADVICE = "Make the same optimizer of the same parameters on every rank."


def whole_matrices(optimizer: Optimizer, *, gradients: str | Wire = "none") -> WholeMatrices:
    """`optimizer`, made of a sharded model's parameters, as one that steps each of them whole, on the rank owning it.

    For any optimizer that handles each parameter by itself. Every rank must call it alike, after shard() and before the
    first step (before shard() only where an integration shards the model, as Accelerate's prepare() does); use what it
    returns in the place of `optimizer`. `gradients`: a codec, such as "int8:64", in which
    gradients travel to the owners; unless given, they travel as they are, and the parameters are, to the bit, what
    `optimizer` would make of the whole ones.
    """
    wire = gradients if isinstance(gradients, Wire) else Wire(codec=gradients)
    if not any(isinstance(p, ShardTensor) for p in _parameters(optimizer)):
        _check_optimizer(optimizer)
        return WholeMatrices(optimizer, wire)
    engines = _checked(optimizer)
    made = WholeMatrices(optimizer, wire)
    made.share_out(engines)
    return made


class WholeMatrices(Optimizer):
    """What `whole_matrices` returns. Its groups are the wrapped optimizer's; its `state` has that of the parameters
    which this rank owns."""

    def __init__(self, inner: Optimizer, wire: Wire) -> None:
        self._is_made = False
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self._wire, self._is_made = inner, wire, True
        self._has_stepped = False
        self._parts: Sequence[MatrixSteps] = ()  # one for each sharded model whose parameters it has
        # Hooks run once in a step, not once in each of its rounds.
        hooks: Any = inner
        self._optimizer_step_pre_hooks = hooks._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = hooks._optimizer_step_post_hooks
        hooks._optimizer_step_pre_hooks, hooks._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._stand_ins: dict[int, nn.Parameter] = {}  # by the id of the parameter: what the wrapped optimizer steps

    def share_out(self, engines: Sequence[Engine] | None = None) -> None:
        """Its parameters are those of sharded models now: give each an owner. Every rank must call it."""
        found = _checked(self.inner) if engines is None else engines
        wanted = set(map(id, _parameters(self.inner)))
        self._parts = [MatrixSteps(engine, wanted, self._wire) for engine in found]

    # What a training loop calls ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step of all parameters that have a gradient. Every rank must call it."""
        if not self._parts:
            raise ShardError(
                f"whole_matrices({self.kind}): no parameter of it is one of a sharded model. Make it after "
                "towpath.shard(model, …), of model.parameters(); or let an integration shard the model and be told of "
                "it, as accelerator.prepare(model, optimizer). A model that is not sharded needs no wrapper."
            )
        self._has_stepped = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._call("step", Common.of(self.inner))
        return loss

    def train(self) -> None:
        """Call the wrapped optimizer's `train()`, if it has one, as schedule-free optimizers do. Every rank must call
        it."""
        self._switch("train")

    def eval(self) -> None:
        """Call the wrapped optimizer's `eval()`, if it has one, as schedule-free optimizers do. Every rank must call
        it."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        method = getattr(self.inner, mode, None)
        if not callable(method):
            return
        if not self._parts:
            method()
            return
        # Trainers call train() before each batch. Where that changes nothing without parameters, the optimizer is in
        # this mode already, on every rank, and nothing has to travel.
        before = Common.of(self.inner)
        after = call_with(self.inner, mode, before, {}, {})
        if before.attributes != after.attributes or before.difference(after, tensors=False):
            self._call(mode, before)

    def _call(self, method: str, before: Common) -> None:
        """Let each owner call a method of the wrapped optimizer for the parameters it owns, some at a time."""
        after: list[Common] = []
        for part in self._parts:
            part.run(
                lambda wholes, part=part: after.append(self._iterate(part, wholes, method, before)),
                gradients=method == "step",
            )
        if not after:  # this rank owns none of them: it counts the step all the same
            after.append(call_with(self.inner, method, before, {}, {}))
        # What an optimizer keeps in its groups (numbers of steps, say) is the same after each of the calls.
        for group, options in zip(self.param_groups, after[-1].options, strict=True):
            group.update(options)
        for each in after[:-1]:
            if difference := each.difference(after[-1], tensors=False):
                raise StepError(
                    f"whole_matrices({self.kind}): {method}() wrote values into its groups that depend on the "
                    f"parameters that it was called with: {difference}. It does not handle each parameter by itself, "
                    f"so this step is not that of one process. Go back to the last checkpoint, and {_INSTEAD}."
                )

    def _iterate(self, part: MatrixSteps, wholes: Sequence[Whole], method: str, before: Common) -> Common:
        """Let the wrapped optimizer step matrices that this rank owns; return what it then keeps for all of them."""
        parameters = [part.parameters[whole.name] for whole in wholes]
        stand_ins: dict[int, nn.Parameter] = {}
        for whole, parameter in zip(wholes, parameters, strict=True):
            stand_in = self._stand_ins.setdefault(id(parameter), nn.Parameter(whole.weight))
            stand_in.data, stand_in.grad = whole.weight, whole.gradient
            stand_ins[id(parameter)] = stand_in
        states = {stand_ins[id(p)]: self.state[p] for p in parameters}
        found = call_with(self.inner, method, before, stand_ins, states)
        for whole, parameter in zip(wholes, parameters, strict=True):
            stand_in = stand_ins[id(parameter)]
            if stand_in.data_ptr() != whole.weight.data_ptr():  # it was assigned, not written to
                whole.weight.copy_(stand_in)
            stand_in.grad = None
            self.state[parameter] = _kept(states[stand_in], [whole.weight, whole.gradient])
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_made:
            raise ShardError(
                "add_param_group() on whole_matrices(): its ranks have agreed on who owns which parameter. Add the "
                "group to the optimizer before it is wrapped."
            )
        super().add_param_group(param_group)

    # States -----------------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """The wrapped optimizer's class, by which checkpoints know it."""
        return type(self.inner).__name__

    @property
    def parts(self) -> Sequence[MatrixSteps]:
        return self._parts

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank steps `parameter`, and has its states."""
        return isinstance(parameter, ShardTensor) and any(part.owns_parameter(parameter) for part in self.parts)

    def whole_states(self, device: torch.device | None, wanted: bool) -> dict[torch.Tensor, dict[str, Any]]:
        """The states of all parameters, on `device` (their own unless given), where they are `wanted`. Every rank must
        call it; it holds one tensor more than what it returns."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for part in self.parts:
            for name, state in part.states_of_owners(self.state, device, wanted):
                found[part.parameters[name]] = state
        return found

    def state_dict(self) -> dict[str, Any]:
        """That of the wrapped optimizer, where every rank owns every parameter (ddp), or before the first step."""
        if (self._has_stepped or self.state) and any(part.is_spread for part in self.parts):
            raise ShardError(
                f"state_dict() of whole_matrices({self.kind}): this rank has the states of parameters that it owns, "
                "and no others. Save with towpath.checkpoint, or let every rank call towpath.checkpoint."
                "get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, "
                "cpu_offload=True)), and rank 0 save what it gets."
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What the wrapped optimizer's `state_dict()` is in one process: whole states, of all parameters. Every rank
        must be given it, and keeps what it owns."""
        order = [p for group in self.param_groups for p in group["params"]]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        mine = {number for number, p in zip(saved, order, strict=False) if self.owns(p)}
        states = {number: state for number, state in state_dict["state"].items() if number in mine}
        super().load_state_dict({**state_dict, "state": states})
        self.inner.param_groups = self.param_groups

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ShardError(f"whole_matrices({self.kind}) cannot be copied: make another optimizer, and wrap that.")


def together(*optimizers: Optimizer) -> Together:
    """Several optimizers as one, such as Muon for the matrices and AdamW for all else: one to step, schedule,
    save and load. No parameter may be in two of them."""
    return Together(optimizers)


class Together(Optimizer):
    """What `together` returns. Its groups are those of its `members`, in their order, and so are its states."""

    def __init__(self, members: Sequence[Optimizer]) -> None:
        if not members or any(isinstance(each, Together) for each in members):
            raise ShardError(f"together(): expected one optimizer or more, none of them made by it; got {members}.")
        self.members = tuple(members)
        super().__init__([group for each in members for group in each.param_groups], {})
        for each in members:
            self.state.update(each.state)
        self._share()

    def _share(self) -> None:
        """One dict for all states: a parameter is stepped by one of the members."""
        for each in self.members:
            each.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.members:
            each.step()
        return loss

    def train(self) -> None:
        """Call `train()` of the members that have it, as schedule-free optimizers do. Every rank must call it."""
        self._switch("train")

    def eval(self) -> None:
        """Call `eval()` of the members that have it, as schedule-free optimizers do. Every rank must call it."""
        self._switch("eval")

    def _switch(self, mode: str) -> None:
        for each in self.members:
            method = getattr(each, mode, None)
            if callable(method):
                method()

    def state_dict(self) -> dict[str, Any]:
        for each in self.members:
            if isinstance(each, WholeMatrices):
                each.state_dict()  # refuses to give a part for the whole
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Those that `together` has made one of; or the one that there is."""
    return optimizer.members if isinstance(optimizer, Together) else (optimizer,)


def whole_of(optimizer: Optimizer) -> list[WholeMatrices]:
    """Those of them that step whole matrices."""
    return [each for each in members_of(optimizer) if isinstance(each, WholeMatrices)]


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Of what is no optimizer: none."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def _kept(state: dict[str, Any], lent: Sequence[torch.Tensor | None]) -> dict[str, Any]:
    """Return a state with copies of what lies in the `lent` tensors, whose memory will hold other matrices."""
    memory = set[int]().union(*(_memory_of(tensor) for tensor in lent if tensor is not None))

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if memory & _memory_of(tensor) else tensor

    return tree_map_only(torch.Tensor, kept, state)


def _memory_of(tensor: torch.Tensor) -> set[int]:
    """Return the addresses of the storages that hold a tensor; of a quantized state, those of its parts."""
    if is_traceable_wrapper_subclass(tensor):
        parts, _ = tensor.__tensor_flatten__()
        return set[int]().union(*(_memory_of(getattr(tensor, part)) for part in parts))
    return {tensor.untyped_storage().data_ptr()}


def _checked(inner: Optimizer) -> list[Engine]:
    """The engines of its parameters, in their order; or an error, on every rank."""
    parameters = _parameters(inner)
    found = [engine_with(p) if isinstance(p, ShardTensor) else None for p in parameters]
    engines = list(dict.fromkeys(engine for engine in found if engine is not None))
    failure: TowpathError | None = None
    try:
        _check_optimizer(inner)
        for parameter, engine in zip(parameters, found, strict=True):
            _check_parameter(parameter, engine)
    except TowpathError as error:
        if not engines:
            raise
        failure = error
    for engine in engines:
        agree(engine.wiring.groups, _lines(inner), failure, "whole_matrices()", _ADVICE)
    return engines


def _check_optimizer(inner: Optimizer) -> None:
    name = type(inner).__name__
    if not isinstance(inner, Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardError(f"whole_matrices(): expected a torch optimizer, got {name}.")
    if isinstance(inner, WholeMatrices):
        raise ShardError("whole_matrices(): this optimizer is wrapped already.")
    if reason := coupling(inner):
        raise ShardError(
            f"whole_matrices(): {name} cannot step its parameters one at a time, each on the rank that owns it: "
            f"{reason}. {_INSTEAD.capitalize()}."
        )
    if inner.state:
        raise ShardError(f"whole_matrices(): this {name} has stepped already. Wrap it before its first step.")


def _check_parameter(parameter: torch.Tensor, engine: Engine | None) -> None:
    if not isinstance(parameter, ShardTensor) or engine is None:
        raise ShardError(
            f"whole_matrices(): got a parameter of shape {tuple(parameter.shape)} that is not of a sharded model. Call "
            "towpath.shard(model, …) first; a model that is not sharded needs no wrapper."
        )
    if parameter.span.parallel is not None:
        raise ShardError(
            f"whole_matrices(): {parameter.span.name} is a DTensor on a tensor-parallel mesh, and no rank can hold it "
            "whole. Give it to an elementwise optimizer."
        )
    if engine.strategy.optimizer_on_host and engine.wiring.device.type != "cpu":
        raise ShardError(
            f"whole_matrices(): {parameter.span.name} lies in the host's memory (offload='optimizer'), and owners step "
            f"on {engine.wiring.device}. Leave out offload=, or give it to an elementwise optimizer."
        )


def _lines(inner: Optimizer) -> list[str]:
    """What all ranks must have alike."""
    lines = [f"optimizer {type(inner).__name__}"]
    for number, group in enumerate(inner.param_groups):
        lines.append(f"options of group {number}: {options_of(group)}")
        lines += [f"group {number}: {p.span.name if isinstance(p, ShardTensor) else p.shape}" for p in group["params"]]
    return lines
