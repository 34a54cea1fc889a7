"""Collectives across hosts: each byte crosses once, and only necessary bytes cross.

Each step is one rank's part, in two halves around one ``yield``. In the first half the rank posts
receives from other hosts. At the ``yield`` the ranks meet and agree; after it data moves. So
receives are ready when data is sent, and nothing is sent if ranks disagree. ``local`` runs a
collective among the ranks of this host, through shared memory; ``Transfers`` go to other hosts.
The ranks of a host form lanes, which carry equal shares of the data between hosts. Reductions
combine the ranks of each host first, then the hosts in order, so every rank gets the same bits.
docs/algorithms/hybrid.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.rounding import Rounding
from tilework.comm.backends.threads.reference import combine
from tilework.comm.backends.threads.threads_collectives import scan_gathered, scan_source
from tilework.comm.forms import Kind, Operation, Parts, op_type, split_parts
from tilework.comm.reduce_op import AnyReduceOp, RedOpType, ReduceOp

#: Up to this many bytes hosts send each other everything instead of reducing in shares, because
#: fewer steps are faster. Between two hosts both ways move the same number of bytes.
_SMALL = 16 << 10
_SHORT = (torch.float16, torch.bfloat16)
_SUMS = ("sum", "avg", "premul_sum")


class Transfers(Protocol):
    """Sends and receives tensors between hosts; each comes with the rank at the other end."""

    def receive(self, tensors: Iterable[tuple[int, Tensor]]) -> None: ...
    def send(self, tensors: Iterable[tuple[int, Tensor]]) -> None: ...
    def wait(self) -> None:
        """Block until all sends and receives that were begun are done."""
        ...


class StepContext(Protocol):
    """The part of the hybrid engine that the collectives of this module use."""

    hosts: Hosts
    size: int
    #: The way in which sums of float32 are rounded between hosts; None: they are not.
    rounding: Rounding | None

    def local(
        self,
        kind: Kind,
        inputs: Parts,
        outputs: Parts,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """Run a collective among the ranks of this host; ``root`` is a number on this host."""
        ...

    def transfers(self) -> Transfers:
        """A new object to send tensors to other hosts, and to receive from them."""
        ...


#: Yields once, where the ranks meet.
Step = Iterator[None]


class _RoundedTransfers:
    """Transfers of float32 tensors in few bytes, which leave the rounded values at both ends."""

    def __init__(self, inner: Transfers, rounding: Rounding) -> None:
        self._inner, self._rounding = inner, rounding
        #: Received bytes, and the tensors for them.
        self._arriving: list[tuple[Tensor, Tensor]] = []

    def receive(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        pairs = list(tensors)
        sizes = [self._rounding.nbytes(tensor.numel()) for _, tensor in pairs]
        memories = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        ranks, targets = [rank for rank, _ in pairs], [tensor for _, tensor in pairs]
        self._arriving += zip(memories, targets, strict=True)
        self._inner.receive(zip(ranks, memories, strict=True))

    def send(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        data: dict[int, Tensor] = {}  # a tensor may go to several hosts
        leaving = []
        for rank, tensor in tensors:
            if id(tensor) not in data:
                data[id(tensor)] = self._rounding.encoded(tensor)
                tensor.copy_(self._rounding.decoded(data[id(tensor)], tensor.numel()))
            leaving.append((rank, tensor))
        self._inner.send((rank, data[id(tensor)]) for rank, tensor in leaving)

    def wait(self) -> None:
        self._inner.wait()
        for memory, target in self._arriving:
            target.copy_(self._rounding.decoded(memory, target.numel()))


def _sums(context: StepContext, operation: Operation) -> Transfers:
    """Transfers of partial results, which are rounded if asked: sums of float32 only."""
    transfers, is_sum = context.transfers(), op_type(operation.reduce_op) in _SUMS
    if context.rounding is None or operation.inputs[0].dtype != torch.float32 or not is_sum:
        return transfers
    return _RoundedTransfers(transfers, context.rounding)


def _shares(flat: Tensor, hosts: Hosts) -> list[Tensor]:
    """``flat`` cut into a near-equal part for each rank with a lane, and empty parts for others."""
    shares = list(torch.tensor_split(flat, hosts.lanes))
    return shares + [flat[:0]] * (len(hosts.local) - hosts.lanes)


# -- reductions -----------------------------------------------------------------------------


def _within(op: AnyReduceOp | None, dtype: torch.dtype, size: int) -> AnyReduceOp | None:
    """The reduction to use within a host: a sum, perhaps scaled, for an average, else ``op``."""
    if op_type(op) != "avg":
        return op
    # A sum of short floats might overflow where their mean does not.
    return ReduceOp(RedOpType.PREMUL_SUM, 1 / size) if dtype in _SHORT else ReduceOp.SUM


def _across(partials: Sequence[Tensor], op: AnyReduceOp | None, size: int) -> Tensor:
    """Combine the hosts' partial results, in the order of hosts: the second half of ``op``."""
    kind = op_type(op)
    summed = kind in ("avg", "premul_sum")
    total = combine(partials, "sum" if summed else kind, ())
    if kind == "avg" and total.dtype not in _SHORT:
        total = total.div_(size)
    return total


def _partial(context: StepContext, operation: Operation, shares: list[Tensor], own: Tensor) -> None:
    """Reduce the inputs of this host's ranks, cut into ``shares``; ``own`` gets this rank's."""
    op = _within(operation.reduce_op, own.dtype, context.size)
    context.local("reduce_scatter", shares, [own], op)


def _blanks(hosts: Hosts, own: Tensor) -> list[Tensor]:
    """A tensor for each host's partial result: ``own`` for this host, new memory for others."""
    return [own if h == hosts.index else torch.empty_like(own) for h in _all(hosts)]


def _all(hosts: Hosts) -> range:
    return range(len(hosts.ranks))


def _beside(hosts: Hosts, by_host: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """The items of ``by_host`` for other hosts, each with the rank of this rank's lane there."""
    if hosts.lane is None:
        return []
    return [(hosts.peer(h), by_host[h]) for h in hosts.others]


def all_reduce(context: StepContext, operation: Operation) -> Step:
    """Reduce-scatter on hosts, all-reduce between hosts along each lane, all-gather on hosts."""
    hosts, op = context.hosts, operation.reduce_op
    shares = _shares(operation.inputs[0].view(-1), hosts)
    own = torch.empty_like(shares[hosts.local_rank])
    at_once = len(hosts.ranks) == 2 or own.nbytes <= _SMALL
    pieces = [own] * len(hosts.ranks) if at_once else list(own.tensor_split(len(hosts.ranks)))
    partials = _blanks(hosts, pieces[hosts.index])
    transfers = _sums(context, operation)
    transfers.receive(_beside(hosts, partials))
    yield
    _partial(context, operation, shares, own)
    transfers.send(_beside(hosts, pieces))
    transfers.wait()
    total = _across(partials, op, context.size)
    if not at_once:
        total = _collected(hosts, _sums(context, operation), pieces, total, own)
    context.local("all_gather", [total], _shares(operation.outputs[0].view(-1), hosts))


def _collected(
    hosts: Hosts, transfers: Transfers, pieces: list[Tensor], own: Tensor, whole: Tensor
) -> Tensor:
    """Exchange this host's combined piece ``own`` for those of the others; return ``whole``."""
    transfers.receive(_beside(hosts, pieces))
    transfers.send(_beside(hosts, [own] * len(hosts.ranks)))
    transfers.wait()
    pieces[hosts.index].copy_(own)
    return whole


def reduce(context: StepContext, operation: Operation) -> Step:
    """Reduce-scatter on hosts, send results to the root's host along lanes, gather there."""
    hosts, home = context.hosts, context.hosts.host_of(operation.root)
    shares = _shares(operation.inputs[0].view(-1), hosts)
    own = torch.empty_like(shares[hosts.local_rank])
    partials, transfers = _blanks(hosts, own), _sums(context, operation)
    if hosts.index == home:
        transfers.receive(_beside(hosts, partials))
    yield
    _partial(context, operation, shares, own)
    if hosts.index != home:
        transfers.send([(hosts.peer(home), own)] if hosts.lane is not None else [])
        transfers.wait()
        return
    transfers.wait()
    total = _across(partials, operation.reduce_op, context.size)
    at_root = hosts.me == operation.root
    outputs = _shares(operation.outputs[0].view(-1), hosts) if at_root else []
    context.local("gather", [total], outputs, root=hosts.local.index(operation.root))


def scan(context: StepContext, operation: Operation) -> Step:
    """All-gather; then each rank combines the inputs of the ranks from the root to itself."""
    source = scan_source(operation)
    gathered = source.new_empty((context.size, source.numel()))
    yield from all_gather(context, Operation("all_gather", [source], gathered))
    scan_gathered(operation, context.hosts.me, gathered)


def reduce_scatter(context: StepContext, operation: Operation) -> Step:
    """Reduce on hosts, send partial results to the hosts that want them, combine there."""
    hosts, op = context.hosts, operation.reduce_op
    parts, output = split_parts(operation.inputs, context.size), operation.outputs[0].view(-1)
    carried = hosts.local[hosts.lane :: hosts.lanes] if hosts.lane is not None else ()
    #: By turn and host: the partial results of the parts that this lane combines.
    partials = [_blanks(hosts, parts[rank]) for rank in carried]
    transfers = _sums(context, operation)
    for of_turn in partials:
        transfers.receive(_beside(hosts, of_turn))
    yield
    for host in hosts.others:
        leaving = _partials_for(context, parts, host, op)
        transfers.send((hosts.peer(host), partial) for partial in leaving)
    own = _partials_for(context, parts, hosts.index, op)
    transfers.wait()
    totals = []
    for of_turn, mine in zip(partials, own, strict=True):
        of_turn[hosts.index] = mine
        totals.append(_across(of_turn, op, context.size))
    _hand_out(context, totals, output)


def _partials_for(
    context: StepContext, parts: Sequence[Tensor], host: int, op: AnyReduceOp | None
) -> list[Tensor]:
    """Reduce inputs for ``host``; return the results of this rank's lane, if it has one."""
    hosts, partials = context.hosts, []
    nothing = parts[0][:0]
    for turn in _turns(hosts, host):
        pieces = [nothing if rank is None else parts[rank] for rank in turn]
        partial = torch.empty_like(pieces[hosts.local_rank])
        context.local("reduce_scatter", pieces, [partial], _within(op, partial.dtype, context.size))
        if turn[hosts.local_rank] is not None:
            partials.append(partial)
    return partials


def _turns(hosts: Hosts, host: int) -> Iterator[list[int | None]]:
    """For each turn: by rank of this host the rank of ``host`` that it serves, or None."""
    ranks = hosts.ranks[host]
    for first in range(0, len(ranks), hosts.lanes):
        turn: list[int | None] = list(ranks[first : first + hosts.lanes])
        yield turn + [None] * (len(hosts.local) - len(turn))


def _hand_out(context: StepContext, totals: Sequence[Tensor], output: Tensor) -> None:
    """Keep the first of ``totals`` in ``output``, and pass the rest to ranks without a lane."""
    hosts = context.hosts
    if hosts.lane is not None:
        output.copy_(totals[0])
    if len(hosts.local) == hosts.lanes:
        return
    nothing = output[:0]
    carried = dict(
        zip(range(hosts.local_rank, len(hosts.local), hosts.lanes), totals, strict=False)
    )
    inputs = [
        carried[r] if hosts.lane is not None and r in carried and r >= hosts.lanes else nothing
        for r in range(len(hosts.local))
    ]
    source = hosts.local_rank % hosts.lanes
    receives = hosts.lane is None
    outputs = [output if receives and r == source else nothing for r in range(len(hosts.local))]
    context.local("all_to_all", inputs, outputs)


# -- copies ---------------------------------------------------------------------------------


def broadcast(context: StepContext, operation: Operation) -> Step:
    """Broadcast on the root's host, pass shares along a tree of hosts, all-gather there."""
    hosts, flat = context.hosts, operation.outputs[0].view(-1)
    home = hosts.host_of(operation.root)
    shares = _shares(flat, hosts)
    share, in_lane = shares[hosts.local_rank], hosts.lane is not None
    above, below = _tree(hosts, home)
    coming = context.transfers()
    coming.receive((hosts.peer(host), share) for host in above if in_lane)
    yield
    if hosts.index == home:
        context.local("broadcast", (), [flat], root=hosts.local.index(operation.root))
    coming.wait()
    leaving = context.transfers()
    leaving.send((hosts.peer(host), share) for host in below if in_lane)
    if hosts.index != home:
        context.local("all_gather", [share], shares)
    leaving.wait()


def _tree(hosts: Hosts, home: int) -> tuple[list[int], list[int]]:
    """The hosts that this host receives from and sends to, in a broadcast from ``home``."""
    count = len(hosts.ranks)
    me = (hosts.index - home) % count
    above, below = [], []
    step = 1
    while step < count:
        if step <= me < 2 * step:
            above.append((me - step + home) % count)
        elif me < step and me + step < count:
            below.append((me + step + home) % count)
        step *= 2
    return above, below


def all_gather(context: StepContext, operation: Operation) -> Step:
    """All-gather on hosts, exchange along each lane, all-gather the received parts on hosts."""
    hosts, source = context.hosts, operation.inputs[0].view(-1)
    outputs = split_parts(operation.outputs, context.size)
    transfers = context.transfers()
    if hosts.lane is not None:
        for host in hosts.others:
            coming = hosts.ranks[host][hosts.lane :: hosts.lanes]
            transfers.receive((hosts.peer(host), outputs[rank]) for rank in coming)
    yield
    context.local("all_gather", [source], [outputs[rank] for rank in hosts.local])
    if hosts.lane is not None:
        for host in hosts.others:
            carried = hosts.local[hosts.lane :: hosts.lanes]
            transfers.send((hosts.peer(host), outputs[rank]) for rank in carried)
    transfers.wait()
    nothing = source[:0]
    for host in hosts.others:
        for turn in _turns(hosts, host):
            pieces = [nothing if rank is None else outputs[rank] for rank in turn]
            context.local("all_gather", [pieces[hosts.local_rank]], pieces)


def gather(context: StepContext, operation: Operation) -> Step:
    """Gather on the root's host; the ranks of other hosts send to the root."""
    hosts, root, source = context.hosts, operation.root, operation.inputs[0].view(-1)
    outputs = split_parts(operation.outputs, context.size) if hosts.me == root else []
    transfers = context.transfers()
    transfers.receive((rank, outputs[rank]) for rank in _remote(hosts) if outputs)
    yield
    if hosts.index != hosts.host_of(root):
        transfers.send([(root, source)])
    else:
        local = [outputs[rank] for rank in hosts.local] if outputs else []
        context.local("gather", [source], local, root=hosts.local.index(root))
    transfers.wait()


def scatter(context: StepContext, operation: Operation) -> Step:
    """Scatter on the root's host; the root sends to the ranks of other hosts."""
    hosts, root, target = context.hosts, operation.root, operation.outputs[0].view(-1)
    inputs = split_parts(operation.inputs, context.size) if hosts.me == root else []
    transfers, at_home = context.transfers(), hosts.index == hosts.host_of(root)
    transfers.receive([] if at_home else [(root, target)])
    yield
    transfers.send((rank, inputs[rank]) for rank in _remote(hosts) if inputs)
    if at_home:
        local = [inputs[rank] for rank in hosts.local] if inputs else []
        context.local("scatter", local, [target], root=hosts.local.index(root))
    transfers.wait()


def all_to_all(context: StepContext, operation: Operation) -> Step:
    """All-to-all on each host; every rank exchanges with each rank of the other hosts directly."""
    hosts = context.hosts
    inputs = split_parts(operation.inputs, context.size)
    outputs = split_parts(operation.outputs, context.size)
    taken = {output.data_ptr() for output in outputs if output.numel()}
    # In place, arriving data would overwrite data that was not sent yet.
    leaving = [
        (rank, inputs[rank].clone() if inputs[rank].data_ptr() in taken else inputs[rank])
        for rank in _remote(hosts)
    ]
    transfers = context.transfers()
    transfers.receive((rank, outputs[rank]) for rank in _remote(hosts))
    yield
    transfers.send(leaving)
    context.local("all_to_all", [inputs[r] for r in hosts.local], [outputs[r] for r in hosts.local])
    transfers.wait()


def _remote(hosts: Hosts) -> list[int]:
    """The ranks of other hosts, in an order that differs between hosts to spread load."""
    return [rank for host in hosts.others for rank in hosts.ranks[host]]


def barrier(context: StepContext, operation: Operation) -> Step:
    """Do nothing: all ranks meet at the ``yield``, and that is the barrier."""
    yield


STEPS: dict[Kind, Callable[[StepContext, Operation], Step]] = {
    "barrier": barrier,
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "reduce": reduce,
    "scan": scan,
    "exscan": scan,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
