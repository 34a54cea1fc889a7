"""Plans that are one collective, on unchanged tensors and outputs, without packing.

Each function looks at one rank's pieces and returns the call that moves them all, or None. Memory
may fit on one rank only, so ranks agree whether all have such a call (see ``run_mode``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilework.comm.backends.per_device import backend_for
from tilework.comm.operations import collectives
from tilework.comm.transfer.local_transfer import MOVED, LocalTransfer, flat, in_rows
from tilework.layout import Piece

CollectiveCall = Callable[[], object]
_Tensors = list[Tensor]


def single_call(local: LocalTransfer) -> CollectiveCall | None:
    """The call that runs the whole plan as one collective; None if that would need packing."""
    kind, pg = local.plan.collective.kind, local.pg
    # If several subgroups each run the collective, an exchange of all ranks does the same.
    everyone = len(local.plan.collective.ranks) == pg.size()
    if local.plan.reduces:
        backend = backend_for(pg, local.device.type)
        may_reduce = everyone and backend.reduces(local.reduce_op, local.dtype)
        return _REDUCTIONS[kind](local) if may_reduce and kind in _REDUCTIONS else None
    inputs = _tensors(local, local.sends, local.source_view)
    outputs = _tensors(local, local.receives, local.target_view)
    if inputs is None or outputs is None:
        return None
    return (_MOVES[kind] if everyone else _all_to_all)(local, inputs, outputs)


def same_for_all(streams: Sequence[Sequence[Piece]]) -> bool:
    """True if this rank sends the same elements to every rank: all ``streams`` are equal."""
    first = [(piece.src_tile, piece.box) for piece in streams[0]]
    return all([(p.src_tile, p.box) for p in stream] == first for stream in streams)


def _tensors(
    local: LocalTransfer, streams: Sequence[Sequence[Piece]], view: Callable[[Piece], Tensor]
) -> _Tensors | None:
    """A tensor for each rank; None if a rank gets several pieces, or packing is needed."""
    rows = local.pg.takes_rows and not local.plan.reduces and local.memory_dtype in MOVED
    tensors = []
    for pieces in streams:
        if len(pieces) > 1:
            return None
        piece = view(pieces[0]) if pieces else local.nothing
        tensor = piece if rows and in_rows(piece) else flat(piece)
        if tensor is None:
            return None
        tensors.append(tensor)
    return tensors


def _fits(local: LocalTransfer, tensors: Sequence[Tensor]) -> bool:
    """True if all ``tensors`` have the same size, or the backend takes different sizes."""
    return local.pg.uneven_sizes or len({tensor.numel() for tensor in tensors}) == 1


def _all_to_all(local: LocalTransfer, inputs: _Tensors, outputs: _Tensors) -> CollectiveCall | None:
    # Backends that want equal sizes pack other sizes themselves, into unbounded memory.
    if not local.pg.uneven_sizes:
        return None
    return lambda: collectives.all_to_all(outputs, inputs, local.pg)


def _all_gather(local: LocalTransfer, inputs: _Tensors, outputs: _Tensors) -> CollectiveCall | None:
    if not same_for_all(local.sends) or not _fits(local, outputs):
        return None
    return lambda: collectives.all_gather(outputs, inputs[0], local.pg)


def _gather(local: LocalTransfer, inputs: _Tensors, outputs: _Tensors) -> CollectiveCall | None:
    root = _root(local)
    if not _only(local.sends, root):
        return None
    at_root = local.pg.rank() == root
    if not _fits(local, outputs) if at_root else any(local.receives):
        return None
    into = outputs if at_root else None
    return lambda: collectives.gather(inputs[root], into, group=local.pg, group_dst=root)


def _scatter(local: LocalTransfer, inputs: _Tensors, outputs: _Tensors) -> CollectiveCall | None:
    root = _root(local)
    if not _only(local.receives, root):
        return None
    at_root = local.pg.rank() == root
    if not _fits(local, inputs) if at_root else any(local.sends):
        return None
    parts = inputs if at_root else None
    return lambda: collectives.scatter(outputs[root], parts, group=local.pg, group_src=root)


def _broadcast(local: LocalTransfer, inputs: _Tensors, outputs: _Tensors) -> CollectiveCall | None:
    root = _root(local)
    if not _only(local.receives, root):
        return None
    if local.pg.rank() != root:
        if any(local.sends):
            return None
        return lambda: collectives.broadcast(outputs[root], group=local.pg, group_src=root)
    others = [pieces for rank, pieces in enumerate(local.sends) if rank != root]
    if not same_for_all(others):
        return None
    tensor = inputs[root - 1]  # the tensor for any other rank

    def send_and_keep() -> None:
        collectives.broadcast(tensor, group=local.pg, group_src=root)
        local.keep()

    return send_and_keep


def _all_reduce(local: LocalTransfer) -> CollectiveCall | None:
    outputs = list(local.target.tensors.values())
    result = flat(outputs[0]) if len(outputs) == 1 else None
    if result is None or not _in_order_of_ranks(local):
        return None

    def copy_and_reduce() -> None:
        local.keep()
        collectives.all_reduce(result, local.reduce_op, local.pg)

    return copy_and_reduce


def _reduce_scatter(local: LocalTransfer) -> CollectiveCall | None:
    outputs = list(local.target.tensors.values()) or [local.nothing]
    result, inputs = flat(outputs[0]), _tensors(local, local.sends, local.source_view)
    if len(outputs) > 1 or result is None or inputs is None or not _in_order_of_ranks(local):
        return None
    if not _fits(local, inputs):
        return None
    return lambda: collectives.reduce_scatter(result, inputs, local.reduce_op, local.pg)


def _in_order_of_ranks(local: LocalTransfer) -> bool:
    """True if group rank r sends exactly term r of this rank's only target tile."""
    (tile, *_) = [*local.target.tensors, None]
    if tile is None or local.plan.target.tiles[tile].box.empty:
        return True
    box = local.plan.target.tiles[tile].box
    return all(
        len(pieces) == 1 and (pieces[0].term, pieces[0].box) == (rank, box)
        for rank, pieces in enumerate(local.receives)
    )


def _only(streams: Sequence[Sequence[Piece]], rank: int) -> bool:
    return not any(pieces for number, pieces in enumerate(streams) if number != rank)


def _root(local: LocalTransfer) -> int:
    root = local.plan.collective.root
    return local.pg.group_ranks[root]


_MOVES: dict[str, Callable[[LocalTransfer, _Tensors, _Tensors], CollectiveCall | None]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "broadcast": _broadcast,
}
_REDUCTIONS = {"all_reduce": _all_reduce, "reduce_scatter": _reduce_scatter}
