"""Messages between two ranks. None of these is collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.per_call import checks
from tilework.comm.per_call.fast_function import core_first
from tilework.comm.world import AnyGroup, member


@core_first(inputs="tensor")
def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Start sending ``tensor`` to rank ``dst``. Does not block.

    Do not touch the tensor until the Work is done.

    Args:
        tensor: The tensor to send.
        dst: The receiver's global rank; or give ``group_dst``, the receiver's group rank.
        tag: The receiver must give the same tag. Messages with the same tag arrive in order.

    Returns:
        The Work; None on a rank outside the group, with a warning once.

    Raises:
        ValueError: ``dst`` is this rank, or not in the group.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0])
        ...     work = dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)
        ...     work.wait()
        ...     return x.item()
        >>> run_ranks(2, program)
        [1.0, 1.0]
    """
    pg = member(group, "isend")
    if pg is None:
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    peer = _peer(pg, dst, group_dst, "dst")
    return pg.fast_path.isend(tensor, peer, tag) or pg.send([tensor], peer, tag)


@core_first(outputs="tensor")
def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Start receiving into ``tensor`` from rank ``src``, or from any rank if ``src`` is not given.

    Does not block. Do not touch the tensor until the Work is done. ``work.source_rank()`` is the
    sender.

    Args:
        tensor: Overwritten; must have the dtype and the number of elements of the message.
        src: The sender's global rank; or give ``group_src``, the sender's group rank.
        tag: The sender must have given the same tag.

    Returns:
        The Work; None on a rank outside the group, with a warning once.

    Raises:
        ValueError: ``src`` is this rank, or not in the group.

    Example:
        See :func:`isend`.
    """
    pg = member(group, "irecv")
    if pg is None:
        return None
    tensor = checks.check_tensor(tensor, "tensor")
    if src is None and group_src is None:
        return pg.fast_path.irecv(tensor, -1, tag) or pg.recv_anysource([tensor], tag)
    peer = _peer(pg, src, group_src, "src")
    return pg.fast_path.irecv(tensor, peer, tag) or pg.recv([tensor], peer, tag)


@core_first(inputs="tensor")
def send(
    tensor: Tensor,
    dst: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send ``tensor`` to rank ``dst``; block until it may be reused. See :func:`isend`.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = torch.tensor([rank + 1.0])
        ...     return dist.send(x, 1) if rank == 0 else (dist.recv(x), x.item())
        >>> run_ranks(2, program)
        [None, (0, 1.0)]
    """
    pg = member(group, "send")
    if pg is None:
        return
    peer = _peer(pg, dst, group_dst, "dst")
    if not pg.fast_path.send(tensor, peer, tag):
        tensor = checks.check_tensor(tensor, "tensor")
        pg.send([tensor], peer, tag).wait()


@core_first(outputs="tensor")
def recv(
    tensor: Tensor,
    src: int | None = None,
    group: AnyGroup = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into ``tensor``; block until done. See :func:`irecv` and :func:`send`.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Example:
        See :func:`send`.
    """
    pg = member(group, "recv")
    if pg is None:
        return -1
    anyone = src is None and group_src is None
    peer = -1 if anyone else _peer(pg, src, group_src, "src")
    source = pg.fast_path.recv(tensor, peer, tag)
    if source >= 0:
        return pg.global_ranks[source]
    tensor = checks.check_tensor(tensor, "tensor")
    work = pg.recv_anysource([tensor], tag) if anyone else pg.recv([tensor], peer, tag)
    work.wait()
    return work.source_rank() if anyone else pg.global_ranks[peer]


def _peer(pg: ProcessGroup, rank: int | None, group_rank: int | None, name: str) -> int:
    peer = checks.group_root(pg, rank, group_rank, name)
    if peer == pg.rank():
        raise ValueError(
            f"{name}={pg.global_ranks[peer]} is this rank itself: a rank cannot send to, or "
            f"receive from, itself"
        )
    return peer


class P2POp:
    """A message for :func:`batch_isend_irecv`.

    Args:
        op: ``isend`` or ``irecv``.
        tensor: The tensor to send, or to receive into.
        peer: The other side's global rank; or give ``group_peer``, the other side's group rank.
        group: None: the default group.
        tag: As for :func:`isend`.

    Raises:
        ValueError: ``op`` is another function, or the peer is this rank, or not in the group.

    Example:
        >>> P2POp(print, None, 0)
        Traceback (most recent call last):
        ValueError: op must be isend or irecv, got <built-in function print>
    """

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: AnyGroup = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op not in (isend, irecv):
            raise ValueError(f"op must be isend or irecv, got {op!r}")
        checks.check_tensor(tensor, "tensor")
        self.op = op
        self.tensor = tensor
        self.group = group
        self.tag = tag
        pg = member(group, "P2POp")
        self.peer, self.group_peer = peer, group_peer  # unused: this rank is not in the group
        if pg is not None:
            self.group_peer = _peer(pg, peer, group_peer, "peer")
            self.peer = pg.global_ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, {list(self.tensor.shape)}, peer={self.peer})"


def batch_isend_irecv(p2p_op_list: Iterable[P2POp]) -> list[Work]:
    """Start several messages at once. Does not block.

    Ranks may list messages between them in different orders.

    Returns:
        One Work per message.

    Raises:
        ValueError: The list is empty, or holds objects other than P2POp.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mine, other = torch.tensor([float(rank)]), torch.zeros(1)
        ...     sending = dist.P2POp(dist.isend, mine, 1 - rank)
        ...     receiving = dist.P2POp(dist.irecv, other, 1 - rank)
        ...     for work in dist.batch_isend_irecv([sending, receiving]):
        ...         work.wait()
        ...     return other.item()
        >>> run_ranks(2, program)
        [1.0, 0.0]
    """
    batch = list(p2p_op_list)  # a generator gives them once
    if not batch or not all(isinstance(op, P2POp) for op in batch):
        raise ValueError(f"p2p_op_list must be a list of P2POp, not empty; got {batch!r}")
    works = [op.op(op.tensor, None, op.group, op.tag, op.group_peer) for op in batch]
    return [work for work in works if work is not None]
