"""The cases on ranks of one group, which stay for the next case: which are tried, and in which order."""

from __future__ import annotations

from typing import Any

from tests.gpu import running, training
from tests.gpu.case import FOLDER, Case
from towpath import Outer, Precision, Topology

STRATEGIES, ROUTES, COMPRESSED, EXACT = (
    "strategies and placements",
    "routes",
    "compressed training",
    "exact transport",
)
OUTER, STATES, ACTIVATIONS = "outer steps", "offload of weights and optimizer", "offload of activations"
SCALING, MATRICES, LORA = (
    "mixed precision and loss scaling",
    "matrix optimizers (Muon, Adafactor)",
    "LoRA and frozen weights",
)
CHECKPOINTS, COMPILE, TRACES = (
    "checkpoints and resume",
    "torch.compile and activation checkpointing",
    "statistics and traces",
)
TENSORS, AUTO, WIRES = "tensor parallelism", "planner and auto", "wires under FSDP2 and DDP"


def _case(name: str, feature: str, run: Any, *args: Any, needs: tuple[str, ...] = (), **options: Any) -> Case:
    return Case(name=name, feature=feature, run=run, args=args, needs=needs, **options)


def _reused(name: str, feature: str, run: Any, *args: Any, needs: tuple[str, ...] = (), **options: Any) -> Case:
    """A case that calls a function of a test of tests/ranks, whose module imports pytest."""
    where = f"tests.ranks.{run}" if isinstance(run, str) else run
    compiles: dict[str, Any] = {"limit": 150.0} if feature in (EXACT, COMPRESSED, OUTER) else {}  # kernels, from cold
    return Case(name=name, feature=feature, run=where, args=args, needs=("pytest", *needs), **compiles | options)


PAIR, ALONE = Topology(2, 1), Topology(1, 1)
EXACT_LABELS = ("zero1", "paro-iig", "paro-igg offload=params")

# On four ranks, which stay for all of them. The most telling first.
ON_FOUR = [
    *(_case(f"{label}, float64", STRATEGIES, training.trains_as_one_process, label) for label in training.LOSSLESS),
    *(
        _case(f"{label}, fp32 masters", SCALING, training.trains_fp32_masters, label)
        for label in ("zero3", "paro-iig", "mics")
    ),
    *(
        _reused(f"exact {label}, {precision}", EXACT, training.exact_is_the_same_to_the_bit, label, precision)
        for label in EXACT_LABELS
        for precision in ("bf16", "fp32")
    ),
    *(
        _reused(f"{name}, by an oracle", COMPRESSED, training.rounds_as_the_oracle, name, False)
        for name in ("zero++", "qwz", "qgz")
    ),
    *(
        # int4 moves each rank's gradients by a tenth, and int8 weights all of them by some hundredths.
        _case(f"{name}, fp32 masters", COMPRESSED, training.trains_fp32_masters, name, most, limit=150.0)
        for name, most in (("zero++", 0.25), ("qwz", 0.05), ("qgz", 0.25))
    ),
    _reused("gathers are FSDP2's to the bit", WIRES, "test_wires:_gather_both", training.SHAPE, 3, limit=90.0),
    *(
        _reused(f"FSDP2 with wires, {name}", WIRES, "test_wires:_compare_program", name, training.SHAPE)
        for name in ("plain", "accumulate", "frozen", "offloaded", "clip", "scale", "swap in place", "load", "evaluate")
    ),
    *(_reused(f"{kind.upper()} with wires", WIRES, "test_wires:_compare_replicas", kind) for kind in ("hsdp", "ddp")),
    _reused("FSDP2 with wires, their weights on the host", WIRES, "test_wires:_compare_held_on_host", training.SHAPE),
    *(_case(f"{label}, float64", ROUTES, training.trains_as_one_process, label) for label in training.ROUTED),
    *(
        _reused(
            f"outer steps, float32, delay {delay}, {label}",
            OUTER,
            training.islands_train_as_in_one_process,
            label,
            delay,
        )
        for label, delay in (("zero3", 1), ("paro-igg", 0), ("ddp", 1), ("zero1 offload=optimizer", 1))
    ),
    *(
        _reused(
            f"outer steps, {codec}, delay {delay}, saved and loaded",
            OUTER,
            training.resumes_in_an_exchange,
            FOLDER,
            "paro-iig",
            delay,
            codec,
        )
        for codec in ("int4:64", "float32")
        for delay in (1, 0)
    ),
    *(
        _reused(f"offload {offload}, {label}", STATES, training.offloads_to_the_bit, label, offload)
        for label, offload in (
            *(("zero3", each) for each in ("optimizer", "params", "optimizer+params")),
            ("paro-igg", "params"),
            ("zero++", "optimizer+params"),
        )
    ),
    *(
        _case(f"{label}, float64, offload={offload}", STATES, training.trains_as_one_process, label, offload)
        for label, offload in (("paro-igg", "params"), ("paro-igg", "optimizer+params"), ("zero3", "optimizer"))
    ),
    *(
        _case(
            f"the host runs ahead, {name}",
            feature,
            running.the_host_is_back_while_the_device_works,
            *args,
            needs=("cuda",),
        )
        for name, feature, *args in (
            *(
                (each, STRATEGIES, each)
                for each in ("ddp", "zero3", "mics", "paro-iig", "paro-ggg", "zero++", "zero3@ho-ring")
            ),
            ("offload=params", STATES, "paro-igg offload=params"),
            ("exact", EXACT, "paro-iig exact=1", True),
            ("an exchange over NCCL is applied", OUTER, "zero3", False, Outer(every=1, nccl=True)),
            ("an exchange is applied a step later", OUTER, "zero3", False, Outer(every=2, delay=1)),
        )
    ),
    *(
        _reused(f"{name}, {label}", MATRICES, "test_owner_stepped:_same_bits", name, label)
        for name, label in (("Muon", "zero3"), ("Muon", "paro-iig"), ("Adafactor", "mics"))
    ),
    _reused("low-rank sums are exact, ddp", COMPRESSED, "test_low_rank:_exact", "ddp"),
    *(
        _reused(f"frozen weights in {codec}, {label}", LORA, training.adapters_train_on_encoded_weights, label, codec)
        for label, codec in (("zero3", "int8"), ("paro-iig", "int4:32"))
    ),
    _reused("PEFT's LoRA, paro-iig", LORA, "test_lora:_train", "paro-iig", needs=("peft", "transformers"), limit=90.0),
    _reused("saving in the background", CHECKPOINTS, "test_checkpoint:_train_while_saving", FOLDER),
    *(
        _reused(f"{before} saves, {after} loads", CHECKPOINTS, "test_offload:_checkpoints", FOLDER, *args)
        for before, after, *args in (
            ("paro-iig", "zero3", None, None, Precision()),
            ("paro-iig", "zero3 offload=optimizer", None, "optimizer", training.MIXED),
        )
    ),
    *(
        _case(f"full_parameters, {label}", STRATEGIES, training.full_parameters_are_read_and_written, label)
        for label in ("zero3", "paro-iig")
    ),
    *(
        _reused(
            f"activation checkpointing, {how}, {label}",
            COMPILE,
            "test_every_model:_train_checkpointed",
            how,
            label,
        )
        for how, label in (("non-reentrant", "zero3"), ("reentrant", "paro-iig"))
    ),
    *(
        _reused(f"tensor parallelism, {label}", TENSORS, "test_tensor_parallel:_train_tensor_parallel", label, PAIR)
        for label in ("zero3", "paro-iig")
    ),
    _reused("islands that diverge raise", OUTER, training.diverging_islands_raise, "zero1"),
    *(
        _case(f"{label}, fp32 masters", SCALING, training.trains_fp32_masters, label)
        for label in training.LOSSLESS
        if label not in ("zero3", "paro-iig")
    ),
    *(
        _reused(f"{name} with codecs, by an oracle", COMPRESSED, training.rounds_as_the_oracle, name, True)
        for name in ("mics", "paro-iig", "ddp", "qgz")
    ),
    *(
        _case(f"{label}, float64", STRATEGIES, training.trains_as_one_process, label)
        for label in ("zero3@ring", "paro-nig", "mics:2x2")
    ),
    _case("seconds of transfers", TRACES, running.seconds_of_transfers_are_counted),
    _case("inference keeps no events", TRACES, running.inference_keeps_no_events, needs=("cuda",)),
    *(
        _case(
            f"towpath train does not wait{words}",
            feature,
            running.towpath_train_does_not_wait,
            FOLDER,
            *args,
            needs=("cuda",),
        )
        for words, feature, *args in (
            ("", STRATEGIES, None, False),
            (", offload=params", STATES, "params", False),
            (", offloaded activations", ACTIVATIONS, None, True),
        )
    ),
    _case('"auto" chooses and trains', AUTO, running.plans_for_what_it_measured, FOLDER, limit=90.0),
]

# On two or three ranks, which stay for all of them.
ON_FEWER = [
    _reused("a diverged replica raises", EXACT, training.a_diverged_replica_raises, ranks=2),
    _reused("an overflow is skipped, offload=optimizer", SCALING, training.an_overflow_is_skipped_by_all, ranks=2),
    _reused("an overflow is skipped", SCALING, "test_around_the_loop:_scaled", ranks=2),
    _reused("autocast", SCALING, "test_around_the_loop:_autocast", ranks=2),
    *(
        _reused(
            f"offloaded activations, {label}", ACTIVATIONS, "test_offloaded_activations:_compare", label, again, ranks=2
        )
        for label, again in (("zero3", False), ("zero++", True))
    ),
    _reused("join", STRATEGIES, "test_uneven:_join", ranks=2),
    _reused("schedulers and averages", STRATEGIES, "test_around_the_loop:_schedule_and_average", ranks=2),
    _reused(
        "blocks are compiled, zero3",
        COMPILE,
        "test_compiled:_train_compiled",
        "in place, after shard()",
        "zero3",
        ranks=2,
        limit=150.0,
    ),
    _reused("what int4:64 keeps and sends", OUTER, training.keeps_what_is_not_sent, "int4:64", ranks=3),
]

ON_ONE = [
    *(
        _case(f"{label}, {what}, one rank", feature, run, label, None, ALONE, ranks=1)
        for what, feature, run in (
            ("float64", STRATEGIES, training.trains_as_one_process),
            ("fp32 masters", SCALING, training.trains_fp32_masters),
        )
        for label in ("ddp", "zero3", "hpz", "zero3 offload=params")
    ),
    _case("a step of one rank is traced", TRACES, running.a_step_is_traced_in_the_order_of_its_stream, ranks=1),
]
