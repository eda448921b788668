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


def _feature(name: str, **names: str) -> Feature:
    return Feature(name, _files(**names))


FEATURES = (
    _feature(
        "strategies and placements",
        fake_cuda="gpu_cases steps waits",
        lab="bytes unequal_nodes",
        order="order",
        ranks="""
            around_the_loop behind_the_engine collective_forms engine_promises entry_points
            foretold_memory from_fsdp2 launches leaves mesh meta_device never_silent one_rank optimizers
            parity schedule_is_executed shares steady unequal_nodes uneven values
        """,
        unit="""
            blocks communicators executor launch_counts leaves placement schedule shares step strategies
            transitions trial_steps unequal_nodes units
        """,
    ),
    _feature("routes", lab="racks routes", ranks="routes", unit="cells racks route_bytes route_phases routes sends"),
    _feature("codec kernels", unit="codecs native_codecs registered_codecs triton_codecs"),
    _feature("compressed training", ranks="codecs encoded_training low_rank", unit="encoded_transports low_rank"),
    _feature("exact transport", ranks="exact exact_features", unit="exact_codecs exact_transports"),
    _feature(
        "outer steps",
        ranks="meeting outer outer_checkpoints outer_faults outer_features train_outer",
        unit="meeting outer",
    ),
    _feature("offload of weights and optimizer", ranks="offload", unit="offload"),
    _feature("offload of activations", ranks="offloaded_activations", unit="saved_activations"),
    _feature("mixed precision and loss scaling", ranks="float8 precision"),
    _feature("matrix optimizers (Muon, Adafactor)", ranks="owner_stepped", unit="owner_stepped_plan"),
    _feature("LoRA and frozen weights", ranks="frozen lora", unit="adapter_export"),
    _feature(
        "checkpoints and resume",
        ranks="checkpoint resume soak state_dicts stateful_loader",
        unit="checkpoint checkpoint_lock checkpoint_parts hostile_checkpoints",
    ),
    _feature(
        "recovery from a lost node",
        ranks="protect protect_corruption",
        unit="buddies keeper protect_memory protection warm",
    ),
    _feature(
        "pipelines",
        lab="pipeline_bytes",
        ranks="pipeline pipeline_agreement pipeline_checkpoints pipeline_layouts pipeline_shares train_stages",
        unit="compression pipeline_order split stage_link",
    ),
    _feature("tensor parallelism", ranks="tensor_parallel tensor_parallel_checkpoints train_tensor_parallel"),
    _feature("torch.compile and activation checkpointing", ranks="compiled every_model"),
    _feature(
        "start, and errors of dead or diverging ranks",
        lab="faults",
        ranks="device_waits divergence programs start",
        unit="activity collective_log init rendezvous streams together",
    ),
    _feature(
        "wires under FSDP2 and DDP",
        lab="wire_bytes",
        ranks="wires wires_ddp wires_frameworks wires_misuse",
        unit="wire_launches",
    ),
    _feature("Accelerate, Trainer and Lightning", ranks="accelerate lightning trainer"),
    _feature(
        "planner and auto",
        lab="probe",
        ranks="auto pipeline_planned",
        unit="""
            exact_plans launching live_model measure measured_collectives outer_plans plan_command planner
            planner_pipelines pytorch_steps sim sim_outer sim_pipeline
        """,
    ),
    _feature("doctor", lab="doctor", unit="doctor doctor_faults doctor_paths"),
    _feature("statistics and traces", ranks="profiler trace", unit="record"),
)

OTHER = _files(
    fake_cuda="device",
    lab="clusters command delay destroy lab lab_page leftovers two_flats_page",
    ranks="""
            bench_failures demo emulated_pipeline examples gpu_script install pages server train train_command
            train_models
        """,
    unit="""
            api_reference bench benchmarks commands config data data_prepare docs extending features metrics
            forecasts names output package papers plots propagation_page public published session stopping
            train_command train_models typing
        """,
)
