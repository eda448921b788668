"""The messages between pipeline stages in fewer bytes, as low-rank factors or in a codec of blocks, and in a trace.

Both ends of a link have the same encodings, and know which messages are encoded. So messages need no header.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, final
from zlib import crc32

import torch
import torch.distributed as dist

from towpath.codecs.kernels import kernels_for
from towpath.codecs.low_rank import first_factor, matmul_thin, orthonormal, with_unit_columns
from towpath.collectives.backend import all_gather_single
from towpath.core.formats import dtype_name, wide
from towpath.core.transport import Transport, matrix_of
from towpath.engine.layout import torch_dtype
from towpath.errors import StepError
from towpath.observe.record import Trace

# Of the norm of a tensor. Kernels that add in any order, and bf16, make smaller differences between equal ranks.
_MOST_APART = 0.05
_MOST_COMPARISONS = 16  # of a tensor that was only zeros, which say nothing


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a link sends tensors of one shape and dtype.

    If `peers` is set, these tensor-parallel ranks have the same tensor. `shape` is that of the share that each of them
    sends, and error feedback is of this share alone. The receiving ranks decode their shares, and gather them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    transport: Transport
    peers: dist.ProcessGroup | None = None

    @property
    def used(self) -> bool:
        """Whether the tensors are encoded. Otherwise they are sent as they are."""
        if self.transport.low_rank is not None:
            return self.transport.low_rank.pays(self.shape)
        return self.transport.encoding is not None

    def message(self, device: torch.device) -> torch.Tensor:
        """Return an empty buffer for one message."""
        if self.transport.low_rank is not None:
            return torch.empty(self.transport.low_rank.encoded_elements(self.shape), dtype=self.dtype, device=device)
        assert self.transport.encoding is not None
        return torch.empty(self.transport.encoding.encoded_bytes(prod(self.shape)), dtype=torch.uint8, device=device)

    def factors(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the low-rank factors P and Q as views of a message."""
        assert self.transport.low_rank is not None
        rows, columns = matrix_of(self.shape)
        p, q = message.split([rows * self.transport.low_rank.rank, columns * self.transport.low_rank.rank])
        return p.view(rows, -1), q.view(columns, -1)

    def decoded(self, message: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a message carries."""
        if self.transport.low_rank is not None:
            p, q = self.factors(message)
            return (p @ q.T).view(self.shape)
        assert self.transport.encoding is not None
        decoded = torch.empty(prod(self.shape), dtype=self.dtype, device=message.device)
        kernels_for(message.device).decode(self.transport.encoding, message, decoded)
        return decoded.view(self.shape)

    def share(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what this rank sends of a tensor: the part of its rows that belongs to it, or all of it."""
        if self.peers is None:
            return tensor.contiguous()
        return tensor.detach().reshape(self.peers.size(), -1)[self.peers.rank()]

    def gathered(self, share: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of which `share` has arrived. That is `tensor`, or without peers the share itself."""
        if self.peers is None:
            return share
        all_gather_single(tensor.detach().view(-1), share.reshape(-1), self.peers)
        return tensor

    def check_same(self, tensor: torch.Tensor, what: str) -> bool:
        """Raise `StepError` on all peers unless they have the same tensor, up to rounding. The host waits for it.

        Return False if it is all zeros, so that nothing was compared.
        """
        if self.peers is None:
            return True
        tensor = tensor.detach().contiguous()
        gathered = self.gathered(self.share(tensor), torch.empty_like(tensor))
        if tensor.is_floating_point():
            size = tensor.float().norm().nan_to_num(1.0)
            apart = ((gathered.float() - tensor.float()).norm() / size).nan_to_num(0.0)
        else:  # nothing rounds them
            size, apart = tensor.ne(0).any().float(), gathered.ne(tensor).any().float()
        seen = torch.stack([apart, size])
        dist.all_reduce(seen, dist.ReduceOp.MAX, group=self.peers)
        most, largest = seen.tolist()
        if most > _MOST_APART:
            raise StepError(
                f"{what} differ by {most:.0%} between the tensor-parallel ranks "
                f"{dist.get_process_group_ranks(self.peers)}; expected the same, because each sends a share. Give them "
                "the same batch and random numbers. If the values are meant to differ, the stage must return "
                "DTensor.from_local(values, mesh, [Shard(dim)]).to_local(). Then each rank sends all of them."
            )
        return largest > 0


class Sender:
    """The encoder of one tensor of a link, with its error feedback.

    With feedback, what a message loses is added to the next encoded one, in the next step if it was the last one of its
    own step (lazy error propagation).
    """

    def __init__(self, encoding: Encoding, device: torch.device, label: str) -> None:
        self.encoding = encoding
        self._dtype = torch_dtype(wide(dtype_name(encoding.dtype)))
        self._seed = crc32(label.encode())
        _, columns = matrix_of(encoding.shape)
        factor, error = encoding.transport.kept_for_message(encoding.shape)
        self._factor = torch.empty(factor, dtype=self._dtype, device=device).view(columns, -1)
        self._error = torch.empty(error, dtype=self._dtype, device=device).view(-1, columns)
        self._drawn = torch.zeros(1, dtype=torch.int64)
        self.restart()

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The tensors that one message leaves for the next."""
        codec = self.encoding.transport.encoding
        drawn = (self._drawn,) if codec is not None and codec.stochastic else ()
        return (*(kept for kept in (self._factor, self._error) if kept.numel()), *drawn)

    def restart(self) -> None:
        """Reset the error feedback, and the factor that the next factorization starts from."""
        self._error.zero_()
        if self._factor.numel():
            columns, rank = self._factor.shape
            self._factor.copy_(first_factor(columns, rank, self._seed, self._dtype, self._factor.device))

    def encoded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the message for a tensor, or for the share of it that this rank sends."""
        message = self.encoding.message(tensor.device)
        x = tensor.detach().reshape(matrix_of(self.encoding.shape)).to(self._dtype)
        if self._error.numel():
            x = x + self._error
        finite = self._factorize(x, message) if self._factor.numel() else self._encode_blocks(x, message)
        if self._error.numel():
            lost = x - self.encoding.decoded(message).view(x.shape).to(self._dtype)
            # A value that is not finite arrives as it is, but must not reach later messages.
            self._error.copy_(torch.where(finite, lost, self._error))
        return message

    def _factorize(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Write the factors of `x` to the message. Return whether they are finite."""
        p, q = self.encoding.factors(message)
        (basis,) = orthonormal([matmul_thin(x, self._factor)], self._factor.dtype)
        factor = matmul_thin(x.T, basis)
        p.copy_(basis)
        q.copy_(factor)
        finite = message.isfinite().all()
        self._factor.copy_(torch.where(finite, with_unit_columns(factor, self._factor), self._factor))
        return finite

    def _encode_blocks(self, x: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """Write `x` to the message in the codec of blocks. Return whether it is finite."""
        codec = self.encoding.transport.encoding
        assert codec is not None
        self._drawn += 1
        values = x.to(self.encoding.dtype).reshape(-1)
        kernels_for(x.device).encode(codec, values, message, self._seed + int(self._drawn))
        return values.isfinite().all()


@final
class SendEncoder:
    """The messages of one kind that a stage sends, from its tensors on. `senders` are those of encoded tensors."""

    def __init__(self, encodings: Sequence[Encoding], device: torch.device, label: str) -> None:
        self._encodings, self._device, self._label = encodings, device, label
        self.senders = {i: Sender(each, device, f"{label}, {i}") for i, each in enumerate(encodings) if each.used}
        # How often peers still compare each tensor, by its number and whether a step sends it. In an evaluation there
        # is no dropout, of which the random numbers may differ.
        self._comparisons: dict[tuple[int, bool], int] = {}

    def messages(
        self, tensors: Sequence[torch.Tensor | None], encoded: bool, in_step: bool
    ) -> tuple[torch.Tensor | None, ...]:
        """Return what is sent of the tensors. A gradient that was not computed is zeros.

        `in_step`: Whether it is sent in a step, and not in an evaluation.
        """
        found = list(tensors)
        for i, encoding in enumerate(self._encodings):
            tensor = found[i]
            if tensor is None:
                if not encoding.dtype.is_floating_point:
                    continue
                share = torch.zeros(encoding.shape, dtype=encoding.dtype, device=self._device)
            else:
                if left := self._comparisons.get((i, in_step), _MOST_COMPARISONS):
                    compared = encoding.check_same(tensor, f"{self._label}, tensor {i},")
                    self._comparisons[i, in_step] = 0 if compared else left - 1
                share = encoding.share(tensor)
            found[i] = self.senders[i].encoded(share) if encoded and i in self.senders else share
        return tuple(found)


@final
class RecvDecoder:
    """The messages of one kind that a stage receives, from the buffers that they arrive in to the complete tensors."""

    def __init__(self, encodings: Sequence[Encoding], device: torch.device) -> None:
        self._encodings, self._device = encodings, device
        # By micro-batch and tensor: encoded messages, and shares that are sent as they are.
        self.arriving: dict[tuple[int, int], torch.Tensor] = {}
        self._shares: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self, micro_batch: int, receives: Sequence[dist.P2POp], infos: Sequence[Any], encoded: bool) -> None:
        """Give each operation that receives an encoded tensor or a share the buffer of its message."""
        # The model's own inputs have no buffer. In PyTorch 2.11 their placeholders lack the attribute.
        received = [i for i, info in enumerate(infos) if getattr(info, "buffer", None) is not None]
        for index, receive in zip(received, receives, strict=True):
            encoding, at = self._encodings[index], (micro_batch, index)
            if encoded and encoding.used:
                receive.tensor = self.arriving[at] = encoding.message(self._device)
            elif encoding.peers is not None:  # it arrives at its place in the complete tensor
                receive.tensor = self._shares[at] = encoding.share(infos[index].buffer)

    def decode(self, micro_batch: int, infos: Sequence[Any]) -> None:
        """Put the decoded and gathered tensors where PyTorch's stage expects what arrived."""
        for index, (info, encoding) in enumerate(zip(infos, self._encodings, strict=False)):
            arrived, message = (kept.pop((micro_batch, index), None) for kept in (self._shares, self.arriving))
            if message is not None:
                arrived = encoding.decoded(message)
            if arrived is not None:
                info.buffer = encoding.gathered(arrived, info.buffer)


# A traced pipeline shows its passes and the messages between stages, next to what its engines show. A message begins
# when this rank posts it. A received message ends when it is needed, a sent one when the schedule waits for it. Outside
# its passes a rank waits for its neighbors. Backends that batch messages, such as NCCL, do not show them.


def trace_messages(operations: Iterable[dist.P2POp], trace: Trace, track: str, kind: str, micro_batch: int) -> None:
    """Change the operations of messages so that they add themselves to `trace`."""
    for each in operations:
        word = "sent" if each.op is dist.isend else "received"
        name = f"{kind}, micro-batch {micro_batch}, {word}"
        about: dict[str, str | int] = {"bytes": each.tensor.nbytes, "micro_step": micro_batch}
        each.op = _traced_post(each.op, trace, track, name, about)


def _traced_post(
    post: Callable[..., Any], trace: Trace, track: str, name: str, about: dict[str, str | int]
) -> Callable[..., Any]:
    """Return a function that posts a message like `post`, and adds it to a trace."""

    def traced_post(*args: Any, group_src: int | None = None, group_dst: int | None = None, **others: Any) -> Any:
        # PyTorch recognizes a send by its function, and so takes this one for a receive.
        peer = group_dst if group_dst is not None else group_src
        began = trace.mark()
        work = post(*args, **{"group_dst" if post is dist.isend else "group_src": peer}, **others)
        ended = lambda: trace.add(track, name, began, trace.mark(), about)  # noqa: E731
        return None if work is None else _TracedWork(work, ended)

    return traced_post


class _TracedWork:
    """The work of a posted message. `ended` is called once it was waited for."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._work, self._ended = work, ended

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        found = self._work.wait(*args, **kwargs)
        self._ended()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
