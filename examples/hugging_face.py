"""Shard a Hugging Face model, train it in a plain loop, let it continue a text, and save it.

python -m lab run --nodes 2 --ranks 2 --inter 200mbit -- examples/hugging_face.py paro-iig 10 saved
torchrun --nnodes 2 --nproc-per-node 2 … examples/hugging_face.py paro-iig 100 saved

The model is a small Llama with new weights. To fine-tune a model, call `from_pretrained` instead. The text is the
sources of Python's standard library, as bytes. This needs `pip install 'towpath[hf]'`.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
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


def main(strategy: str = "paro-iig", steps: str = "10", folder: str = "") -> None:
    device = towpath.init()
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Bytes()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = towpath.shard(LlamaForCausalLM(config).to(device), strategy)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(int(steps)):
        inputs = data.batch(step * world + rank, BATCH).to(device)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}", flush=True)
    prompt = torch.tensor([list(b"def main(")], device=device)
    # Every rank calls it. (Its annotations fit no class of transformers, nor do those of `to` above.)
    written = model.generate(prompt, max_new_tokens=20, do_sample=False)  # pyright: ignore[reportAttributeAccessIssue]
    if rank == 0:
        print("it writes:", repr(bytes(written[0].tolist()).decode(errors="replace")))
    if folder:
        model.save_pretrained(Path(folder))  # every rank calls it, and rank 0 writes
        if rank == 0:
            print(f"LlamaForCausalLM.from_pretrained({folder!r}) loads it")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
