"""The ``pretend`` backend: an engine without peers, for a rank of a job that is only planned.

Outputs get contents as if every peer that has not run had this rank's values: a sum is then the
input times the number of ranks. Tensors without memory stay as they are. Nothing waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.completion import PythonCompletion
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.python_engine import PythonEngine
from tilework.comm.backends.tensor_memory import unseen
from tilework.comm.backends.threads.reference import combine
from tilework.comm.forms import FORMS, Operation, Parts, op_factor, op_type, split_parts
from tilework.comm.per_call.call_recorder import is_hidden
from tilework.comm.per_call.callsite import call_site
from tilework.comm.pretence import Pretence, PretendedCall, Sizes, current_pretence
from tilework.errors import DistBackendError

#: The most bytes of a row that is kept for the other ranks.
_MOST_ROW = 32768
#: Reductions of N equal values that give the value.
_IDEMPOTENT = ("avg", "min", "max", "band", "bor")
#: Kinds in which ranks get what others that ran before have given, if it is small.
_EXCHANGED = ("all_gather", "gather", "all_reduce", "reduce")
#: Kinds in which all ranks have tensors of one size.
_EQUAL_SIZES = ("all_reduce", "broadcast", "reduce", "scan", "exscan")
#: Kinds in which a rank has a part for each rank, and gets a part from each.
_SENDS_PARTS = ("all_to_all", "reduce_scatter", "scatter")
_GETS_PARTS = ("all_gather", "all_to_all", "gather")


def moved_bytes(kind: str, rank: int, size: int, inputs: Parts, outputs: Parts) -> int:
    """The bytes that a rank sends or receives, whichever is more, as ``explain()`` counts them."""
    sent, received = _bytes_of(inputs), _bytes_of(outputs)
    if kind == "all_reduce":
        return 2 * received * (size - 1) // size
    if kind in ("broadcast", "reduce", "scan", "exscan"):
        return max(sent, received) if size > 1 else 0
    if kind == "all_to_all":
        return max(_beside(inputs, rank, size), _beside(outputs, rank, size))
    return max(sent, received) - (min(sent, received) or max(sent, received) // size)


def _bytes_of(parts: Parts) -> int:
    return parts.nbytes if isinstance(parts, Tensor) else sum(part.nbytes for part in parts)


def _sizes(parts: Parts, size: int, are_parts: bool) -> Sizes:
    """The elements that go to or come from each rank: a number if they are equal."""
    if isinstance(parts, Tensor):
        return parts.numel() // (size if are_parts else 1)
    numels = tuple(part.numel() for part in parts)
    return numels if len(set(numels)) > 1 else next(iter(numels), None)


def _beside(parts: Parts, rank: int, size: int) -> int:
    """The bytes of all parts but that of ``rank``."""
    if isinstance(parts, Tensor):
        return parts.nbytes * (size - 1) // size
    return _bytes_of(parts) - parts[rank].nbytes


class PretendEngine(PythonEngine):
    """A rank's end of a group whose other ranks do not run."""

    name = "pretend"
    takes_addresses = True

    def __init__(self, request: DistributedBackendOptions, pretence: Pretence) -> None:
        super().__init__(request.group_rank, request.global_ranks_in_group)
        self.group = request.group_id
        self.ranks = request.global_ranks_in_group
        self.pretence = pretence
        #: By peer, kind and tag: the number of messages.
        self._messages: Counter[tuple[Any, ...]] = Counter()

    # -- collectives ---------------------------------------------------------------------

    def perform(self, operation: Operation) -> None:
        self._note(operation)
        known = _all(self.pretence.has_values, operation.inputs)
        root = FORMS[operation.title or operation.kind].root if operation.title in FORMS else ""
        if root in ("src", "group_src"):
            self._from_root(operation, known)
        elif known:
            row = operation.inputs[0] if operation.kind in _EXCHANGED else None
            own = row.clone() if row is not None and row.nbytes <= _MOST_ROW else None
            _fill(operation, self.rank, self.size)
            if own is not None and not own.is_meta:
                self._take_rows(operation, own)
        else:
            _each(self.pretence.lose, operation.outputs)

    def _take_rows(self, operation: Operation, own: Tensor) -> None:
        """Take small rows, also those to reduce, from ranks that ran in an earlier pass."""
        gathers = operation.kind in ("all_gather", "gather")
        call = operation.kind, own.dtype, gathers or own.numel()  # ranks may have parted before
        key = self.group, self.ranks, self.sequence(), *call
        others = self.pretence.job.exchange(key, self.rank, own.view(-1).tolist())
        rows = {rank: torch.tensor(row, dtype=own.dtype) for rank, row in others.items()}
        if gathers:
            uneven = not isinstance(operation.outputs, Tensor)
            parts = split_parts(operation.outputs, self.size) if rows or uneven else []
            for rank, part in enumerate(parts):
                even = (each for each in (own, *rows.values()) if each.numel() == part.numel())
                row = rows[rank] if rank in rows else next(even, None)
                self.pretence.lose(part) if row is None else _copy(part, row)
        elif rows and operation.outputs:
            every = [rows.get(rank, own.view(-1)) for rank in range(self.size)]
            factors = [op_factor(operation.reduce_op)] * self.size
            _copy(operation.outputs[0], combine(every, op_type(operation.reduce_op), factors))

    def submit(self, operation: Operation) -> PythonCompletion:
        self.run(operation)
        return _Ended(self.pretence, len(self.pretence.calls) - 1)

    def _note(self, operation: Operation) -> None:
        kind = operation.kind
        op = op_type(operation.reduce_op)
        shapes: Any = ()
        sizes: tuple[Sizes, Sizes] = None, None
        if kind in _EQUAL_SIZES:
            parts = operation.outputs if kind == "broadcast" else operation.inputs
            shapes = tuple(tuple(part.shape) for part in parts)
        else:
            sizes = (
                _sizes(operation.inputs, self.size, kind in _SENDS_PARTS),
                _sizes(operation.outputs, self.size, kind in _GETS_PARTS),
            )
        facts = kind, str(operation.dtype), op, operation.root, shapes, operation.provenance
        moved = moved_bytes(kind, self.rank, self.size, operation.inputs, operation.outputs)
        text, site = operation.describe(), call_site()
        rest = None, operation.is_async, is_hidden(), None, sizes
        self.pretence.note(PretendedCall(self.group, self.ranks, text, facts, moved, site, *rest))

    def _from_root(self, operation: Operation, known: bool) -> None:
        """Take the root's values where the root has run; else a broadcast leaves the own values."""
        key = self.group, self.ranks, self.sequence()
        sent, outputs = self.pretence.job.sent, operation.outputs
        if self.rank == operation.root:
            is_scatter = operation.kind == "scatter"
            parts = split_parts(operation.inputs, self.size) if is_scatter else list(outputs)
            if is_scatter:
                outputs[0].view(-1).copy_(parts[self.rank])
            if known and _all(self.pretence.has_values, parts):
                sent[key] = [part.clone() for part in parts]
        elif key in sent:
            value = sent[key][self.rank if operation.kind == "scatter" else 0]
            _copy(outputs[0], value)
        elif operation.kind == "scatter":
            _each(self.pretence.lose, outputs)

    # -- point to point ------------------------------------------------------------------

    @unseen
    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        key, _ = self._message("send", tensor, dst, tag)
        if self.pretence.has_values(tensor):
            self.pretence.job.sent[key] = [tensor.clone()]
        return _Ended()

    @unseen
    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> PythonCompletion:
        key, place = self._message("recv", tensor, src, tag)
        sent = self.pretence.job.sent.get(key)
        if sent is None:
            self.pretence.lose(tensor)
        else:
            _copy(tensor, sent[0])
        return _Ended(self.pretence, place, src)

    def _message(
        self, kind: str, tensor: Tensor, peer: int, tag: int
    ) -> tuple[tuple[Any, ...], int]:
        """Note a message; return the key of the values, and the place of the note."""
        self.check_open()
        there = self.ranks[peer] if peer >= 0 else peer
        dtype = str(tensor.dtype)
        facts = kind, dtype, tensor.numel(), tag
        text = f"{kind} {dtype.removeprefix('torch.')} {list(tensor.shape)} tag {tag}"
        call = self.group, self.ranks, text, facts, tensor.nbytes, call_site(), there, True
        place = self.pretence.note(PretendedCall(*call))
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        self._messages[kind, peer, tag] += 1
        return (self.group, self.ranks, ends, tag, self._messages[kind, peer, tag]), place

    # -- state ---------------------------------------------------------------------------

    def last_entered(self) -> list[str]:
        return [""] * self.size

    def report_failure(self, text: str) -> None:
        """Do nothing: no other rank runs."""

    def failure_reports(self, timeout: float) -> list[str | None]:
        return [None] * self.size

    def departed(self) -> Sequence[int]:
        return ()

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        return ()

    def announce_abort(self, kind: str, text: str) -> None:
        """Do nothing: no other rank runs."""

    def interrupt(self) -> None:
        """Do nothing: no operation is in flight."""

    def release(self) -> None:
        """Do nothing: the engine has no connections."""


class PretendGroup(NativeGroup):
    """A group of a pretended rank. Takes tensors without memory, and those of any device."""

    devices = ("cpu", "meta")
    takes_rows = True  # as groups of one host


def create_pretend_group(request: DistributedBackendOptions, options: Any) -> NativeGroup:
    """A group whose other ranks do not run. Returns at once; refuses a real rank."""
    pretence = current_pretence()
    if pretence is None:
        raise DistBackendError(
            "backend 'pretend' is for ranks of tilework.plan: run the program by "
            "`tilework plan --ranks N`, or name a backend that moves data"
        )
    engine = PretendEngine(request, pretence)
    return PretendGroup(engine, request.group_rank, request.group_size, request.timeout)


class _Ended(PythonCompletion):
    """The completion of an ended operation, which notes the program's wait for it."""

    def __init__(self, pretence: Pretence | None = None, place: int = -1, source: int = -1) -> None:
        super().__init__()
        self._pretence, self._place = pretence, place
        self.source_rank = source
        self.complete()

    def wait(self, timeout: float) -> bool:
        pretence, self._pretence = self._pretence, None
        if pretence is not None:
            call = pretence.calls[self._place]
            text = f"wait for {call.text}"
            pretence.note(
                call._replace(text=text, nbytes=0, site=call_site(), waits_for=self._place)
            )
        return super().wait(timeout)


def _each(act: Any, parts: Parts) -> None:
    for part in [parts] if isinstance(parts, Tensor) else parts:
        act(part)


def _all(holds: Any, parts: Parts) -> bool:
    return all(map(holds, [parts] if isinstance(parts, Tensor) else parts))


def _copy(target: Tensor, value: Tensor) -> None:
    """Copy as many elements as ``target`` has; repeat those of ``value`` where it has fewer."""
    if target.is_meta or not target.numel() or not value.numel():
        return
    value = value.reshape(-1)
    if value.numel() != target.numel():
        value = value.repeat(-(-target.numel() // value.numel()))[: target.numel()]
    with torch.inference_mode():
        target.view(-1).copy_(value)


def _fill(operation: Operation, rank: int, size: int) -> None:
    """Fill the outputs as if each rank had this rank's inputs."""
    inputs, outputs = operation.inputs, operation.outputs
    if not len(outputs) or not len(inputs):
        return
    if operation.kind in ("all_gather", "gather"):
        for part in [outputs] if isinstance(outputs, Tensor) else outputs:  # one tensor: repeated
            _copy(part, inputs[0])
    elif operation.kind == "all_to_all":
        value = split_parts(inputs, size)[rank].clone()
        for part in split_parts(outputs, size):
            _copy(part, value)
    else:
        own = split_parts(inputs, size)[rank] if operation.kind == "reduce_scatter" else inputs[0]
        count = size
        if operation.kind in ("scan", "exscan"):
            before = rank if operation.root == 0 else size - 1 - rank
            count = before + (operation.kind == "scan")
        _copy(outputs[0], _reduced(own, operation, count))


def _reduced(value: Tensor, operation: Operation, count: int) -> Tensor:
    """The reduction of ``count`` tensors that equal ``value``."""
    op = op_type(operation.reduce_op)
    if op in _IDEMPOTENT or value.dtype is torch.bool:
        return value if op != "bxor" or count % 2 else torch.zeros_like(value)
    if op == "bxor":
        return value if count % 2 else torch.zeros_like(value)
    if op == "product":
        return value**count
    return (value * (count * op_factor(operation.reduce_op))).to(value.dtype)
