"""The models of `towpath train`: they train as plain PyTorch does, and start from files as they stand there.

Functions whose names begin with an underscore run on every rank.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import towpath
from tests.ranks.models import VOCABULARY, gpt2_config, llama_config
from tests.ranks.server import World, run_ranks
from tests.ranks.strategies import in_turn, seldom, strategy_of
from towpath import Topology
from towpath.train.config import ModelConfig
from towpath.train.models import bundle
from towpath.train.models.bundle import ModelBundle, build_model

Worlds = Callable[[int], World]

SHAPE = Topology(2, 2)
LENGTH, STEPS = 8, 30
OURS = ModelConfig(width=16, depth=2, heads=4)


def _config(kind: str) -> Any:
    if kind == "gpt2":
        return gpt2_config(LENGTH, architectures=["GPT2LMHeadModel"])
    return llama_config(LENGTH, bos_token_id=None, eos_token_id=None, architectures=["LlamaForCausalLM"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A config.json of each kind."""
    made: dict[str, Path] = {}
    for kind in ("llama", "gpt2"):
        made[kind] = tmp_path_factory.mktemp(kind)
        _config(kind).save_pretrained(made[kind])
    return made


# --- training --------------------------------------------------------------------------------------------------------


def _batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1 + rank + 10 * step)
    rows = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    return rows[:, :-1], rows[:, 1:]


def _plain_loss(model: Any, rank: int, step: int) -> Tensor:
    """As one writes it without us."""
    inputs, targets = _batch(rank, step)
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-5, weight_decay=0.1)


# Thirty steps. In float64 sums are taken in another order, nothing else differs: 1e-16, and AdamW may raise it by 1e5.
# Llama computes its norms and its rotary tables in fp32 whatever the dtype is: there, what differs by 1e-16 before may
# differ by 6e-8 after, and AdamW with eps = 1e-5 makes of that some 1e-5 in thirty steps of 2e-3.
TOLERANCE = {"gpt2": 1e-9, "ours": 1e-9, "llama": 2e-5}


@pytest.mark.parametrize(
    "kind, label",
    [
        seldom("llama", "paro-iig"),
        ("ours", "paro-iig"),
        *(
            seldom(*case)
            for case in (
                ("llama", "zero3"),
                ("gpt2", "zero3"),
                ("gpt2", "paro-iig"),
                ("ours", "zero3"),
            )
        ),
    ],
)
def test_training_is_that_of_plain_pytorch(
    world: Worlds, folders: dict[str, Path], kind: str, label: str, whole_product: bool
) -> None:
    config = ModelConfig(hf=str(folders[kind])) if kind in folders else OURS
    steps = STEPS if whole_product else 10
    for losses, expected, distance in world(4).run(_train_both, config, label, steps):
        assert len(losses) == steps
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= TOLERANCE[kind]
        assert distance <= TOLERANCE[kind]


def _train_both(config: ModelConfig, label: str, steps: int) -> tuple[list[float], list[float], float]:
    """The mean losses of ours and of one process, and how far apart their parameters are in the end."""
    built = build_model(config, VOCABULARY)
    torch.manual_seed(3)
    sharded: Any = towpath.shard(built.model.double(), strategy_of(label, SHAPE))
    plain = _plain_twin(config, {name: p.full_tensor().detach() for name, p in sharded.named_parameters()})
    optimizers = [_optimizer(sharded), _optimizer(plain)]
    losses: list[float] = []
    expected: list[float] = []
    for step in range(steps):
        loss = bundle.next_token_loss(sharded, *_batch(dist.get_rank(), step))
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 4)
        expected.append(0.0)
        for rank in range(4):
            loss = _plain_loss(plain, rank, step) / 4
            loss.backward()
            expected[-1] += loss.item()
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return losses, expected, max((a.full_tensor() - b.detach()).abs().max().item() for a, b in pairs)


def _plain_twin(config: ModelConfig, values: dict[str, Tensor]) -> nn.Module:
    """Made on a real device, by its own constructor."""
    if config.hf:
        from transformers import AutoConfig, AutoModelForCausalLM

        plain: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.hf))
    else:
        plain = type(build_model(config, VOCABULARY).model)(build_model(config, VOCABULARY).model.shape)
    plain.double()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
    return plain


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_new_weights_are_drawn_as_transformers_draws_them(world: Worlds, folders: dict[str, Path], kind: str) -> None:
    for spreads in world(4).run(_spreads, str(folders[kind])):
        for name, (found, expected) in spreads.items():
            # Both are standard deviations of at least some hundred draws, or of constants.
            assert found == pytest.approx(expected, rel=0.35), name


def _spreads(folder: str) -> dict[str, tuple[float, float]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(dist.get_rank())
    sharded: Any = towpath.shard(build_model(ModelConfig(hf=folder), VOCABULARY).model, "zero3", topology=SHAPE)
    plain: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for name, buffer in plain.named_buffers():
        assert torch.equal(sharded.get_buffer(name), buffer), name
    found = {name: p.full_tensor().detach() for name, p in sharded.named_parameters()}
    return {
        name: (found[name].square().mean().sqrt().item(), p.detach().square().mean().sqrt().item())
        for name, p in plain.named_parameters()
    }


# --- checkpointing, compiling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", seldom("ours"), seldom("gpt2")])
def test_checkpointing_changes_no_gradient(world: Worlds, folders: dict[str, Path], kind: str) -> None:
    config = ModelConfig(hf=str(folders[kind])) if kind in folders else OURS
    assert all(world(4).run(_checkpointed_alike, config))


def _checkpointed_alike(config: ModelConfig) -> bool:
    gradients: list[list[Tensor]] = []
    for checkpointed in (False, True):
        built = build_model(config, VOCABULARY)
        if checkpointed:
            bundle.checkpoint_blocks(built)
        torch.manual_seed(3)
        model: Any = towpath.shard(built.model, "zero3", topology=SHAPE)
        bundle.next_token_loss(model, *_batch(dist.get_rank(), 0)).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.compiles
@pytest.mark.parametrize(
    "order", [seldom("compiled"), seldom("compiled, checkpointed"), seldom("checkpointed, compiled")]
)
def test_compiled_blocks_share_one_graph_and_train_alike(world: Worlds, order: str) -> None:
    for graphs, distance in world(2).run(_compiled_alike, order):
        assert graphs == 1  # for ten blocks, two more than torch.compile makes graphs of one function
        assert distance <= 1e-12  # float64, and the compiler may reorder sums


def _compiled_alike(order: str) -> tuple[int, float]:
    ways: dict[str, Callable[[ModelBundle], None]] = {
        "compiled": lambda built: bundle.compile_blocks(built, backend="aot_eager", fullgraph=True),
        "checkpointed": bundle.checkpoint_blocks,
    }
    config = replace(OURS, depth=10)
    gradients: list[list[Tensor]] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for names in ((), order.split(", ")):
        built = build_model(config, VOCABULARY)
        for name in names:
            ways[name](built)
        torch.manual_seed(3)
        model: Any = towpath.shard(built.model.double(), "zero3", topology=towpath.Topology(2, 1))
        with warnings.catch_warnings():
            # It looks at the .grad of a block's input, and hides the warning in a way that does not work for errors.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            bundle.next_token_loss(model, *_batch(dist.get_rank(), 0)).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    return graphs, max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))


# --- weights from files ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama of transformers in one file and in several, in fp32 and in bf16."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(5)
    model = LlamaForCausalLM(_config("llama"))
    made = {name: tmp_path_factory.mktemp(name) for name in ("one", "several", "bf16")}
    model.save_pretrained(made["one"])
    model.save_pretrained(made["several"], max_shard_size="3KB")
    assert len(list(made["several"].glob("*.safetensors"))) > 2
    model.to(torch.bfloat16).save_pretrained(made["bf16"])
    return made


@in_turn(["zero3", "paro-iig", "mics:2x1", "ddp"], 1)
@pytest.mark.parametrize("stored", [seldom("one"), "several", "bf16"])
def test_what_is_sharded_is_what_the_files_hold(
    world: Worlds, weights: dict[str, Path], stored: str, label: str
) -> None:
    config = ModelConfig(hf=str(weights[stored]), weights=str(weights[stored]))
    params = torch.bfloat16 if stored == "several" else None
    for wrong in world(4).run(_compare_with_files, config, label, params):
        assert not wrong


def _compare_with_files(config: ModelConfig, label: str, params: torch.dtype | None) -> list[str]:
    from transformers import AutoModelForCausalLM

    built = build_model(config, VOCABULARY)
    precision = towpath.Precision(params=params)
    model: Any = towpath.shard(built.model, strategy_of(label, SHAPE), precision=precision, values=built.values)
    stored: Any = AutoModelForCausalLM.from_pretrained(config.weights, dtype=torch.float32)
    (inputs, _), computes = _batch(dist.get_rank(), 0), params or torch.float32
    with torch.no_grad():
        found, expected = bundle.logits_of(model, inputs), stored.to(computes)(inputs).logits
    # The norms' weights are rounded alike; but the rotary table of a model that was cast as a whole is not ours.
    close = torch.equal(found, expected) if params is None else (found - expected).abs().max().item() < 0.1
    stored = AutoModelForCausalLM.from_pretrained(config.weights, dtype=torch.float32)
    pairs = zip(model.named_parameters(), stored.parameters(), strict=True)
    wrong = [name for (name, p), q in pairs if not torch.equal(p.full_tensor().detach(), q.detach())]
    return wrong if close else [*wrong, "logits"]


def test_ours_loads_what_transformers_saved_and_computes_the_same(world: Worlds, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = LlamaConfig(**{k: v for k, v in build_model(OURS, VOCABULARY).config_json.items() if k != "model_type"})
    LlamaForCausalLM(made).save_pretrained(tmp_path)
    for distance in world(4).run(_ours_against_llama, str(tmp_path)):
        # The same sums in fp32, in another order: some ten roundings of 6e-8 of logits of order 1.
        assert distance <= 2e-6


def _ours_against_llama(folder: str) -> float:
    from transformers import AutoModelForCausalLM

    built = build_model(replace(OURS, weights=folder), VOCABULARY)
    model = towpath.shard(built.model, "zero3", topology=SHAPE, values=built.values)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs, _ = _batch(dist.get_rank(), 0)
    with torch.no_grad():
        return (bundle.logits_of(model, inputs) - bundle.logits_of(theirs, inputs)).abs().max().item()


# --- memory ----------------------------------------------------------------------------------------------------------

LARGE = {"width": 512, "depth": 12, "heads": 8}  # 40 million parameters


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_model(ModelConfig(**LARGE), 1024)
    file = tmp_path_factory.mktemp("large") / "model.safetensors"
    save_file({built.names[name]: torch.zeros(p.shape) for name, p in built.model.named_parameters()}, file)
    return file


@pytest.mark.parametrize("how", ["loaded", "drawn"])
def test_to_start_a_rank_needs_its_share_and_one_unit(large: Path, how: str) -> None:
    """On new ranks, whose heaps have no room of earlier tests to be filled unseen."""
    for peak, share, unit in run_ranks(_peak_of_a_start, 4, str(large) if how == "loaded" else ""):
        # A little is filled into what the heap had free.
        assert 0.9 * share <= peak <= 0.3 * 4 * share + unit


def _peak_of_a_start(weights: str) -> tuple[int, int, int]:
    """The peak of RssAnon above its level before, this rank's share of the model, and the largest unit, in bytes."""
    towpath.shard(build_model(OURS, VOCABULARY).model, "zero3", topology=SHAPE)  # what torch imports late is there now
    before = peak = _rss_anon()
    over = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not over.wait(0.002):
            peak = max(peak, _rss_anon())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        built = build_model(ModelConfig(**LARGE, weights=weights), 1024)
        model: Any = towpath.shard(built.model, "zero3", topology=SHAPE, values=built.values)
    finally:
        over.set()
        sampler.join()
    units = [sum(b.plan.numel for b in unit.buckets) for unit in model.towpath_engine.units]
    return max(peak, _rss_anon()) - before, built.parameters, 4 * max(units)


def _rss_anon() -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
