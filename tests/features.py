"""Which feature each file of tests is about. Cases of tests/gpu name one of the same features.

A file belongs to one feature, or to `OTHER`: tools, documentation, benchmarks, and `towpath train` as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """A part of Towpath that people ask about, and the files of tests that cover it."""

    name: str
    files: tuple[str, ...]


def _files(**names: str) -> tuple[str, ...]:
    """Return paths by folder: `ranks="exact"` is tests/ranks/test_exact.py."""
    return tuple(f"tests/{folder}/test_{name}.py" for folder, text in names.items() for name in text.split())


FEATURES = (
    Feature(
        "strategies and placements",
        _files(
            lab="bytes",
            order="order",
            ranks="""
                around_the_loop behind_the_engine collective_forms engine_promises entry_points events
                foretold_memory from_fsdp2 launches leaves mesh never_silent one_rank optimizers
                parity schedule_is_executed steady uneven values
            """,
            unit="""
                blocks communicators executor launch_counts leaves placement schedule step strategies
                transitions trial_steps units
            """,
        ),
    ),
    Feature(
        "routes",
        _files(
            lab="racks routes",
            ranks="routes",
            unit="cells racks route_bytes route_phases routes sends",
        ),
    ),
    Feature(
        "codec kernels",
        _files(
            unit="codecs native_codecs registered_codecs top_k triton_codecs",
        ),
    ),
    Feature(
        "compressed training",
        _files(
            ranks="codecs encoded_training low_rank",
            unit="encoded_transports low_rank",
        ),
    ),
    Feature(
        "exact transport",
        _files(
            ranks="exact exact_features",
            unit="exact_codecs exact_transports",
        ),
    ),
    Feature(
        "outer steps",
        _files(
            ranks="outer outer_checkpoints outer_faults outer_features train_outer",
            unit="outer",
        ),
    ),
    Feature(
        "offload of weights and optimizer",
        _files(
            ranks="offload",
            unit="offload",
        ),
    ),
    Feature(
        "offload of activations",
        _files(
            ranks="offloaded_activations",
            unit="saved_activations",
        ),
    ),
    Feature(
        "mixed precision and loss scaling",
        _files(
            ranks="precision",
        ),
    ),
    Feature(
        "matrix optimizers (Muon, Adafactor)",
        _files(
            ranks="owner_stepped",
            unit="owner_stepped_plan",
        ),
    ),
    Feature(
        "LoRA and frozen weights",
        _files(
            ranks="frozen lora",
            unit="adapter_export",
        ),
    ),
    Feature(
        "checkpoints and resume",
        _files(
            ranks="checkpoint resume soak state_dicts stateful_loader",
            unit="checkpoint checkpoint_lock checkpoint_parts hostile_checkpoints",
        ),
    ),
    Feature(
        "pipelines",
        _files(
            lab="pipeline_bytes",
            ranks="pipeline pipeline_agreement pipeline_checkpoints pipeline_layouts train_stages",
            unit="compression pipeline_order split stage_link",
        ),
    ),
    Feature(
        "tensor parallelism",
        _files(
            ranks="tensor_parallel_checkpoints train_tensor_parallel",
        ),
    ),
    Feature(
        "torch.compile and activation checkpointing",
        _files(
            ranks="every_model",
        ),
    ),
    Feature(
        "start, and errors of dead or diverging ranks",
        _files(
            lab="faults",
            ranks="device_waits divergence programs start",
            unit="activity agree collective_log init rendezvous streams",
        ),
    ),
    Feature(
        "Accelerate, Trainer and Lightning",
        _files(
            ranks="accelerate lightning trainer",
        ),
    ),
    Feature(
        "planner and auto",
        _files(
            lab="probe",
            ranks="auto pipeline_planned",
            unit="""
                exact_plans launching live_model measure measured_collectives outer_plans plan_command
                planner planner_pipelines sim sim_outer sim_pipeline
            """,
        ),
    ),
    Feature(
        "statistics and traces",
        _files(
            ranks="profiler trace",
            unit="record",
        ),
    ),
)

OTHER = _files(
    lab="clusters command lab lab_page leftovers memory_limit",
    ranks="""
        bench_failures bench_outer bench_peers demo examples gpu_script install logs pages server train train_command
        train_models
    """,
    unit="""
        api_reference bench benchmark_harness benchmark_outer benchmark_recording benchmark_suites commands
        config data data_prepare docs extending features help json_lines metrics mixture mutants output package parquet
        plots progress public session stopping summary train_command train_models typing
    """,
)
