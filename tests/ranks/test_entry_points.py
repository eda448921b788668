"""What users call beside `model(...)`, and do to a sharded model, works as with a whole one, or says what does.

In float64, where only the order of sums differs from the twin's (see TOLERANCE in twin.py).
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

import towpath
import towpath.checkpoint
from tests.ranks.models import TiedGPT, llama_config, noise
from tests.ranks.server import World, on_ranks
from tests.ranks.strategies import in_turn
from tests.ranks.test_every_model import WIDTH, Block, _loss
from tests.ranks.twin import Twin
from towpath import ShardTensor
from towpath.errors import ShardError, StepError, TowpathError
from towpath.sharded_module import KNOWN_METHODS

SHAPE = towpath.Topology(2, 1)
# Parameters spread over both ranks, and whole on each.
LABELS = ("zero3", "zero1")


class Coder(nn.Module):
    """Blocks between layers of the root, and a parameter of the root's own; `encode` and `decode` are its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def encode(self, x: Tensor) -> Tensor:
        """Its input, for instance an image."""
        x = self.first(x) * self.scale
        for block in self.blocks[:2]:
            x = block(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        for block in self.blocks[2:]:
            x = block(x)
        return self.last(x / self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def reconstruct(self, x: Tensor) -> Tensor:
        """Calls the forward, and after it reads a parameter of the root."""
        return self(x) * self.scale + self.decode(self.encode(x))

    def fit(self, x: Tensor) -> Tensor:
        """A training step with its backward pass inside, and a use of the root after it."""
        loss = self(x).square().mean()
        loss.backward()
        return (self.scale * x).detach().sum() + loss.detach()

    def fail(self, x: Tensor) -> Tensor:
        raise ValueError(f"after {self.first(x).shape}")

    def stream(self, x: Tensor) -> Iterator[Tensor]:
        yield self.first(x)


def _rests(model: Any) -> bool:
    """Whether all parameters are sharded again."""
    return all(isinstance(p, ShardTensor) for p in model.parameters())


# --- methods that are entries ----------------------------------------------------------------------------------------


@in_turn(LABELS, 1)
@on_ranks(2)
def test_registered_methods_train_exactly_nest_and_release_what_they_gathered(label: str) -> None:
    twin = Twin(Coder, _loss_by_methods, label, SHAPE)
    for method in ("reconstruct", "fail", "fit", "encode"):  # `encode` and `decode` are so already
        towpath.register_forward_method(twin.sharded, method)
    assert twin.sharded.encode.__doc__ == Coder.encode.__doc__
    twin.train(steps=2, micro_steps=2)
    twin.backward(2)
    twin.check_gradients()
    twin.step()
    twin.check_parameters()
    with torch.no_grad():
        assert torch.allclose(*(m.reconstruct(noise(0, 0, 9)) for m in (twin.sharded, twin.plain)), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="after"):
        twin.sharded.fail(noise(0, 0, 0))
    assert _rests(twin.sharded)
    _check_backward_inside(twin)


def _loss_by_methods(model: Any, rank: int, micro: int, step: int) -> Tensor:
    x = noise(rank, micro, step)
    return model.decode(model.encode(x)).square().mean() + model.reconstruct(x).abs().mean() + model(x).sum()


def _check_backward_inside(twin: Any) -> None:
    for model in (twin.sharded, twin.plain):
        model.zero_grad()
    found, expected = (model.fit(noise(0, 0, 3)) for model in (twin.sharded, twin.plain))  # alike on both ranks
    assert abs(found - expected) < 1e-10
    twin.check_gradients()
    assert _rests(twin.sharded)


class Streaming(Coder):
    """What shard() is not to take for an entry, though it knows the names."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step = nn.Linear(WIDTH, WIDTH)

    def generate(self, x: Tensor) -> Iterator[Tensor]:
        yield x

    async def predict_step(self, x: Tensor) -> Tensor:
        return x


@on_ranks(2)
def test_known_methods_are_entries_from_the_beginning_where_they_can_be() -> None:
    model: Any = towpath.shard(Streaming(), "zero3", topology=SHAPE)
    assert vars(model).keys() & set(KNOWN_METHODS) == {"encode", "decode"}
    assert isinstance(model.training_step, nn.Linear) and next(model.generate(torch.ones(1))) == 1


@on_ranks(2)
def test_what_cannot_be_an_entry_is_refused_with_what_can() -> None:
    model: Any = towpath.shard(Coder(), "zero3", topology=SHAPE)
    with pytest.raises(ShardError, match=r"Coder has no method 'encoder'\. Did you mean 'encode'"):
        towpath.register_forward_method(model, "encoder")
    with pytest.raises(ShardError, match="'stream' of Coder is a generator"):
        towpath.register_forward_method(model, "stream")
    with pytest.raises(ShardError, match=r"got a Sequential, which is none of these.*leave the unit to the root"):
        towpath.register_forward_method(model.blocks[0].mlp, "forward")
    with pytest.raises(ShardError, match="got a Coder"):
        towpath.register_forward_method(Coder(), "encode")


@in_turn(LABELS, 1)
@on_ranks(2)
def test_modules_of_the_root_may_be_called_alone(label: str) -> None:
    twin = Twin(lambda: Nested(TiedGPT()), _loss_of_parts, label, SHAPE)
    twin.train(steps=2, micro_steps=2)
    twin.check_parameters()
    assert _rests(twin.sharded)


class Nested(nn.Module):
    """As PEFT wraps a model: the root is not what its methods call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(37, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.inner(ids))


def _loss_of_parts(model: Any, rank: int, micro: int, step: int) -> Tensor:
    ids = torch.randint(0, 37, (2, 6), generator=torch.Generator().manual_seed(rank + 10 * micro + 100 * step))
    if micro:
        return model(ids).square().mean()
    with torch.no_grad():  # as a loop of tokens does
        for _ in range(2):
            model.inner(ids)
    return model.head(model.inner(ids)).square().mean() + model.inner.head(model.inner.tokens(ids)).square().mean()


# --- Hugging Face and its like ---------------------------------------------------------------------------------------


@on_ranks(2)
def test_generate_gives_the_same_tokens_as_a_whole_model() -> None:
    ids = torch.arange(3, 9)[None]
    for build in (_llama, _peft, _t5):
        plain, sharded = (_seeded(build).eval() for _ in range(2))
        towpath.shard(sharded, "zero3", topology=SHAPE)
        found, expected = (model.generate(ids, do_sample=False, max_new_tokens=5) for model in (sharded, plain))
        assert torch.equal(found, expected), build.__name__
        assert _rests(sharded)


def _seeded(build: Callable[[], Any]) -> Any:
    torch.manual_seed(7)
    return build().double()


def _llama() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(llama_config(length=32))


def _peft() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        from peft import LoraConfig, get_peft_model

        projections = ["q_proj", "k_proj", "v_proj"]
        model = get_peft_model(
            _llama(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=projections, init_lora_weights=False)
        )
    return model


def _t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


class Conditioned(nn.Module):
    """As DiT: after its blocks it calls a module inside the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.blocks[0].norm(x)  # pyright: ignore[reportCallIssue]


@on_ranks(2)
def test_a_block_that_is_read_from_outside_is_named_and_trains_as_part_of_the_root() -> None:
    refused = towpath.shard(Conditioned().double(), "zero3", topology=SHAPE, units=[Block])
    with pytest.raises(ShardError, match=r"'blocks.0.norm.weight'.*in unit 'blocks.0'.*pass the other units as"):
        _loss(refused, 0, 0, 0)
    assert _rests(refused)

    torch.manual_seed(7)
    plain, sharded = Conditioned().double(), Conditioned().double()
    sharded.load_state_dict(plain.state_dict())
    towpath.shard(sharded, "zero3", topology=SHAPE, units=list(sharded.blocks)[1:])
    _check_alike(plain, sharded, lambda model: _loss(model, 0, 0, 0))


@on_ranks(2)
def test_a_parameter_of_the_root_read_outside_is_named_with_what_makes_it_whole() -> None:
    model: Any = towpath.shard(Coder().double(), "zero3", topology=SHAPE)
    with pytest.raises(ShardError, match=r"'scale'.*in unit 'root'.*register_forward_method\(model, name\)"):
        model.reconstruct(noise(0, 0, 0))


def _check_alike(plain: nn.Module, sharded: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """The gradients of a loss that is alike on both ranks."""
    loss(plain).backward()
    loss(sharded).backward()
    for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert isinstance(found.grad, ShardTensor)
            assert (found.grad.full_tensor() - expected.grad).abs().max() < 1e-10, name


# --- saving ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_saving_in_other_ways_says_how_to_or_saves_the_whole(tmp_path: Path) -> None:
    folder = tmp_path
    sharded = [towpath.shard(_seeded(build), "zero3", topology=SHAPE) for build in (_llama, _peft)]
    for name, model in zip(("llama", "peft"), sharded, strict=True):
        model.save_pretrained(folder / name / "bare")
        with towpath.full_parameters(model):
            if dist.get_rank() == 0:
                model.save_pretrained(folder / name / "whole")
        whole = towpath.checkpoint.get_model_state_dict(model, options=_ON_RANK_0)
        model.save_pretrained(folder / name / "given", state_dict=whole)  # empty but for rank 0
        dist.barrier()
        assert _rests(model)
    expected = _seeded(_llama).state_dict()
    for way in ("bare", "whole", "given"):
        loaded = type(_llama()).from_pretrained(folder / "llama" / way, dtype=torch.float64).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        adapter = load_file(folder / "peft" / way / "adapter_model.safetensors")
        names = {f".{n.removesuffix('.weight')}.default.weight": value for n, value in adapter.items()}
        trained = {n: p for n, p in _seeded(_peft).named_parameters() if p.requires_grad}
        assert len(names) == len(trained)
        assert all(torch.equal(names[f".{n}"], p) for n, p in trained.items())


_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Saver(Coder):
    """Takes no state dict, as Diffusers' models do not."""

    def save_pretrained(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder)


@on_ranks(2)
def test_any_models_save_pretrained_saves_the_whole_and_fails_on_every_rank(tmp_path: Path) -> None:
    folder = tmp_path
    model: Any = towpath.shard(_seeded(Saver), "zero3", topology=SHAPE)
    model.save_pretrained(folder / "model.pt")
    found, expected = torch.load(folder / "model.pt"), _seeded(Saver).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[n], value) for n, value in expected.items())
    with pytest.raises(TowpathError, match=r"Parent directory .* does not exist"):
        model.save_pretrained(folder / "nowhere" / "model.pt")
    assert _rests(model)


def test_save_pretrained_on_one_rank_alone_is_an_error_on_both() -> None:
    """Long before the process group's time is over, where the other one waits for it in a forward pass; and though that
    one looks only when the first has found out and gone on."""
    with World(2, group_timeout=12.0) as ranks:
        errors = ranks.run(_save_alone)
    words = r"rank 0 is in get_model_state_dict\(\), which every rank must call, while rank 1 waits for a transfer"
    assert all(re.search(words, error) for error in errors), errors


def _save_alone() -> str:
    model: Any = towpath.shard(_seeded(_llama), "zero3", topology=SHAPE)
    peers, store = model.towpath_engine.comm.watchdog, dist.distributed_c10d._get_default_store()
    ids = torch.arange(3, 9)[None]
    model(ids)
    if dist.get_rank() == 0:
        went_on = threading.Event()
        post = peers.post
        peers.post = lambda silent: (post(silent), None if silent else went_on.set())
        with pytest.raises(StepError) as caught:
            model.save_pretrained("nowhere")
        went_on.wait(3 * peers.pause_seconds)  # its note would have been taken back by then
        store.set("rank 0 went on", "")
    else:
        look, looks = peers.look_for_divergence, count()
        peers.look_for_divergence = lambda: next(looks) and (store.wait(["rank 0 went on"]), look())
        with pytest.raises(StepError) as caught:
            model(ids)
    return str(caught.value)


@on_ranks(2)
def test_part_of_a_model_is_whole_and_written_while_the_rest_stays_sharded() -> None:
    twin, rank = Twin(Coder, _loss, "zero3", SHAPE, units=[Block]), dist.get_rank()
    model, plain = twin.sharded, twin.plain
    twin.train(1)
    with towpath.full_parameters(model, [model.blocks[1].norm], modifier_rank=1):
        assert not any(isinstance(p, ShardTensor) for p in model.blocks[1].parameters())
        assert all(isinstance(p, ShardTensor) for p in (*model.blocks[0].parameters(), model.scale))
        with torch.no_grad():
            model.blocks[1].norm.weight.fill_(rank + 2.0)  # what rank 1 writes is taken over
            plain.blocks[1].norm.weight.fill_(3.0)
        with towpath.full_parameters(model):
            assert not any(isinstance(p, ShardTensor) for p in model.parameters())
        assert all(isinstance(p, ShardTensor) for p in (*model.blocks[0].parameters(), model.scale))
        assert not isinstance(model.blocks[1].norm.weight, ShardTensor)
    assert _rests(model)
    twin.train(2)
    twin.check_parameters()
    stranger = Block() if rank else model.blocks[0]  # wrong on one rank is an error on all
    for wrong, words in ((stranger, "got a Block that is none of them"), (model.blocks[rank], "the same modules on")):
        with pytest.raises(ShardError, match=words), towpath.full_parameters(model, [wrong]):
            pass
    assert _rests(model)


# --- parameters in the loss, and derivatives of derivatives ----------------------------------------------------------

REGULARISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum of squares": lambda p: p.square().sum(),
    "sum of absolutes": lambda p: p.abs().sum(),
    "norm": lambda p: p.norm(),
    "norm of no order": lambda p: torch.ops.aten.norm.ScalarOpt_dtype(p, None, dtype=torch.float64),
    "1-norm": lambda p: torch.linalg.vector_norm(p, 1),
    "mean": lambda p: p.pow(2).mean(),
    "plain sum": lambda p: p.sum(),
    "plain mean": lambda p: p.mean() + (-p).sum() + p.mean(),
    "largest": lambda p: p.abs().amax() + torch.linalg.vector_norm(p.clamp(-0.1, 0.1), float("inf")),
    "keepdim": lambda p: p.square().mean(tuple(range(p.dim())), keepdim=True).sum(),
    "drift": lambda p: ((p - p.detach().mul(0.5)) ** 2).sum(),
}


@on_ranks(2)
def test_a_whole_tensor_in_the_loss_gets_the_mean_gradient_of_all_ranks() -> None:
    for label in (*LABELS, "ddp"):
        twin = Twin(Coder, _orthogonal, label, SHAPE)
        for step in range(2):
            twin.backward(step, micro_steps=2)
            twin.check_gradients()
            twin.step()
        twin.check_parameters()


def _orthogonal(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    """What is computed with the whole tensor differs between the ranks."""
    matrices = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters() if p.dim() == 2]
    return _loss(model, rank, micro, step) + (1 + rank) * sum((m @ m.T).square().mean() for m in matrices)


PENALTIES: dict[str, Callable[[Tensor, int, list[nn.Parameter]], Any]] = {
    **{
        name: lambda loss, rank, ps, of=of: loss + 0.1 * (1 + rank) * sum(of(p) for p in ps)
        for name, of in REGULARISERS.items()
    },
    "loss times sum": lambda loss, rank, ps: loss * (1 + sum(p.square().sum() for p in ps)),
    "sum of matrices": lambda loss, rank, ps: loss + (1 + rank) * sum(p.abs().mean() for p in ps if p.dim() == 2),
    "norm of norms": lambda loss, rank, ps: loss + (1 + rank) * torch.stack([p.norm() for p in ps]).norm(),
    "largest": lambda loss, rank, ps: loss * (1 + ps[0].max() - ps[1].min()),
    "plain mean": lambda loss, rank, ps: loss + (1 + rank) * (ps[0].mean() + ps[1].abs().amax()),
    "hook": lambda loss, rank, ps: loss + (1 + rank) * _hooked(ps[0].square().sum()),
    "sums in place": lambda loss, rank, ps: _sum_in_place(loss, rank, ps),
    "norms in place": lambda loss, rank, ps: _sum_norms_in_place(loss, rank, ps),
}


def _sum_in_place(loss: Tensor, rank: int, parameters: list[nn.Parameter]) -> Tensor:
    first, second, third, fourth = (p.square().sum() for p in parameters[:4])
    first += second
    first *= 1 + rank
    first.clamp_(min=0.0)
    with torch.no_grad():
        third += 1.0
    fourth += (1 + rank) * loss
    return (1 + rank) * (torch.stack([first, fourth]).sum() + third * fourth)


def _sum_norms_in_place(loss: Tensor, rank: int, parameters: list[nn.Parameter]) -> Tensor:
    total: Any = 0.0
    for parameter in parameters:
        total += parameter.norm()
    norm = parameters[0].norm().clone()  # PyTorch needs the norm itself in the backward pass
    early = (1 + rank) * norm
    norm += parameters[1].norm()
    norm += loss
    return (1 + rank) * (total + norm) + early


def _hooked(value: Tensor) -> Tensor:
    value.register_hook(lambda gradient: 2 * gradient)
    return value


@in_turn([*LABELS, "ddp", "mics:2x1"], 2)
@on_ranks(2)
def test_a_penaltys_factor_may_differ_between_the_ranks(label: str) -> None:
    twin = Twin(Coder, _penalty, label, towpath.Topology(1, 2))
    for step in range(len(PENALTIES)):
        twin.backward(step, micro_steps=2)
        twin.check_gradients()
        for model in (twin.plain, twin.sharded):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        twin.check_gradients()
        twin.step()
    twin.check_parameters()


def _penalty(model: nn.Module, rank: int, micro: int, step: int) -> Tensor:
    penalize = list(PENALTIES.values())[step]
    return penalize(_loss(model, rank, micro, step), rank, list(model.parameters()))


@on_ranks(2)
def test_sums_over_parameters_sharded_unlike_count_each_once() -> None:
    model = Coder().double()
    model.blocks[0].requires_grad_(False)
    expected = sum(p.detach().square().sum() for p in model.parameters())
    topology = towpath.Topology(1, 2)
    towpath.shard(model, towpath.strategy("zero3", topology, frozen=towpath.Extent(1)))
    found: Any = sum(p.square().sum() for p in model.parameters())
    assert found.item() == pytest.approx(expected.item(), abs=1e-12)


@on_ranks(2)
def test_a_gradient_penalty_is_exact_where_weights_are_whole_and_refused_elsewhere() -> None:
    for label, whole in (("zero3", True), ("ddp", False)):
        twin = Twin(Coder, _penalised, label, SHAPE)
        for step in range(4):
            with towpath.full_parameters(twin.sharded) if whole and step < 2 else nullcontext():
                twin.backward(step)
            twin.check_gradients()
            twin.step()
        twin.check_parameters()
        refused = pytest.raises(StepError, match=r"its gradient has a graph.*autograd.grad\(loss, inputs, create_graph")
        with towpath.full_parameters(twin.sharded), refused:
            _loss(twin.sharded, 0, 0, 0).backward(create_graph=True)


def _penalised(model: Any, rank: int, micro: int, step: int) -> Tensor:
    """For two steps; then as any other model is trained."""
    x = noise(rank, micro, step).requires_grad_()
    loss = model(x).square().mean()
    if step >= 2:
        return loss
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum() + model(x).mean()


@on_ranks(2)
def test_autograd_grad_of_parameters_is_refused_with_what_gives_the_mean() -> None:
    for label in LABELS:
        twin = Twin(lambda: nn.Sequential(Block(), Block()), _loss, label, SHAPE)
        parameters = list(twin.sharded.parameters())
        for unused in (False, True):
            with twin.sharded.no_sync(), pytest.raises(ShardError, match=r"backward\(inputs=parameters"):
                torch.autograd.grad(_loss(twin.sharded, 0, 0, 0), parameters, allow_unused=unused)
        penalty = sum(p.square().sum() for p in parameters)
        for p, gradient in zip(parameters, torch.autograd.grad(penalty, parameters), strict=True):
            assert torch.equal(gradient.to_local(), 2 * p.to_local())
        with pytest.raises(RuntimeError, match="allow_unused"):
            torch.autograd.grad(parameters[0].square().sum(), parameters[:2])
        twin.train(2)
        twin.check_parameters()


@on_ranks(2)
def test_a_second_derivative_of_released_weights_is_refused_with_the_way_out() -> None:
    model = towpath.shard(Coder().double(), "zero3", topology=SHAPE)
    x = noise(0, 0, 0).requires_grad_()
    with pytest.raises(StepError, match=r"unit 'root': .*create_graph=True.*with towpath.full_parameters\(model\)"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


# --- mixed precision -------------------------------------------------------------------------------------------------


class Convolutions(nn.Module):
    """With running statistics, and with a spectral norm: both have fp32 buffers that bf16 does not go with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 4, 3, bias=False))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.SiLU()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


@on_ranks(2)
def test_modules_kept_in_their_own_dtype_compute_in_it_beside_bf16() -> None:
    torch.manual_seed(7)
    plain, sharded = Convolutions(), Convolutions()
    sharded.load_state_dict(plain.state_dict())
    keep = (nn.BatchNorm2d, "_SpectralNorm")
    precision = towpath.Precision(params=torch.bfloat16, keep=keep)
    schedule = towpath.schedule(towpath.strategy("zero3", SHAPE), plain, precision=precision)
    towpath.shard(sharded, "zero3", topology=SHAPE, precision=precision)
    assert towpath.schedule(towpath.strategy("zero3", SHAPE), sharded) == schedule
    dtypes = {t.dtype for t in schedule.transfers if t.bucket == "float32 kept"}
    assert dtypes == {"float32"} and "bfloat16" in {t.dtype for t in schedule.transfers if t.bucket == "float32"}

    _compute_as_kept(plain)
    pixels = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)
    for model in (plain, sharded):
        model(pixels.bfloat16()).float().square().mean().backward()
    _check_kept(plain, sharded)


def _compute_as_kept(model: Any) -> None:
    """By hand, with plain modules: matrices in bf16, norms in fp32."""
    for module in model.modules():
        kept = isinstance(module, nn.BatchNorm2d) or type(module).__name__ == "_SpectralNorm"
        for parameter in () if kept else module.parameters(recurse=False):
            parameter.data = parameter.data.bfloat16()
        if kept:
            module.register_forward_pre_hook(lambda _, inputs: tuple(x.float() for x in inputs))
            module.register_forward_hook(lambda _, __, output: output.bfloat16())


def _check_kept(plain: Any, sharded: Any) -> None:
    """Bit for bit: the same operations on the same numbers."""
    for (name, expected), found in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        grad = found[1].grad
        assert isinstance(grad, ShardTensor) and grad.dtype == torch.float32
        assert torch.equal(grad.full_tensor(), expected.grad.float()), name
    for (name, expected), found in zip(plain.named_buffers(), sharded.buffers(), strict=True):
        assert torch.equal(found, expected.to(found.dtype)), name


@on_ranks(2)
def test_what_keep_does_not_find_is_refused() -> None:
    def shard(model: nn.Module, keep: Any) -> None:
        towpath.shard(model, "zero3", topology=SHAPE, precision=towpath.Precision(params="bfloat16", keep=keep))

    with pytest.raises(ShardError, match="no module matches BatchNorm3d; the model has BatchNorm2d"):
        shard(Convolutions(), "BatchNorm3d")
    with pytest.raises(ShardError, match=r"tokens.weight and head.weight are one parameter"):
        shard(TiedGPT(), ("head",))
    shard(TiedGPT(), ("head", nn.Embedding))
