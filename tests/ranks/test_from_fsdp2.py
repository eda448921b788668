"""What a user of FSDP2 types works and means what it says, or raises an error that shows what to type instead.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)

import towpath
from tests.ranks.server import on_ranks
from tests.ranks.strategies import in_turn, strategy_of
from tests.ranks.test_leaves import Block
from towpath import checkpoint
from towpath.engine.from_fsdp import ARGUMENTS, COUNTERPARTS
from towpath.errors import ConfigError, MismatchError, ShardError

SHAPE = towpath.Topology(2, 1)
THEIR_METHODS = sorted(name for name in dir(FSDPModule) if not name.startswith("_"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net() -> Net:
    torch.manual_seed(3)
    return Net()


def _batch() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


# --- models on the meta device ----------------------------------------------------------------------------------------


class Initialized(Net):
    def init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.kaiming_uniform_(self.head.weight)
        for block, bound in zip(self.blocks, (0.06, 0.03, 0.004), strict=True):  # the last one is drawn in another way
            nn.init.trunc_normal_(block.get_parameter("inner.weight"), 0.0, 0.02, -bound, bound)


@in_turn(["zero3", "ddp", "mics:2x1"], 2)
@on_ranks(2)
def test_to_empty_and_init_weights_give_what_one_process_has(label: str) -> None:
    plain = Initialized()
    with torch.device("meta"):
        model = Initialized()
    topology = towpath.Topology(1, 2)
    towpath.shard(model, strategy_of(label, topology))
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    assert model.to_empty(device="cpu") is model
    with torch.no_grad():
        model.init_weights()
    torch.manual_seed(5)
    plain.init_weights()
    for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(towpath.full_tensor(found), expected), name
    assert torch.equal(model(_batch()), plain(_batch()))
    with pytest.raises(ShardError, match=r"to_empty\(device='meta'\): the sharded model is on cpu"):
        model.to_empty(device="meta")


# --- precision --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_dtype_its_name_and_a_policy_are_a_precision() -> None:
    bf16, mixed = towpath.Precision("bfloat16"), towpath.Precision("bfloat16", "float32")
    for given, expected in (
        ("bf16", bf16),
        ("bfloat16", bf16),
        (torch.bfloat16, bf16),
        ("half", towpath.Precision("float16")),
        (MixedPrecisionPolicy(torch.bfloat16), bf16),
        (MixedPrecisionPolicy(torch.bfloat16, torch.float32), mixed),
        (MixedPrecisionPolicy(cast_forward_inputs=False), towpath.Precision()),
    ):
        model: Any = towpath.shard(_net(), "zero3", topology=SHAPE, precision=given)
        assert model.towpath_engine.precision == expected
        assert towpath.schedule("zero3", _net(), 1, given, topology=SHAPE) == towpath.schedule(
            model.towpath_engine.strategy, model
        )


@on_ranks(2)
def test_under_a_policy_gradients_are_those_of_fsdp2_to_the_bit() -> None:
    for policy in (MixedPrecisionPolicy(torch.bfloat16, torch.float32), MixedPrecisionPolicy(torch.bfloat16)):
        theirs, ours = _net(), _net()
        for block in theirs.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(theirs, mp_policy=policy)
        towpath.shard(ours, "zero3", topology=SHAPE, precision=policy)
        for model in (theirs, ours):
            output = model(_batch())
            assert output.dtype == torch.bfloat16
            output.float().square().mean().backward()
        for (name, expected), found in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            assert expected.grad is not None and found.grad is not None
            assert torch.equal(towpath.full_tensor(found.grad), expected.grad.full_tensor()), name  # pyright: ignore


@on_ranks(2)
def test_what_is_no_precision_is_refused_on_every_rank_with_what_is() -> None:
    for given, words in (
        ("bf17", r"precision='bf17': expected the dtype .* towpath.Precision, or .* MixedPrecisionPolicy"),
        (16, r"precision=16: expected"),
        (torch.int8, r"precision=torch.int8: expected"),
        (
            MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32),
            r"output_dtype.*model\(x\).to\(torch.float32",
        ),
        (MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False), r"cast_forward_inputs=False.*casts its"),
    ):
        with pytest.raises(ConfigError, match=words):
            towpath.shard(_net(), "zero3", precision=given)
        with pytest.raises(ConfigError, match=words):
            towpath.schedule("zero3", _net(), 1, given, topology=SHAPE)
    wrong = "bf17" if dist.get_rank() else "bf16"  # on one rank alone it is an error on all
    with pytest.raises((ConfigError, MismatchError), match="bf17"):
        towpath.shard(_net(), "zero3", precision=wrong)  # pyright: ignore[reportArgumentType]


# --- blocks first, and then the root ----------------------------------------------------------------------------------


@on_ranks(2)
def test_sharding_blocks_and_then_the_root_is_explained() -> None:
    for shard, called in ((lambda block: towpath.shard(block, "zero3"), "shard"), (fully_shard, "fully_shard")):
        model = _net()
        for block in model.blocks:
            shard(block)
        words = rf"^{called}\(\) was called before .* of this Net .*towpath.shard\(model, 'mics', units=\[Block\]\)"
        with pytest.raises(ShardError, match=words):
            towpath.shard(model, "mics")
    model = _net()
    towpath.shard(model.blocks[1], "zero3")
    with pytest.raises(ShardError, match=r"was called before .*towpath.shard\(model, 'auto', units=\[Block\]\)"):
        towpath.shard(model, "auto", workload=towpath.Workload(tokens=4))
    whole = towpath.shard(_net(), "zero3")
    with pytest.raises(ShardError, match=r"the Block is a part of a model that is sharded already"):
        towpath.shard(whole.blocks[0], "zero3")
    with pytest.raises(ShardError, match=r"a model that is sharded already cannot be sharded again"):
        towpath.shard(nn.Sequential(*whole.blocks), "zero3")
    with pytest.raises(ShardError, match=r"the model is sharded already"):
        towpath.shard(whole, "zero3")


@on_ranks(1)
def test_what_is_no_strategy_names_the_preset_that_is_meant() -> None:
    meant = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "mics"}
    for theirs in ShardingStrategy:
        with pytest.raises(ConfigError, match=rf"[Dd]id you mean '{meant.get(theirs.name, 'paro-nii')}'\?"):
            towpath.shard(_net(), theirs)  # pyright: ignore[reportArgumentType]
    for given in (3, None, copy):
        with pytest.raises(ConfigError, match=r"shard: expected a preset's name, or a Strategy"):
            towpath.shard(_net(), given)  # pyright: ignore[reportArgumentType]


# --- methods ----------------------------------------------------------------------------------------------------------


@on_ranks(1)
def test_every_method_of_theirs_is_ours_or_names_its_counterpart() -> None:
    assert sorted(COUNTERPARTS) == THEIR_METHODS, "FSDPModule has other methods: add them to engine/from_fsdp.py"
    model: Any = towpath.shard(_net(), "zero3", units=[Block])
    for name in THEIR_METHODS:
        for module in (model, model.blocks[0], model.head):
            if module is model and name in ("unshard", "reshard"):
                continue
            with pytest.raises(ShardError, match=rf"{name}: a sharded model has no such method\. [A-Z]"):
                getattr(module, name)(True)
            # What looks for a method, or for the class, is not led to believe that this is FSDP2.
            assert not hasattr(module, name) and getattr(module, name, None) is None
        assert name in ("unshard", "reshard") or name not in dir(model)
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    with pytest.raises(AttributeError, match="no attribute 'set_nothing'"):
        model.set_nothing(True)


# --- functions and methods --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_functions_and_methods_take_a_model_of_any_class_and_a_compiled_one() -> None:
    compiled: Any = torch.compile(towpath.shard(_net(), "zero3", topology=SHAPE), backend="eager")
    with towpath.no_sync(compiled):
        pass
    compiled.unshard()
    compiled.reshard()
    model: Any = towpath.shard(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), "zero3", topology=SHAPE)
    weight = model.get_parameter("0.weight")
    batches = [_batch()] * (1 + dist.get_rank())
    assert len(list(towpath.join(model, batches))) == 2
    with towpath.no_sync(model):
        model(_batch()).square().mean().backward()
    assert weight.grad is None
    model(_batch()).square().mean().backward()
    assert weight.grad is not None and towpath.full_tensor(weight.grad).shape == (8, 8)
    everyones = [torch.empty(8) for _ in range(2)]
    towpath.broadcast_buffers(model, 1)
    dist.all_gather(everyones, model.get_buffer("1.running_mean"))
    assert torch.equal(*everyones)
    whole = towpath.full_tensor(weight)
    model.unshard()
    assert torch.equal(model.get_parameter("0.weight"), whole)
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(dist.get_rank())
    model.reshard(modifier_rank=1)
    assert torch.equal(towpath.full_tensor(weight), torch.ones(8, 8))


def test_the_functions_refuse_what_is_not_sharded() -> None:
    plain = nn.Linear(2, 2)
    for call in (
        lambda: towpath.no_sync(plain),
        lambda: next(towpath.join(plain, [1])),
        lambda: towpath.broadcast_buffers(plain),
    ):
        with pytest.raises(
            ShardError, match=r"expected a model that towpath.shard\(\) returned, got a plain Linear\. Call"
        ):
            call()
    with pytest.raises(ShardError, match=r"full_tensor: expected a ShardTensor.*got a plain Parameter"):
        towpath.full_tensor(plain.weight)


@on_ranks(2)
def test_their_arguments_raise_and_name_the_counterpart() -> None:
    shard: Any = towpath.shard
    theirs = {*inspect.signature(fully_shard).parameters, *inspect.signature(FullyShardedDataParallel).parameters}
    ours = {*inspect.signature(shard).parameters, "module"}
    assert theirs - ours - set(ARGUMENTS) == set(), "FSDP has other arguments: add them to engine/from_fsdp.py"
    for name in theirs - ours:
        with pytest.raises(ShardError, match=rf"no {name}=. Use instead"):
            shard(nn.Linear(2, 2), "zero3", **{name: None})
    with pytest.raises(TypeError, match=r"'check_evry'\. Did you mean check_every="):
        shard(nn.Linear(2, 2), "zero3", check_evry=3)
    with pytest.raises(TypeError, match=r"'offload', an option of towpath.strategy\(\). Pass towpath.strategy\(preset"):
        shard(nn.Linear(2, 2), "zero3", offload="optimizer")
    for name, wrong in (("mesh", "x"), ("group", 3), ("topology", (1, 2))):
        with pytest.raises(ShardError, match=f"{name}: expected a "):
            shard(nn.Linear(2, 2), "zero3", **{name: wrong})


@on_ranks(2)
def test_dcp_checkpoints_pass_both_ways(tmp_path: Path) -> None:
    """Weights and AdamW's states go from FSDP2 to Towpath, train there, and go back, bit for bit."""
    folder = tmp_path
    theirs, ours = _net(), towpath.shard(Net(), "paro-iig", topology=SHAPE)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    optimizers = {model: torch.optim.AdamW(model.parameters(), lr=0.1) for model in (theirs, ours)}

    def states(model: nn.Module) -> dict[str, Any]:
        functions = state_dict if model is theirs else checkpoint
        optimizer = functions.get_optimizer_state_dict(model, optimizers[model])
        return {"model": functions.get_model_state_dict(model), "optimizer": optimizer}

    def passed(source: nn.Module, target: nn.Module, name: str) -> None:
        dcp.save(states(source), checkpoint_id=folder / name)
        loaded = states(target)
        dcp.load(loaded, checkpoint_id=folder / name)
        functions: Any = state_dict if target is theirs else checkpoint
        functions.set_model_state_dict(target, loaded["model"])
        functions.set_optimizer_state_dict(target, optimizers[target], loaded["optimizer"])
        assert _same_states(states(source), states(target))

    def step(model: nn.Module) -> None:
        model(_batch()).sum().backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    step(theirs)
    step(ours)
    passed(theirs, ours, "theirs")
    step(ours)
    passed(ours, theirs, "ours")


def _same_states(first: Any, second: Any) -> bool:
    """Whether all tensors are the same when they are gathered, and everything else is equal."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(_same_states(first[key], second[key]) for key in first)
    if isinstance(first, Tensor):
        first, second = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in (first, second))
        return torch.equal(first, second)
    return first == second
