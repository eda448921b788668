"""Measure the memory that ranks take to load and shard a Hugging Face model of 1.3 billion parameters.

    loading [CASE …] [--folder FOLDER] [--quick]

Two ranks load a Llama with random weights from safetensors files in bf16, and shard it in fp32. They then run one
forward and backward pass. The peak is the kernel's (VmHWM in /proc/self/status), above the level before loading. It
includes the pages of the files that a rank has read, which the kernel may drop. "without file pages" is sampled
(RssAnon), every 2 ms.

    trainer, rank 0      Trainer; rank 0 loads, the meta device elsewhere
    trainer, folder      Trainer; Sharding(values=folder), meta everywhere
    trainer, every rank  Trainer; every rank loads
    fsdp2, rank 0        fully_shard(); rank 0 loads, meta elsewhere
    fsdp2, files         fully_shard(); HuggingFaceStorageReader

To load is `from_pretrained()`. `fsdp2, rank 0` is filled by the function of Accelerate for `cpu_ram_efficient_loading`.
Accelerate itself ignores its FSDP plugin on CPU ranks, so the peers are `fully_shard` and these functions.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lab
import towpath
from benchmarks.harness.figures import Check
from benchmarks.harness.suite import Settings, Suite
from benchmarks.suites.memory import add_folder, watched
from towpath.checkpoint.safe_files import Safetensors
from towpath.integrations import Sharding

SHAPE = towpath.Topology(2, 1)
LENGTH = 16
MODEL = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16}
QUICK_MODEL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
WARM = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

# Returns the sharded model on a rank, given the folder and the rank.
Load = Callable[[Path, int], Any]


@dataclass(frozen=True, slots=True)
class LoadingCase:
    """One way to load the model, on both ranks."""

    name: str

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Load the model in new processes."""
        with tempfile.TemporaryDirectory(dir=settings.options.folder) as temporary:
            folder, warm = Path(temporary, "model"), Path(temporary, "warm")
            write(folder, QUICK_MODEL if settings.quick else MODEL)
            write(warm, WARM)
            with lab.Lab(SHAPE, inter=None) as cluster:
                ranks = cluster.call(measure, self.name, folder, warm, timeout_seconds=1800)
        most = {key: [rank[key] for rank in ranks] for key in ("loading", "with_a_step", "without_file_pages")}
        whole = ranks[0]["model_bytes"]
        return {
            "checks": [
                Check("rank 0: peak bytes of loading", most["loading"][0]),
                Check("rank 1: peak bytes of loading", most["loading"][1]),
                Check("rank 0: without file pages", most["without_file_pages"][0]),
                Check("rank 1: without file pages", most["without_file_pages"][1]),
                Check("peak bytes with a step", max(most["with_a_step"])),
                Check("peak of loading / bytes of the model in fp32", max(most["loading"]) / whole),
            ],
            "model_bytes": whole,
            **most,
        }


def write(folder: Path, size: dict[str, int]) -> None:
    """Write a model with random weights as several safetensors files in bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32_000, max_position_embeddings=256, **size)
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="500MB")


def measure(rank: int, world: int, name: str, folder: Path, warm: Path) -> dict[str, int]:
    """Load the model on one rank, and return the memory that it took."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    torch.set_num_threads(1)
    load = LOADS[name]
    step(load(warm, rank))  # imports the rest, and makes process groups
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
    level = status("VmRSS")
    model, private, _ = watched(lambda: load(folder, rank))
    loading = status("VmHWM") - level
    step(model)
    both = status("VmHWM") - level
    verify(model, Safetensors(folder))
    return {
        "model_bytes": 4 * sum(p.numel() for p in model.parameters()),
        "loading": loading,
        "with_a_step": both,
        "without_file_pages": private,
    }


def verify(model: nn.Module, weights: Safetensors) -> None:
    """Check that every parameter is in fp32 and has its values."""
    for name, parameter in model.named_parameters():
        full: Any = parameter.full_tensor()  # pyright: ignore
        assert full.dtype == torch.float32, name
        assert torch.equal(full.view(-1), weights.values(name, 0, full.numel()).float()), name


def step(model: nn.Module) -> None:
    """Run one forward and backward pass."""
    ids = torch.arange(LENGTH)[None]
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    model.zero_grad()


def status(field: str) -> int:
    """Return a field of this process's status in bytes."""
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


# Loading --------------------------------------------------------------------------------------------------------------


def pretrained(folder: Path, device: str) -> Any:
    """Return the model with fp32 parameters on a device, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map=device)


def by_trainer(model: Any, sharding: Sharding) -> Any:
    """Return the model as our Trainer shards it."""
    import transformers

    from towpath.integrations.transformers import Trainer

    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(output_dir=folder, use_cpu=True, report_to="none", optim="sgd")
        trainer = Trainer(model, args, strategy=sharding)
        trainer.create_optimizer()
        return trainer.model


def fully_sharded(model: Any) -> Any:
    """Return a model on the meta device as FSDP2 shards it, with memory but without values."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp2_from_rank_0(folder: Path, rank: int) -> Any:
    """Return FSDP2's model with what rank 0 has loaded, as Accelerate fills it."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    model = pretrained(folder, "meta" if rank else "cpu")
    full, buffers = model.state_dict(), dict(model.named_buffers())
    model = fully_sharded(model.to("meta"))
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=rank == 0), model, full)
    return with_buffers(model, buffers)


def fsdp2_from_files(folder: Path, rank: int) -> Any:
    """Return FSDP2's model, whose parts each rank has read from the files."""
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = fully_sharded(pretrained(folder, "meta"))
    model.to_empty(device="cpu")
    state = model.state_dict()
    checkpoint.load(state, storage_reader=HuggingFaceStorageReader(str(folder)))
    model.load_state_dict(state, assign=True)
    return with_buffers(model, {})


def with_buffers(model: Any, buffers: dict[str, torch.Tensor]) -> Any:
    """Return the model with rotary frequencies, which no file has, from rank 0 or by transformers."""
    for name, buffer in model.named_buffers():
        path, _, attribute = name.rpartition(".")
        found = buffers.get(name, buffer)
        value = torch.empty_like(buffer, device="cpu") if found.is_meta else found
        setattr(model.get_submodule(path), attribute, value)
    for module in model.modules():
        if "Rotary" in type(module).__name__:
            model._init_weights(module)
    return model


LOADS: dict[str, Load] = {
    "trainer, rank 0": lambda folder, rank: by_trainer(
        pretrained(folder, "meta" if rank else "cpu"), Sharding("zero3")
    ),
    "trainer, folder": lambda folder, rank: by_trainer(pretrained(folder, "meta"), Sharding("zero3", values=folder)),
    "trainer, every rank": lambda folder, rank: by_trainer(pretrained(folder, "cpu"), Sharding("zero3")),
    "fsdp2, rank 0": fsdp2_from_rank_0,
    "fsdp2, files": fsdp2_from_files,
}

SUITES = (Suite("loading", __doc__ or "", [LoadingCase(name) for name in LOADS], options=add_folder),)
