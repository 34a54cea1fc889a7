"""The interface of a native backend's engine; :mod:`.native` builds a process group on it.

An engine moves bytes (or tensors) between the ranks of one group. An engine knows nothing of
options, global ranks and error classes; it raises :class:`Fault`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from tilework.comm.flight.ring import What, describe
from tilework.comm.reduce_op import AnyReduceOp, RedOpType

Kind = Literal[
    "barrier",
    "broadcast",
    "all_reduce",
    "reduce",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
]

#: Kinds with an input, or an output, for each rank (on the root, where there is one).
MANY_INPUTS: frozenset[Kind] = frozenset({"scatter", "reduce_scatter", "all_to_all"})
MANY_OUTPUTS: frozenset[Kind] = frozenset({"all_gather", "gather", "all_to_all"})
#: Kinds with a rank that is different from the others.
ROOTED: frozenset[Kind] = frozenset({"broadcast", "reduce", "gather", "scatter"})

FaultKind = Literal["mismatch", "peer_lost", "timeout", "aborted", "closed"]
#: The kind, the group ranks at fault, detail for a person.
FaultArgs = tuple[str, tuple[int, ...], str]
#: The group rank that aborted, the kind of fault, the text for the others.
Abort = tuple[int, str, str]


class Fault(Exception):
    """An engine's failure: ``args == (kind, group ranks at fault, detail)``."""

    args: tuple[FaultKind, tuple[int, ...], str]


#: A contiguous tensor, or N of them. In the place of N tensors, one tensor stands for N equal parts
#: in memory order.
Parts = Tensor | Sequence[Tensor]


@dataclass(slots=True)
class Operation:
    """A collective on contiguous tensors, as an engine runs it.

    Inputs and outputs per kind (N = group size; the output of all_reduce may be the input):

    ==============  ======================  ===========================
    broadcast                               1 (the root's is the source)
    all_reduce      1                       1
    reduce          1                       1 at the root
    all_gather      1                       N
    gather          1                       N at the root
    scatter         N at the root           1
    reduce_scatter  N                       1
    all_to_all      N                       N
    ==============  ======================  ===========================
    """

    kind: Kind
    inputs: Parts = ()
    outputs: Parts = ()
    #: The reduction; None for kinds that do not reduce.
    reduce_op: AnyReduceOp | None = None
    #: The group rank of the root; without meaning for kinds that are not in ROOTED.
    root: int = 0
    #: The limit in seconds, set before the engine gets the operation.
    timeout: float = 0.0
    #: The public name, if it differs from the kind ("all_gather_into_tensor").
    title: str = ""
    #: The provenance digest that all ranks must have in common; 0: none.
    provenance: int = 0
    #: True to compare calls of ranks also on engines that do not always do so.
    compared: bool = False
    #: The label of the caller's dtype and shape; see :mod:`.labels`.
    label: int = 0
    #: Stand-ins for non-contiguous outputs: (the user's tensor, a contiguous stand-in).
    copy_back: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of all tensors; None for a barrier."""
        tensor = self._tensor()
        return None if tensor is None else tensor.dtype

    @property
    def device(self) -> torch.device | None:
        """The device of all tensors; None for a barrier."""
        tensor = self._tensor()
        return None if tensor is None else tensor.device

    def _tensor(self) -> Tensor | None:
        for parts in (self.outputs, self.inputs):
            if isinstance(parts, Tensor):
                return parts
            if parts:
                return parts[0]
        return None

    def tensors(self) -> list[Tensor]:
        """All tensors that the operation reads or writes, with those that are copied back."""
        inputs, outputs = self.inputs, self.outputs
        tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        tensors += [outputs] if isinstance(outputs, Tensor) else outputs
        if self.copy_back:
            tensors += [tensor for tensor, _ in self.copy_back]
        return tensors

    def summary(self) -> What:
        """The name, dtype, shapes and arguments, without the tensors; for the flight record."""
        in_place = self.kind in ("all_reduce", "broadcast")
        return (
            self.title or self.kind,
            self.dtype,
            () if in_place else shapes_of(self.inputs),
            shapes_of(self.outputs),
            self.reduce_op,
            self.root if self.kind in ROOTED else None,
        )

    def describe(self) -> str:
        """The name, dtype, shapes and arguments, for a person."""
        return describe(self.summary())


def split_parts(parts: Parts, size: int) -> list[Tensor]:
    """A flat tensor for each of ``size`` ranks: the tensors of ``parts``, or equal parts of a
    single tensor.
    """
    if not isinstance(parts, Tensor):
        return [part.view(-1) for part in parts]
    return list(torch.tensor_split(parts.view(-1), size)) if size else []


def shapes_of(parts: Parts) -> Sequence[Sequence[int]]:
    """The shape of each tensor of ``parts``, which may be a single tensor."""
    return (parts.shape,) if isinstance(parts, Tensor) else [part.shape for part in parts]


def op_type(op: AnyReduceOp | None) -> str:
    """The reduction's name in lower case; "none" without a reduction."""
    if op is None:
        return "none"
    return str(op.value if isinstance(op, RedOpType) else op.type.value)


def op_factor(op: AnyReduceOp | None) -> float:
    """The factor of a PREMUL_SUM; 1 otherwise."""
    return 1.0 if op is None or isinstance(op, RedOpType) else op.factor


class Completion(Protocol):
    """A handle on an operation that was handed to an engine: tells whether it is done, and waits
    for it.
    """

    def done(self) -> bool: ...
    def poll(self) -> bool:
        """As :meth:`done`, for a caller that polls: a poll may advance a short operation."""
        ...

    def wait(self, timeout: float) -> bool:
        """Block until the operation is done; False if it is not after ``timeout`` seconds
        (negative: no limit). Raise Fault if it failed.
        """
        ...

    def fault(self) -> FaultArgs | None: ...
    def add_done_callback(self, fn: Callable[[], None], /) -> None: ...
    def source(self) -> int:
        """The group rank that a received message came from."""
        ...


class Engine(Protocol):
    """A rank's end of a native group: the interface of all engines. It generalises that of
    ``tilework/_core.pyi``.
    """

    #: The exception class of failed operations.
    fault_type: type[Exception]
    #: The exceptions that refuse a call before anything is sent.
    refusals: tuple[type[Exception], ...]
    name: str
    #: True if the engine reads tensors' addresses at the call; False if it may read them later.
    takes_addresses: bool
    #: True if a completed message has arrived: no message is in flight unseen by this rank.
    sees_messages: bool

    def run(self, operation: Operation) -> None: ...
    def submit(self, operation: Operation) -> Completion: ...
    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> Completion: ...
    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> Completion: ...
    def let_go(self, buffers: object) -> None:
        """Release the buffers of a finished operation."""
        ...

    def sequence(self) -> int: ...
    def last_entered(self) -> list[str]:
        """A text for each rank of the group about the operation that it entered last, for error
        messages.
        """
        ...

    def report_failure(self, text: str) -> None:
        """Publish ``text``, the reason of this rank's failure, to the other ranks."""
        ...

    def failure_reports(self, timeout: float) -> list[str | None]:
        """The text that each rank has passed to :meth:`report_failure`; None for ranks that have
        passed none within ``timeout`` seconds.
        """
        ...

    def abort(self, kind: str, text: str) -> None: ...
    def aborted(self) -> Abort | None: ...
    def blocked(self) -> Sequence[tuple[int, int, str]]:
        """The ranks whose own threads wait in an operation that this rank has not called.

        Each comes as (group rank, number of the operation, text that names the operation).
        """
        ...

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        """The operation that the calling thread waits in, and the awaited ranks, as from
        ``waiting`` of a process group.
        """
        ...

    def is_owner(self) -> bool:
        """True on the rank's own thread, which made the group."""
        ...

    def departed(self) -> Sequence[int]:
        """The group ranks that the engine knows to have ended or left."""
        ...

    def close(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
