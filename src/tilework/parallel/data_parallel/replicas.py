"""Replicas of a module: compared between ranks, and made the same."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, broadcast
from tilework.comm.per_call.internal import lacks_memory
from tilework.dtensor.internal import compare_plain, content_hash, content_of, mode
from tilework.parallel.data_parallel.leaves import local_tensors
from tilework.parallel.passes import Passes, compare_passes

#: Advice about hooks of parameters, for messages.
HOOKS_COME_FIRST = (
    "Hooks of parameters (register_post_accumulate_grad_hook) run before gradients are averaged: "
    "call an optimizer's step() and zero_grad() after backward, or use fully_shard, whose hooks "
    "get averages"
)
_ADVICE = (
    "DistributedDataParallel gives all ranks the same parameters and the same gradients: look for "
    "code that writes to parameters on one rank only, or for optimizers with different options or "
    f"states. {HOOKS_COME_FIRST}"
)


@dataclass(frozen=True)
class Replica:
    """The facts that ranks compare after backward: counts of passes, and at times parameters."""

    passes: Passes
    parameters: Callable[[], list[tuple[str, Tensor]]]

    def digest(self, values: bool) -> int:
        """A number that is equal if counts of passes, and values where due, are equal. Local."""
        digest = self.passes.digest
        if values and self.passes.is_due():
            tensors = [tensor for _, tensor in _compared(self.parameters())]
            return hash((digest, content_of(tensors, full=mode() == "full")))
        return digest

    def find_difference(self, group: ProcessGroup) -> None:
        """Raise on every rank if counts of passes or parameters differ. Collective."""
        compare_passes(self.passes, group)
        compare_values(self.parameters(), group, _ADVICE)


def compare_values(
    parameters: Iterable[tuple[str, Tensor]], group: ProcessGroup, advice: str
) -> None:
    """Raise where parameters differ by more than rounding. Collective; blocks."""
    compare_plain(_compared(parameters), group, full=mode() == "full", advice=advice)


def _compared(parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    full = mode() == "full"
    return [(name, tensor) for name, tensor in parameters if full or tensor.is_cpu]


def check_replicas(
    parameters: Iterable[tuple[str, Tensor]],
    group: ProcessGroup,
    ignored: Sequence[str] = (),
    *,
    values: Container[str] = (),
    of: str = "DistributedDataParallel",
) -> None:
    """Raise ValueError if named parameters differ between ranks. Collective; blocks."""

    def facts() -> list[tuple[str, str]]:
        return [
            (name, described(parameter, name in values))
            for name, parameter in parameters
            if name not in ignored
        ]

    mine = agree(facts, group)
    reference = mine[0]
    for rank, theirs in zip(group.global_ranks, mine, strict=True):
        if theirs != reference:
            difference = _difference(group.global_ranks[0], reference, rank, theirs)
            raise ValueError(f"{of} needs the same parameters on all ranks, but {difference}")


def described(parameter: Tensor, values: bool) -> str:
    """Dtype and shape of a parameter's part here, as text; with hashes of the ``values``."""
    # Gradients travel in the order of memory.
    shapes = [
        f"{list(local.shape)}{'' if local.is_contiguous() else f' of strides {local.stride()}'}"
        for local in local_tensors(parameter)
    ]
    shape = " and ".join(shapes) or "no shard"
    text = f"{str(parameter.dtype)[6:]} {shape}"
    text += "" if parameter.requires_grad else ", frozen"
    if values and not parameter.is_meta:
        hashes = [content_hash(local.detach()) for local in local_tensors(parameter)]
        text += f", elements with hash {' '.join(each[:8] for each in hashes)}"
    return text


def _difference(
    first: int, reference: list[tuple[str, str]], rank: int, theirs: list[tuple[str, str]]
) -> str:
    for (name, one), (other_name, other) in zip(reference, theirs, strict=False):
        if name != other_name:
            return f"where rank {first} has {name}, rank {rank} has {other_name}"
        if one != other:
            return f"{name} is {one} on rank {first} and {other} on rank {rank}"
    more, fewer = (first, rank) if len(reference) > len(theirs) else (rank, first)
    longer, at = max(reference, theirs, key=len), min(len(reference), len(theirs))
    return (
        f"rank {first} has {len(reference)} of them and rank {rank} {len(theirs)}: rank "
        f"{fewer} lacks {longer[at][0]}, which rank {more} has"
    )


@torch.no_grad()
def broadcast_tensors(tensors: Sequence[Tensor], group: ProcessGroup, group_src: int = 0) -> None:
    """Give all ranks the tensors of a group rank, in few messages. Collective."""
    if group.size() == 1:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if not lacks_memory(tensor) and tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for alike in by_kind.values():
        small = [t for t in alike if t.nbytes < _ALONE_BYTES or not t.is_contiguous()]
        for tensor in alike:
            if tensor.nbytes >= _ALONE_BYTES and tensor.is_contiguous():
                broadcast(tensor, group=group, group_src=group_src)
        for chunk in _chunks(small):
            _broadcast_flat(chunk, group, group_src)


#: Tensors from this size on are sent in place: a message costs less than two more copies.
_ALONE_BYTES = 256 << 10
#: The size limit of a message with several tensors.
_BROADCAST_BYTES = 64 << 20


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    chunk: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if chunk and size + tensor.nbytes > _BROADCAST_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(tensor)
        size += tensor.nbytes
    if chunk:
        yield chunk


def _broadcast_flat(tensors: list[Tensor], group: ProcessGroup, group_src: int) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        broadcast(tensors[0], group=group, group_src=group_src)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    broadcast(flat, group=group, group_src=group_src)
    if group.rank() != group_src:
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        shaped = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(tensors, shaped)
