"""`towpath.wires` in a framework's own script, with one more line. Losses are those without the line.

Functions whose names begin with an underscore run on every rank. A framework that is not installed is a skip.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import towpath
from tests.ranks.launched import launched
from tests.ranks.server import Worlds
from tests.ranks.strategies import seldom

STEPS = 8  # 30 in `make parity`
VOCABULARY, LENGTH = 37, 6
Line = Callable[[nn.Module], None]
# Sums of two ranks have one order. Those of four ranks are in float64, so that another order changes few bits.
WORLDS = [2, seldom(4)]


Run = Callable[..., Any]


@pytest.fixture
def run(world: Worlds, whole_product: bool) -> Run:
    """Call a function on each of so many ranks."""
    return lambda ranks, *call: world(ranks).run(_with_steps, 30 if whole_product else STEPS, *call)


def _with_steps(steps: int, fn: Callable[..., None], *args: Any) -> None:
    global STEPS
    STEPS = steps
    fn(*args)


def _compare(train: Callable[[Line | None], list[float]], times: int = 1) -> None:
    """`times`: How many models a training makes. Each has a part of the steps."""
    ranks = dist.get_world_size()
    topology = towpath.Topology(2, ranks // 2)
    wired: list[nn.Module] = []

    def line(model: nn.Module) -> None:
        towpath.wires(model, topology=topology)
        wired.append(model)

    with launched(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu"):
        plain = train(None)
        found = train(line)
    assert len(plain) == STEPS
    assert len(set(plain)) == STEPS
    if ranks == 2:
        assert found == plain
    else:
        assert found == pytest.approx(plain, rel=1e-6)
    for model in wired:
        _check_sent(towpath.stats(model).transfers, STEPS // times)


def _check_sent(transfers: Any, steps: int) -> None:
    """The wires have sent the gradients of each step."""
    assert sum(each.calls for each in transfers if each.transfer.kind.value == "grad_sync") >= steps


@contextmanager
def _as_on_gpus() -> Any:
    """Accelerate shards models on GPUs only. It takes a CPU for one, and changes nothing else."""
    from accelerate.state import DistributedType, PartialState

    found = ("gloo", DistributedType.MULTI_GPU)
    with mock.patch.object(PartialState, "_prepare_backend", lambda *_, **__: found):
        yield


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
        )
    ).double()


def _ids(rows: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


# --- Accelerate -------------------------------------------------------------------------------------------------------


def _accelerate(line: Line | None, fsdp: bool) -> list[float]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from tests.ranks.launched import forget

    forget()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin if fsdp else None)
    model = _llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(_ids(4 * STEPS * dist.get_world_size()), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if line:
        line(model)
    losses: list[float] = []
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _accelerate_fsdp2() -> None:
    with _as_on_gpus():
        _compare(lambda line: _accelerate(line, True))


def _accelerate_ddp() -> None:
    _compare(lambda line: _accelerate(line, False))


@pytest.mark.parametrize("ranks", WORLDS)
def test_accelerate_after_prepare(run: Run, ranks: int) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    run(ranks, _accelerate_fsdp2)


@pytest.mark.parametrize("ranks", WORLDS)
def test_accelerate_with_ddp_after_prepare(run: Run, ranks: int) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    run(ranks, _accelerate_ddp)


# --- Trainer, PEFT, TRL -----------------------------------------------------------------------------------------------


def _trainer(
    line: Line | None, folder: Path, kind: Any, arguments: Any, model: Any, rows: Any, options: Any = None, **more: Any
) -> Any:
    import transformers

    class Wires(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            assert line is not None
            line(model if args.fsdp else trainer.model_wrapped)

    config = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    args = arguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="adamw_torch",
        dataloader_pin_memory=False,
        ddp_backend="gloo",
        **({"fsdp": True, "fsdp_config": config} | (options or {})),
    )
    trainer = kind(model=model, args=args, train_dataset=rows, callbacks=[Wires()] if line else [], **more)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert isinstance(trainer.model, FSDPModule) or isinstance(trainer.model_wrapped, DistributedDataParallel)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _lora() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def _hugging_face(line: Line | None, folder: Path, lora: bool, fsdp: bool = True) -> list[float]:
    import transformers

    from tests.ranks.launched import forget

    forget()
    model = _llama()
    if lora:
        import peft

        model = peft.get_peft_model(model, _lora()).double()
    rows = [{"input_ids": row, "labels": row} for row in _ids(8 * STEPS)]
    options = None if fsdp else {"fsdp": False, "fsdp_config": None}
    return _trainer(line, folder, transformers.Trainer, transformers.TrainingArguments, model, rows, options)


def _sft(line: Line | None, folder: Path) -> list[float]:
    import datasets
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from tests.ranks.launched import forget

    forget()
    words = models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1")
    rows = datasets.Dataset.from_list([{"input_ids": row.tolist()} for row in _ids(8 * STEPS)])
    return _trainer(
        line,
        folder,
        trl.SFTTrainer,
        trl.SFTConfig,
        _llama(),
        rows,
        options={"bf16": False, "gradient_checkpointing": False},
        peft_config=_lora(),
        processing_class=tokenizer,
    )


def _trainer_on_rank(folder: Path, lora: bool) -> None:
    with _as_on_gpus():
        _compare(lambda line: _hugging_face(line, folder, lora))


def _trainer_with_ddp_on_rank(folder: Path) -> None:
    _compare(lambda line: _hugging_face(line, folder, False, fsdp=False))


def _sft_on_rank(folder: Path) -> None:
    with _as_on_gpus():
        _compare(lambda line: _sft(line, folder))


@pytest.mark.parametrize("ranks", WORLDS)
def test_trainer_when_training_begins(run: Run, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    run(ranks, _trainer_on_rank, tmp_path, False)


@pytest.mark.parametrize("ranks", WORLDS)
def test_trainer_with_peft_when_training_begins(run: Run, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    run(ranks, _trainer_on_rank, tmp_path, True)


@pytest.mark.parametrize("ranks", [seldom(2), seldom(4)])
def test_trainer_with_ddp_when_training_begins(run: Run, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    run(ranks, _trainer_with_ddp_on_rank, tmp_path)


@pytest.mark.parametrize("ranks", WORLDS)
def test_trl_with_peft_when_training_begins(run: Run, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    run(ranks, _sft_on_rank, tmp_path)


# --- Lightning --------------------------------------------------------------------------------------------------------


def _lightning(line: Line | None, place: str) -> list[float]:
    import lightning.pytorch as pl
    from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from towpath.fsdp.replicas import BucketSums, sum_bucket

    world = dist.get_world_size()
    is_sharded = not place.startswith("ddp")

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
            self.losses: list[float] = []
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

        def configure_model(self) -> None:
            if is_sharded and not isinstance(self, FSDPModule):
                for module in (*self.blocks, self):
                    fully_shard(module, mesh=self.device_mesh["data_parallel"])
                if line and place == "configure_model":
                    line(self)

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            loss = (self(batch[0]) - 1).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Wires(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            model = trainer.strategy.model
            if line and place == "ddp_comm_hook":  # as DDPStrategy does, on GPUs only
                _register_ddp_comm_hook(model, state, sum_bucket)
            elif line and place != "configure_model":
                line(model)

    state = BucketSums(topology=towpath.Topology(2, world // 2))
    strategy: Any = DDPStrategy()
    if is_sharded:
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    module = Net()
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[Wires()],
        accelerator="cpu",
        devices=world,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.randn(2 * STEPS * world, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=2))
    if line and place == "ddp_comm_hook":
        assert state._peers is not None
        _check_sent(state._peers.comm.record.totals().transfers, STEPS)
    return module.losses


def _lightning_on_rank(place: str) -> None:
    _compare(lambda line: _lightning(line, place))


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("place", ["configure_model", "on_fit_start", "ddp_on_fit_start", "ddp_comm_hook"])
def test_lightning(run: Run, place: str, ranks: int) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    run(ranks, _lightning_on_rank, place)


# --- torchtitan, and a loop like its own ------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))


def _titan(line: Line | None, folder: Path, backend: str, replicate: bool, dtype: torch.dtype) -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    if replicate:
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))

    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        layers = [_Block() for _ in range(2)]
        model = nn.Sequential(nn.Embedding(VOCABULARY, 16), *layers, nn.Linear(16, VOCABULARY)).to(dtype)
        policy = MixedPrecisionPolicy()
        if dtype == torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for i, block in enumerate(layers, 1):
            model[i] = torch.compile(checkpoint_wrapper(block), backend=backend, fullgraph=True)
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                if line is None and dtype == torch.float32:
                    # FSDP2 scales sums inside the reduction, which gloo cannot.
                    module.set_force_sum_reduction_for_comms(True)
        if line:
            line(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = build()
    losses: list[float] = []
    for step in range(STEPS):
        if step == STEPS // 2:
            saved = folder / ("wires" if line else "stock")
            weights, state = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=saved)
            model, optimizer = build()
            weights, state = get_state_dict(model, optimizer)
            dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved)
            set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        ids = torch.randint(
            VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + dist.get_rank())
        )
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1).to(dtype), ids.flatten(), reduction="sum")
        losses.append(loss.item())
        (loss / (2 * LENGTH * ranks)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _titan_on_rank(*options: Any) -> None:
    _compare(lambda line: _titan(line, *options), times=2)


@pytest.mark.parametrize(
    ("ranks", "backend", "replicate", "dtype"),
    [
        (2, "aot_eager", False, torch.float32),
        seldom(2, "inductor", False, torch.float32),
        seldom(4, "aot_eager", False, torch.float64),
        seldom(4, "aot_eager", True, torch.float64),
    ],
)
def test_torchtitan_like_loop(
    run: Run, tmp_path: Path, ranks: int, backend: str, replicate: bool, dtype: torch.dtype
) -> None:
    run(ranks, _titan_on_rank, tmp_path, backend, replicate, dtype)


def _torchtitan(line: Line | None, experts: int, dtype: torch.dtype) -> list[float]:
    """torchtitan's `parallelize_qwen3`, with experts over `experts` ranks. Its FlexAttention trains on GPUs only."""
    from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models import qwen3
    from torchtitan.models.common import Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    name, width = str(dtype).removeprefix("torch."), 16
    layers = qwen3._build_qwen3_moe_layers(
        fuse_qkv=True,
        n_layers=2,
        dim=width,
        n_heads=2,
        n_kv_heads=1,
        head_dim=8,
        moe_hidden_dim=16,
        num_experts=4,
        top_k=2,
        attn_backend="flex",
        rope=qwen3.CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e6),
        moe_comm_backend="standard",
    )
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    tokens = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=width, param_init=qwen3._EMBEDDING_INIT)
    head = Linear.Config(in_features=width, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT)
    config = qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=width,
        norm=qwen3._qwen3_norm(width),
        tok_embeddings=tokens,
        lm_head=head,
        layers=layers,
    )
    set_qwen3_sharding_config(config, enable_sp=False, enable_ep=experts > 1)
    set_spmd_backend("partial_dtensor")
    parallelism = ParallelismConfig(expert_parallel_degree=experts, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    with (
        mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"),
        mock.patch.dict(TORCH_DTYPE_MAP, float64=torch.float64),
        torch.device("meta"),
    ):
        model = config.build().to(dtype)
        dims.build_mesh()
        parallelize_qwen3(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=name, mixed_precision_reduce=name),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    if line:
        line(model)
    for module in model.modules():
        if isinstance(module, FSDPModule) and not line:
            module.set_force_sum_reduction_for_comms(True)  # FSDP2 scales in the reduction, which gloo cannot
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_states(buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        out = model(ids, positions=torch.arange(LENGTH).expand(2, LENGTH))
        loss = nn.functional.cross_entropy(out.flatten(0, 1).double(), ids.flatten())
        (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _torchtitan_on_rank(*options: Any) -> None:
    _compare(lambda line: _torchtitan(line, *options))


@pytest.mark.parametrize(("ranks", "experts"), [(2, 1), seldom(4, 2)])
def test_torchtitan_on_the_meta_device(run: Run, ranks: int, experts: int) -> None:
    pytest.importorskip("torchtitan", reason="torchtitan is not installed")
    run(ranks, _torchtitan_on_rank, experts, torch.bfloat16 if ranks == 2 else torch.float64)


# --- expert parallelism of transformers -------------------------------------------------------------------------------


def _experts(line: Line | None, folder: Path) -> list[float]:
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    model = Qwen3MoeForCausalLM.from_pretrained(
        folder,
        dtype=torch.float64,
        experts_implementation="eager",
        distributed_config=DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=2),
    )
    if line:
        line(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _experts_on_rank(folder: Path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).double().save_pretrained(folder)
    dist.barrier()
    _compare(lambda line: _experts(line, folder))


@pytest.mark.parametrize("ranks", WORLDS)
def test_expert_parallelism_of_transformers(run: Run, tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("transformers.distributed", reason="this version of transformers shards no experts")
    run(ranks, _experts_on_rank, tmp_path)
