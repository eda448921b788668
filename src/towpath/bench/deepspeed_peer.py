"""DeepSpeed's ZeRO as a contestant: 'deepspeed stage=3', also with hpz, quantized or tuned.

It need not be installed beside Towpath: `TOWPATH_DEEPSPEED` may name a folder that pip has put it in, so that nothing
that Towpath runs with is replaced:

    pip install --target ~/deepspeed --no-deps -r benchmarks/deepspeed.txt
    TOWPATH_DEEPSPEED=~/deepspeed towpath bench strategies --contestants 'mics,deepspeed tuned stage=3'

    stage=1, 2, 3   what is sharded: the optimizer's states, gradients too, parameters too
    hpz             stage 3 keeps a copy of the parameters in each node for the backward pass (ZeRO++)
    quantized       and sends weights in int8 and gradients in int4 (ZeRO++); its kernels need a GPU
    tuned           messages of a size that suits the model, and a block prefetched ahead; as it comes they are
                    hundreds of megabytes

On a CPU it has no streams, and so waits for every message: nothing overlaps with the computation. It is made for GPUs.
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

from towpath.auto.probe import device_of_job
from towpath.bench.workload import Workload
from towpath.errors import ConfigError

FOLDER = "TOWPATH_DEEPSPEED"
OPTIONS = ("stage", "hpz", "quantized", "tuned")
STAGES = ("1", "2", "3")
_BUCKET_ELEMENTS = 4 << 20  # of tuned ones: 8 MiB in bf16, as of DDP's buckets


def installed() -> bool:
    """Whether it can be imported, here or from the folder."""
    folder = os.environ.get(FOLDER)
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)  # the last: what both have is Towpath's
    return find_spec("deepspeed") is not None


def check_installed() -> None:
    if not installed():
        raise ConfigError(
            "DeepSpeed is not installed. Run pip install --target FOLDER --no-deps -r benchmarks/deepspeed.txt and set "
            f"{FOLDER}=FOLDER, or leave out the contestants whose names begin with deepspeed."
        )


def check_options(options: Mapping[str, str]) -> None:
    stage = options.get("stage")
    if stage not in STAGES:
        raise ValueError(f"deepspeed: stage={stage}; expected stage={', '.join(STAGES[:-1])} or {STAGES[-1]}.")
    if stage != "3" and {"hpz", "quantized"} & set(options):
        raise ValueError("deepspeed: hpz and quantized are of stage=3.")


def build(options: Mapping[str, str], workload: Workload) -> Any:
    """Its engine. It clips, steps and zeroes by itself (`stepper`)."""
    check_options(options)
    device = device_of_job()
    if "quantized" in options and device.type != "cuda":
        raise ValueError("deepspeed: quantized needs a GPU: its kernels are CUDA's.")
    check_installed()
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    warnings.filterwarnings("ignore", module="deepspeed")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.utils.logger.setLevel(logging.ERROR)  # it logs its whole configuration
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # for inference, and compiled when it is first asked for
    model = workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=_configuration(options, workload), dist_init_required=False
    )
    return engine


def _configuration(options: Mapping[str, str], workload: Workload) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": int(options["stage"]), "overlap_comm": True, "contiguous_gradients": True}
    if "tuned" in options:
        zero |= {"reduce_bucket_size": _BUCKET_ELEMENTS, "allgather_bucket_size": _BUCKET_ELEMENTS}
        if options["stage"] == "3":
            block = 12 * workload.width**2  # the elements of one, nearly
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
    """One optimizer step: it divides the loss, and knows which micro-step is the last."""

    def step() -> None:
        for _ in range(micro_steps):
            engine.backward(engine(*next(data)))
            engine.step()

    return step
