"""A training run on each of its ranks, from the configuration to the last step."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from towpath.api import Values, shard
from towpath.core.formats import Precision
from towpath.core.strategy import Strategy
from towpath.engine.saved_activations import offload_activations
from towpath.errors import ConfigError
from towpath.train.choose import choose_strategy
from towpath.train.config import DTYPES, Config, TrainConfig
from towpath.train.data.sources import Tokens, open_tokens
from towpath.train.job import Job, joined
from towpath.train.layout import copies_of, layout_mesh, topology_of_copies
from towpath.train.loop import Training
from towpath.train.loss_scale import LossScale
from towpath.train.models.from_config import Built, build, check_weights, checkpoint_blocks, compile_blocks
from towpath.train.models.tensor_parallel import plan_for, share_layers
from towpath.train.observe.bar import progress_bar
from towpath.train.observe.watch import Watch, check_log
from towpath.train.optimizers import optimizer_for
from towpath.train.passes import OneModel, Passes
from towpath.train.saves import Saves, goes_on
from towpath.train.stages import pipelined
from towpath.train.stopping import exit_code, stopping


def train(config: Config) -> int:
    """Train on this rank; every rank must call it.

    Returns:
        The exit code of the command, the same on every rank: 0 if it trained to its last step, 130 or 143 if a rank was
        told to stop before, by Ctrl-C or SIGTERM, and the state was saved.
    """
    with stopping() as stop, joined() as job, job.answering():
        with job.alike():
            if job.rank == 0:
                check_log(config.log)
        training = begin(config, job)
        config = replace(config, train=training.config)  # auto has a say in it
        stop.begun = True
        with Saves(config, training) as saves, Watch(config, training) as watch:
            while training.done < config.train.steps and not training.stopped:
                with watch.traced(training.done + 1):
                    step = training.step(stop.wanted)
                watch.stepped(step)
                saves.stepped()
                if _evaluates(config.train, training.done) and not training.stopped:  # there may be 25 s to save in
                    watch.evaluated(*training.evaluate())
        watch.summarise()
        return exit_code(training.stopped) if training.done < config.train.steps else 0


def _evaluates(config: TrainConfig, done: int) -> bool:
    every = config.evaluate_every
    return done == config.steps or (every > 0 and done % every == 0)


def begin(config: Config, job: Job) -> Training:
    """The model, sharded, and its data: or the same ConfigError on every rank."""
    torch.set_num_threads(config.train.threads or _share_of_cores(job))
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    with job.alike():
        check_weights(config.model)
        strategy = None
        copies = copies_of(config.parallel, job.world)
        if not config.strategy.auto:
            config.train.micro_steps(copies)
            strategy = config.strategy.make(topology_of_copies(config.parallel, job.topology))
    tokens = _tokens(config, job)
    with job.alike():
        built = build(config.model, tokens.vocabulary)
        for ranks in {config.parallel.tensor, *config.strategy.tensors} - {1}:
            plan_for(built.model, built.tensor_plan, ranks)  # refuses what these cannot share
    _check_alike(job, config, tokens)
    if strategy is None:
        config, strategy = choose_strategy(config, job, built, precision_of(config.train))
    if config.parallel.tensor > 1:
        with job.alike():
            built = replace(built, tensor_plan=plan_for(built.model, built.tensor_plan, config.parallel.tensor))
    _wrap_blocks(built, config.train)
    nodes, ranks = strategy.topology.nodes, strategy.topology.ranks_per_node
    job.say(
        f"{built.parameters / 1e6:.1f} million parameters, {strategy.name} on {nodes} × {ranks} {job.device.type} ranks"
    )
    torch.manual_seed(config.train.seed)
    values = _none_yet(built.model) if goes_on(config, job) else built.values
    scale = LossScale(config.train.loss_scale, config.train.precision == "fp16")
    whole = pipelined if config.parallel.pipeline > 1 else _one_model
    passes: Passes = whole(config, job, built, strategy, precision_of(config.train), values, scale)
    # Of dropout and the like: another one on every rank, but on those that compute the same micro-batch.
    _seed_all(config.train.seed + 1 + job.rank // config.parallel.tensor)
    passes.model.train()
    return Training(
        config=config.train,
        parallel=config.parallel,
        strategy=strategy,
        job=job,
        built=built,
        passes=passes,
        scale=scale,
        optimizer=optimizer_for(passes.model.parameters(), config.train),
        windows=tokens.train,
        held_out=tokens.held_out,
        order={
            "data": tokens.fingerprint,
            "data.held_out": config.data.held_out,
            "train.length": config.train.length,
            "train.seed": config.train.seed,
        },
    )


def _one_model(
    config: Config,
    job: Job,
    built: Built,
    strategy: Strategy,
    precision: Precision,
    values: Values | None,
    scale: LossScale,
) -> OneModel:
    """Without stages. Every rank must call it."""
    tensor, group = config.parallel.tensor, None
    if tensor > 1:
        assert built.tensor_plan is not None  # as plan_for has found
        mesh = layout_mesh(config.parallel, job)
        group = mesh["dp"].get_group()
        share_layers(built.model, built.tensor_plan, mesh["tp"])
        job.say(f"each layer of a block is shared by {tensor} ranks")
    model = shard(built.model, strategy, group=group, precision=precision, values=values)
    forward = partial(offload_activations, model) if config.train.offload_activations else nullcontext
    return OneModel(model, job.groups, job.device, scale, tensor, forward)


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _share_of_cores(job: Job) -> int:
    # Of those this process may use: a container, or a scheduler, may leave it fewer than the node has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // job.topology.ranks_per_node)


def _tokens(config: Config, job: Job) -> Tokens:
    with job.alike(), progress_bar("Tokens") if job.rank == 0 else nullcontext() as progress:
        tokens = open_tokens(
            config.data,
            config.train.length,
            seed=config.train.seed,
            first_here=job.leads_node,
            wait=job.groups.barrier,
            progress=progress,
        )
    windows = f"{len(tokens.train):,} sequences of {config.train.length} tokens"
    job.say(f"{tokens.about}: {windows}, vocabulary {tokens.vocabulary:,}")
    return tokens


def _wrap_blocks(built: Built, config: TrainConfig) -> None:
    if config.checkpointing:
        checkpoint_blocks(built)
    if config.compile:
        compile_blocks(built)


def _none_yet(model: nn.Module) -> Values:
    """For what a checkpoint will fill."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def zeros(name: str, start: int, end: int) -> torch.Tensor:
        if name not in names:
            raise KeyError(name)
        return torch.zeros(end - start)

    return zeros


def precision_of(train: TrainConfig) -> Precision:
    reduce = DTYPES[train.reduce] if train.reduce else None
    # A sum never loses what has travelled: with reduce = "fp32" it is fp32.
    accumulate = None if train.reduce == "fp32" else DTYPES[train.accumulate]
    return Precision(DTYPES[train.precision], reduce, accumulate)


def _check_alike(job: Job, config: Config, tokens: Tokens) -> None:
    """What would train apart in silence, if it differed between ranks."""
    mine = {"configuration": str(config), "data": tokens.fingerprint}
    for rank, theirs in enumerate(job.groups.gather_objects(mine)):
        for what in mine:
            if theirs[what] != mine[what]:
                raise ConfigError(
                    f"rank {job.rank} and rank {rank} differ in their {what}. Give all the same files and arguments."
                )
