"""Train PEFT's LoRA adapters of a Hugging Face model. Frozen parameters that fit in a node never leave it.

python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/lora.py 10 adapter
torchrun --nnodes 2 --nproc-per-node 2 … examples/lora.py 100 adapter

The model is a small Llama with new weights. To fine-tune a model, call `from_pretrained` instead. Frozen weights are
stored in 8 bits. The text is the sources of Python's standard library, as bytes. This needs
`pip install 'towpath[peft]'`.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import towpath

BATCH, LENGTH = 8, 128

# The sources of Python's standard library, as bytes: a text that every machine has.
FILES = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


class Bytes:
    """Windows of a text, each byte a token."""

    def __init__(self) -> None:
        text = b"\0".join(file.read_bytes() for file in FILES)
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, number: int, count: int) -> torch.Tensor:
        """Return batch `number`. It is the same on every rank."""
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(self.tokens) - LENGTH, (count, 1), generator=generator)
        return self.tokens[starts + torch.arange(LENGTH)].long()


def adapted() -> Any:
    """Return the model with adapters. It is the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        bos_token_id=None,
        eos_token_id=None,
    )
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def main(steps: str = "10", folder: str = "") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    model = towpath.shard(adapted().to(device), towpath.strategy("zero3", frozen_codec="int8"))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    for step in range(int(steps)):
        inputs = data.batch(step * world + rank, BATCH).to(device)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    moved = towpath.stats(model).last_step
    frozen = sum(t.inter_bytes for t in moved if t.bucket.endswith("frozen"))
    adapters = sum(t.inter_bytes for t in moved) - frozen
    if rank == 0:
        print(f"bytes between nodes in a step: {frozen:,} of what is frozen, {adapters:,} of the adapters")
    if folder:
        model.save_pretrained(Path(folder))  # the adapter alone; every rank calls it, and rank 0 writes
        if rank == 0:
            print(f"PeftModel.from_pretrained(model, {folder!r}) loads it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
