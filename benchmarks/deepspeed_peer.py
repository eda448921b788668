"""DeepSpeed's ZeRO as a candidate: 'deepspeed stage=3', also with hpz, quantized or tuned.

DeepSpeed can be installed into a folder of its own, which `TOWPATH_DEEPSPEED` names. It then replaces none of Towpath's
packages:

    pip install --target ~/deepspeed --no-deps -r benchmarks/deepspeed.txt
    TOWPATH_DEEPSPEED=~/deepspeed python -m benchmarks strategies --candidates 'mics,deepspeed tuned stage=3'

    stage=1, 2, 3   shards the optimizer states, also gradients, also parameters
    hpz             stage 3 keeps a copy of the parameters in each node for the backward pass (ZeRO++)
    quantized       sends weights in int8 and gradients in int4 (ZeRO++); its kernels need a GPU
    tuned           messages of a size that suits the model, and prefetching of one block; its defaults are hundreds of
                    megabytes

DeepSpeed is made for GPUs. On a CPU it has no streams, so it waits for every message, and nothing overlaps.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.workload import Workload
from towpath.errors import ConfigError
from towpath.plan.cluster_probe import device_of_job

FOLDER = "TOWPATH_DEEPSPEED"
OPTIONS = ("stage", "hpz", "quantized", "tuned")
STAGES = ("1", "2", "3")
_BUCKET_ELEMENTS = 4 << 20  # 8 MiB in bf16, as the tuned DDP's buckets


def installed() -> bool:
    """Return whether DeepSpeed can be imported, from this environment or from the folder."""
    folder = os.environ.get(FOLDER)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # at the end, so that Towpath's packages come first
    return find_spec("deepspeed") is not None


def check_installed() -> None:
    """Raise `ConfigError` if DeepSpeed cannot be imported."""
    if not installed():
        raise ConfigError(
            "DeepSpeed is not installed. Run pip install --target FOLDER --no-deps -r benchmarks/deepspeed.txt and set "
            f"{FOLDER}=FOLDER, or leave out the candidates whose names start with deepspeed."
        )


def check_options(options: Mapping[str, str]) -> None:
    """Raise `ValueError` for options that DeepSpeed does not have."""
    stage = options.get("stage")
    if stage not in STAGES:
        raise ValueError(f"deepspeed: stage={stage}; expected stage={', '.join(STAGES[:-1])} or {STAGES[-1]}.")
    if stage != "3" and {"hpz", "quantized"} & set(options):
        raise ValueError("deepspeed: hpz and quantized need stage=3.")


def build(options: Mapping[str, str], workload: Workload) -> Any:
    """Return DeepSpeed's engine, which clips, steps and zeroes by itself."""
    check_options(options)
    device = device_of_job()
    if "quantized" in options and device.type != "cuda":
        raise ValueError("deepspeed: quantized needs a GPU: its kernels are written in CUDA.")
    check_installed()
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    warnings.filterwarnings("ignore", module="deepspeed")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)  # otherwise it logs its whole configuration
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # it is for inference, and would be compiled here
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_configuration(options, workload), dist_init_required=False
    )
    return engine


def _configuration(options: Mapping[str, str], workload: Workload) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": int(options["stage"]), "overlap_comm": True, "contiguous_gradients": True}
    if "tuned" in options:
        zero |= {"reduce_bucket_size": _BUCKET_ELEMENTS, "allgather_bucket_size": _BUCKET_ELEMENTS}
        if options["stage"] == "3":
            block = 12 * workload.width**2  # about the elements of one block
            zero |= {"stage3_prefetch_bucket_size": block, "stage3_max_live_parameters": 3 * block}
    if "hpz" in options:
        zero["zero_hpz_partition_size"] = workload.topology.ranks_per_node
    if "quantized" in options:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": workload.batch,
        "gradient_accumulation_steps": workload.micro_steps,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": workload.dtype == "bfloat16"},
        "fp16": {"enabled": workload.dtype == "float16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }


def stepper(engine: Any, data: Any, micro_steps: int) -> Callable[[], None]:
    """Return a function that takes one optimizer step. DeepSpeed scales the loss and counts the micro-steps."""

    def step() -> None:
        for _ in range(micro_steps):
            engine.backward(engine(*next(data)))
            engine.step()

    return step
