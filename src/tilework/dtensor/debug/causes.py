"""Collectives and their causes: ``explain()``, ``strict()``, and the warning of gathers.

While no ``explain()`` or ``strict()`` is open, an operator only reads one variable. Agreements
between ranks and the keys of random numbers are not listed.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import call_site, user_frame
from tilework.comm.world import current_world
from tilework.dtensor.debug.formatting import layout_text, tensor_text
from tilework.dtensor.spec import DTensorSpec, without_sizes
from tilework.layout import Steps
from tilework.mesh import DeviceMesh
from tilework.show import Page, Shown, TextTable, count_text


@dataclass(frozen=True)
class CollectiveEvent:
    """A collective, and the cause."""

    operator: str
    """The cause: torch's name of the operator, or the method; ``backward`` if it is unknown in a
    backward pass. For gradients that are reduced together the number, like ``3 parameters``."""
    collective: str
    """``all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, ``plan`` or
    ``message``."""
    axes: tuple[str, ...]
    """The axes of the mesh along which it runs; by number where they have no names."""
    tensor: str
    """The tensor before, like ``f32[8@dp, 4]``. For gradients that are reduced together the local
    shapes, with the dtypes."""
    target: str
    """The tensor afterwards; ``summed`` for gradients that are reduced together."""
    nbytes: int
    """The bytes on the rank that sends or receives the most."""
    site: str
    """``file:line in function`` of the program; where ``backward`` was called for a gradient."""
    gradient: bool = False
    """True in a backward pass."""
    gathered: bool = False
    """True if the operator has no rule for the call."""


@dataclass
class EventLog(Shown):
    """This rank's collectives. ``print`` shows them as a table, and rich draws it."""

    events: list[CollectiveEvent] = field(default_factory=list)
    """The collectives, in the order in which they ran."""

    @property
    def nbytes(self) -> int:
        """The bytes of all events."""
        return sum(event.nbytes for event in self.events)

    @property
    def gathered(self) -> list[CollectiveEvent]:
        """The events of gathers for lack of a rule."""
        return [event for event in self.events if event.gathered]

    def __len__(self) -> int:
        return len(self.events)

    def __rich__(self) -> Page:
        gathered = len(self.gathered)
        causes = f", {gathered} of them to gather for lack of a rule" if gathered else ""
        count = count_text(len(self), "collective") if self.events else "no collectives"
        summary = f"{count}{causes}, {self.nbytes:,} bytes per rank"
        titles = ("operator", "collective", "axes", "tensor", "to", "bytes", "where")
        rows = [
            (
                event.operator + " (gradient)" * event.gradient + " (no rule)" * event.gathered,
                event.collective,
                ", ".join(event.axes),
                event.tensor,
                event.target,
                f"{event.nbytes:,}",
                event.site,
            )
            for event in self.events
        ]
        return Page(summary, TextTable(titles, rows, {5}))


#: The number of open ``explain`` and ``strict`` blocks, of all ranks of this process.
watchers = 0
_lock = threading.Lock()

#: The reasons for which an operator gathers.
NO_RULE = "has no rule for this call on DTensors"
TO_PLAIN_TENSOR = "writes values of DTensors to a plain tensor, which has no layout"
_GATHERS = ", and gathers its tensors"
_REMEDIES = {
    NO_RULE: "tilework.dtensor.register_rule teaches DTensor operators of your own",
    TO_PLAIN_TENSOR: "write to a DTensor, or compute a new tensor, and they stay in parts",
}
#: Steps that communicate nothing.
_LOCAL = ("slice", "fill")


class GatherWarning(UserWarning):
    """A warning that an operator gathers: every rank gets the full tensors.

    The operator has no rule for the call, or writes to a plain tensor.
    """


@dataclass(eq=False)
class _Recorder:
    """The open ``explain`` and ``strict`` blocks of one rank."""

    #: The logs of the open ``explain`` blocks, the outermost first. Each gets every event.
    logs: list[EventLog] = field(default_factory=list)
    #: The number of open ``strict`` blocks.
    strict: int = 0
    #: The operator that the last :func:`begin_operator` reported; "" if there was none.
    operator: str = ""
    #: True if this operator gathers, for lack of a rule.
    gathered: bool = False
    #: The calls that a warning was given for.
    warned: set[Any] = field(default_factory=set)


def _recorder() -> _Recorder:
    return current_world().state(_Recorder)


@contextmanager
def explain() -> Iterator[EventLog]:
    """List each collective of DTensors on this rank within the block, with the cause.

    Local; may be nested. Costs nearly nothing while no block is open.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, explain, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        ...     with explain() as log:
        ...         x.full_tensor()
        ...     return log.events[0]
        >>> event = run_ranks(2, program)[0]
        >>> event.collective, event.axes, event.tensor, event.target, event.nbytes
        ('all_gather', ('tp',), 'f32[4@tp, 4]', 'f32[4, 4]', 32)
    """
    recorder, log = _recorder(), EventLog()
    recorder.logs.append(log)
    with _watching():
        try:
            yield log
        finally:
            recorder.logs = [other for other in recorder.logs if other is not log]


@contextmanager
def strict() -> Iterator[None]:
    """Within the block, raise for operators that would gather, as for lack of a rule for a call.

    The block is for this rank only: open it on all ranks.

    Raises:
        NotImplementedError: Within the block, by such a call, before anything moves.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, strict
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        ...     with strict():
        ...         return (x + 1).placements
        >>> run_ranks(2, program)[0]
        (Shard(dim=0),)
    """
    recorder = _recorder()
    recorder.strict += 1
    with _watching():
        try:
            yield
        finally:
            recorder.strict -= 1


@contextmanager
def _watching() -> Iterator[None]:
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(more: int) -> None:
    global watchers
    with _lock:
        watchers += more


# -- reports of the rest of the package -----------------------------------------------------


def begin_operator(operator: str, gathered: bool = False) -> None:
    """Report an operator that will move tensors to open blocks; ``strict()`` may raise."""
    recorder = _recorder()
    recorder.operator, recorder.gathered = operator, gathered
    if gathered and recorder.strict:
        raise NotImplementedError(f"{operator} {NO_RULE}{_GATHERS}: strict() forbids this")


def warn_gather(
    name: str, specs: Sequence[DTensorSpec], dtypes: Sequence[torch.dtype], why: str = NO_RULE
) -> None:
    """Warn of an operator that will gather, and ``why``; raise if strict."""
    moved = [
        (spec, dtype) for spec, dtype in zip(specs, dtypes, strict=True) if not spec.is_replicated
    ]
    recorder = _recorder()
    # Without sizes: they grow with every step of text generation.
    key = name, *((*map(without_sizes, spec.placements), spec.ndim) for spec, _ in moved)
    if not moved or (key in recorder.warned and not recorder.strict):
        return
    nbytes = sum(spec.nbytes(dtype.itemsize) for spec, dtype in moved)
    layouts = ", ".join(layout_text(spec, dtype) for spec, dtype in moved)
    text = f"{name} {why}{_GATHERS}: every rank gets {layouts} whole, {nbytes:,} bytes"
    if recorder.strict:
        raise NotImplementedError(f"{text}; strict() forbids this")
    recorder.warned.add(key)
    warn_user(f"{text} (shown once; {_REMEDIES[why]})", GatherWarning, specs[0].mesh)


def warn_user(text: str, category: type[Warning], mesh: DeviceMesh) -> None:
    """Warn at the user's line, only on the mesh's first rank: one warning for each job. Local."""
    if not mesh.is_first:
        return
    frame = user_frame(sys._getframe(1))
    warnings.warn_explicit(
        text,
        category,
        "tilework" if frame is None else frame.f_code.co_filename,
        0 if frame is None else frame.f_lineno,
    )


def tag_gradient(moved: Tensor) -> None:
    """Name the running operator as the cause of collectives for the moved input's gradient."""
    node: Any = moved.grad_fn
    if node is not None:
        node.metadata.setdefault("operator", _recorder().operator)


def record_steps(source: DTensorSpec, steps: Steps, dtype: torch.dtype) -> None:
    """Record the steps of a redistribution that begins. Called only if a block is open."""
    recorder = _recorder()
    if not recorder.logs:
        return
    for step in steps.steps:
        if step.kind in _LOCAL:
            continue
        before = source.with_placements(step.source.placements, step.source.order)
        after = source.with_placements(step.target.placements, step.target.order)
        axes = tuple(steps.names[axis] for axis in step.axes)
        layouts = layout_text(before, dtype), layout_text(after, dtype)
        _record(recorder, step.kind, axes, layouts, step.nbytes)


def record_exchange(
    spec: DTensorSpec, axes: tuple[str, ...], dtype: torch.dtype, nbytes: int
) -> None:
    """Record that ranks are about to send each other parts of a tensor. If a block is open."""
    text = layout_text(spec, dtype)
    _record(_recorder(), "all_to_all", axes, (text, f"{text} with neighbours' elements"), nbytes)


def _record(
    recorder: _Recorder, kind: str, axes: tuple[str, ...], layouts: tuple[str, str], nbytes: int
) -> None:
    operator, gradient = _cause(recorder)
    gathered = recorder.gathered and not gradient
    event = CollectiveEvent(operator, kind, axes, *layouts, nbytes, call_site(), gradient, gathered)
    for log in recorder.logs:
        log.events.append(event)


def record_reduction(spec: DTensorSpec, axes: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Record that partial gradients are about to be reduced together."""
    recorder = _recorder()
    names = spec.mesh.mesh_dim_names or tuple(map(str, range(spec.mesh.ndim)))
    group = [names[axis] for axis in axes]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    ranks = 1
    for axis in axes:
        ranks *= spec.mesh.shape[axis]
    shapes = [tensor_text(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    event = CollectiveEvent(
        f"{len(tensors)} parameter{'s' * (len(tensors) != 1)}",
        "all_reduce",
        tuple(group),
        ", ".join(shapes if len(shapes) <= 3 else [*shapes[:2], f"… {len(shapes) - 2} more"]),
        "summed",
        2 * nbytes * (ranks - 1) // ranks,
        call_site(),
        gradient=True,
    )
    for log in recorder.logs:
        log.events.append(event)


def record_message(spec: DTensorSpec, group: ProcessGroup, nbytes: int, back: bool) -> None:
    """Record a message of keys and values, or of their gradients, between ranks of ``group``."""
    mesh = spec.mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    axes = [names[axis] for axis in spec.axes_of(spec.ndim - 2) if mesh.shape[axis] > 1]
    what = "gradients of keys and values" if back else "keys and values"
    _record(_recorder(), "message", tuple(axes), (what, f"1 of {group.size()} ranks"), nbytes)


def _cause(recorder: _Recorder) -> tuple[str, bool]:
    """The operator that causes the next collective, and True if a gradient moves for it."""
    if torch._C._current_graph_task_id() == -1:
        return recorder.operator, False
    node: Any = torch._C._current_autograd_node()
    metadata = {} if node is None else node.metadata
    return metadata.get("operator", "backward"), True
