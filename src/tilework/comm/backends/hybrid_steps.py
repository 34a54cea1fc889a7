"""How collectives cross hosts: each byte once, and only the bytes that must.

Each step is what one rank does once all ranks agree. ``local`` runs a collective among the
ranks of this host, through shared memory; ``Transfers`` go to other hosts. A host's ranks carry
what crosses in equal shares, their lanes. Reductions combine the ranks of each host first, then
the hosts in order, so every rank gets the same bits. docs/algorithms/hybrid.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tilework.comm.backends.engine import Kind, Operation, Parts, op_type
from tilework.comm.backends.hybrid_hosts import Hosts
from tilework.comm.backends.reference import combine
from tilework.comm.reduce_op import AnyReduceOp, RedOpType, ReduceOp

#: Up to this many bytes hosts send each other everything instead of reducing in shares: fewer
#: steps count for more. Of two hosts either way moves as much.
_SMALL = 16 << 10
_SHORT = (torch.float16, torch.bfloat16)


class Transfers(Protocol):
    """Messages under way between hosts."""

    def wait(self) -> None: ...


class Ways(Protocol):
    """What an engine offers to a step."""

    hosts: Hosts
    size: int

    def local(
        self,
        kind: Kind,
        inputs: Parts,
        outputs: Parts,
        reduce_op: AnyReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """Run a collective among the ranks of this host; ``root`` counts within it."""
        ...

    def start(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Transfers:
        """Begin to move contiguous tensors to and from (group) ranks of other hosts."""
        ...


def _parts(parts: Parts, size: int) -> list[Tensor]:
    """One flat tensor for each rank."""
    if not isinstance(parts, Tensor):
        return [part.view(-1) for part in parts]
    flat = parts.view(-1)
    return list(torch.tensor_split(flat, size)) if size else []


def _shares(flat: Tensor, hosts: Hosts) -> list[Tensor]:
    """A flat tensor cut for the ranks of this host: a share for each lane, the rest nothing."""
    shares = list(torch.tensor_split(flat, hosts.lanes))
    return shares + [flat[:0]] * (len(hosts.local) - hosts.lanes)


# -- reductions -----------------------------------------------------------------------------


def _within(op: AnyReduceOp | None, dtype: torch.dtype, size: int) -> AnyReduceOp | None:
    """The reduction among the ranks of a host that a mean over all ranks begins with."""
    if op_type(op) != "avg":
        return op
    # A sum of short floats might overflow where their mean does not.
    return ReduceOp(RedOpType.PREMUL_SUM, 1 / size) if dtype in _SHORT else ReduceOp.SUM


def _across(partials: Sequence[Tensor], op: AnyReduceOp | None, size: int) -> Tensor:
    """The hosts' partial results combined, in the order of hosts."""
    kind = op_type(op)
    summed = kind in ("avg", "premul_sum")
    total = combine(partials, "sum" if summed else kind, ())
    if kind == "avg" and total.dtype not in _SHORT:
        total = total.div_(size)
    return total


def _shares_of_host(ways: Ways, operation: Operation) -> list[Tensor]:
    """This host's partial result of a whole tensor: in each lane's rank, its share."""
    hosts = ways.hosts
    shares = _shares(operation.inputs[0].view(-1), hosts)
    mine = torch.empty_like(shares[hosts.local_rank])
    op = _within(operation.reduce_op, mine.dtype, ways.size)
    ways.local("reduce_scatter", shares, [mine], op)
    return [mine]


def all_reduce(ways: Ways, operation: Operation) -> None:
    """Reduce-scatter on each host, all-reduce in each lane, all-gather on each host."""
    hosts = ways.hosts
    (mine,) = _shares_of_host(ways, operation)
    if hosts.lane is not None and mine.numel():
        if len(hosts.ranks) == 2 or mine.nbytes <= _SMALL:
            mine = _combined_everywhere(ways, mine, operation.reduce_op)
        else:
            mine = _combined_in_shares(ways, mine, operation.reduce_op)
    ways.local("all_gather", [mine], _shares(operation.outputs[0].view(-1), hosts))


def _combined_everywhere(ways: Ways, mine: Tensor, op: AnyReduceOp | None) -> Tensor:
    """Every host sends its partial result to every other: one step."""
    hosts = ways.hosts
    partials = [mine if h == hosts.index else torch.empty_like(mine) for h in _all(hosts)]
    ways.start(
        [(hosts.peer(h), mine) for h in hosts.others],
        [(hosts.peer(h), partials[h]) for h in hosts.others],
    ).wait()
    return _across(partials, op, ways.size)


def _combined_in_shares(ways: Ways, mine: Tensor, op: AnyReduceOp | None) -> Tensor:
    """Every host combines a share and sends the result to all: two steps, fewer bytes."""
    hosts = ways.hosts
    pieces = list(torch.tensor_split(mine, len(hosts.ranks)))
    own = pieces[hosts.index]
    partials = [own if h == hosts.index else torch.empty_like(own) for h in _all(hosts)]
    ways.start(
        [(hosts.peer(h), pieces[h]) for h in hosts.others],
        [(hosts.peer(h), partials[h]) for h in hosts.others],
    ).wait()
    own.copy_(_across(partials, op, ways.size))
    ways.start(
        [(hosts.peer(h), own) for h in hosts.others],
        [(hosts.peer(h), pieces[h]) for h in hosts.others],
    ).wait()
    return mine


def _all(hosts: Hosts) -> range:
    return range(len(hosts.ranks))


def reduce(ways: Ways, operation: Operation) -> None:
    """Reduce-scatter on each host, each lane to the root's host, gather there."""
    hosts = ways.hosts
    (mine,) = _shares_of_host(ways, operation)
    home = hosts.host_of(operation.root)
    if hosts.index != home:
        if hosts.lane is not None:
            ways.start([(hosts.peer(home), mine)], []).wait()
        return
    if hosts.lane is not None:
        partials = [mine if h == home else torch.empty_like(mine) for h in _all(hosts)]
        ways.start([], [(hosts.peer(h), partials[h]) for h in hosts.others]).wait()
        mine = _across(partials, operation.reduce_op, ways.size)
    at_root = hosts.me == operation.root
    outputs = _shares(operation.outputs[0].view(-1), hosts) if at_root else []
    ways.local("gather", [mine], outputs, root=hosts.local.index(operation.root))


def reduce_scatter(ways: Ways, operation: Operation) -> None:
    """Reduce each host's parts here, send each lane's partial results there, combine."""
    hosts = ways.hosts
    parts, output = _parts(operation.inputs, ways.size), operation.outputs[0].view(-1)
    sends = []
    for host in hosts.others:
        partials = _partials_for(ways, parts, host, operation.reduce_op)
        sends += [(hosts.peer(host), partial) for partial in partials]
    own = _partials_for(ways, parts, hosts.index, operation.reduce_op)
    theirs = {host: [torch.empty_like(part) for part in own] for host in hosts.others}
    receives = [(hosts.peer(host), part) for host, came in theirs.items() for part in came]
    ways.start(sends, receives).wait()
    theirs[hosts.index] = own
    totals = [
        _across([theirs[host][turn] for host in _all(hosts)], operation.reduce_op, ways.size)
        for turn in range(len(own))
    ]
    _hand_out(ways, totals, output)


def _partials_for(
    ways: Ways, parts: Sequence[Tensor], host: int, op: AnyReduceOp | None
) -> list[Tensor]:
    """This host's partial results of the parts of ``host``: of every L-th, in each of L lanes."""
    hosts, partials = ways.hosts, []
    nothing = parts[0][:0]
    for turn in _turns(hosts, host):
        pieces = [nothing if rank is None else parts[rank] for rank in turn]
        partial = torch.empty_like(pieces[hosts.local_rank])
        ways.local("reduce_scatter", pieces, [partial], _within(op, partial.dtype, ways.size))
        if turn[hosts.local_rank] is not None:
            partials.append(partial)
    return partials


def _turns(hosts: Hosts, host: int) -> Iterator[list[int | None]]:
    """The ranks of ``host``, as many at a time as there are lanes; per rank of this host."""
    ranks = hosts.ranks[host]
    for first in range(0, len(ranks), hosts.lanes):
        turn: list[int | None] = list(ranks[first : first + hosts.lanes])
        yield turn + [None] * (len(hosts.local) - len(turn))


def _hand_out(ways: Ways, totals: Sequence[Tensor], output: Tensor) -> None:
    """From each lane to the ranks of this host whose parts it combined."""
    hosts = ways.hosts
    if hosts.lane is not None:
        output.copy_(totals[0])
    if len(hosts.local) == hosts.lanes:
        return
    nothing = output[:0]
    mine = dict(zip(range(hosts.local_rank, len(hosts.local), hosts.lanes), totals, strict=False))
    inputs = [
        mine[r] if hosts.lane is not None and r in mine and r >= hosts.lanes else nothing
        for r in range(len(hosts.local))
    ]
    source = hosts.local_rank % hosts.lanes
    receives = hosts.lane is None
    outputs = [output if receives and r == source else nothing for r in range(len(hosts.local))]
    ways.local("all_to_all", inputs, outputs)


# -- copies ---------------------------------------------------------------------------------


def broadcast(ways: Ways, operation: Operation) -> None:
    """Broadcast on the root's host, then each lane its share along a tree of hosts."""
    hosts, flat = ways.hosts, operation.outputs[0].view(-1)
    home = hosts.host_of(operation.root)
    if hosts.index == home:
        ways.local("broadcast", (), [flat], root=hosts.local.index(operation.root))
    shares = _shares(flat, hosts)
    share = shares[hosts.local_rank]
    if hosts.lane is not None:
        _down_the_tree(ways, home, share)
    if hosts.index != home:
        ways.local("all_gather", [share], shares)


def _down_the_tree(ways: Ways, home: int, share: Tensor) -> None:
    """In each round every host that has the share sends it to one that has not."""
    hosts, count = ways.hosts, len(ways.hosts.ranks)
    me = (hosts.index - home) % count
    step = 1
    while step < count:
        if me < step and me + step < count:
            ways.start([(hosts.peer((me + step + home) % count), share)], []).wait()
        elif step <= me < 2 * step:
            ways.start([], [(hosts.peer((me - step + home) % count), share)]).wait()
        step *= 2


def all_gather(ways: Ways, operation: Operation) -> None:
    """All-gather on each host; each lane exchanges its ranks' tensors; all-gather those."""
    hosts, source = ways.hosts, operation.inputs[0].view(-1)
    outputs = _parts(operation.outputs, ways.size)
    ways.local("all_gather", [source], [outputs[rank] for rank in hosts.local])
    sends, receives = [], []
    if hosts.lane is not None:
        carried = hosts.local[hosts.lane :: hosts.lanes]
        for host in hosts.others:
            sends += [(hosts.peer(host), outputs[rank]) for rank in carried]
            coming = hosts.ranks[host][hosts.lane :: hosts.lanes]
            receives += [(hosts.peer(host), outputs[rank]) for rank in coming]
    ways.start(sends, receives).wait()
    nothing = source[:0]
    for host in hosts.others:
        for turn in _turns(hosts, host):
            pieces = [nothing if rank is None else outputs[rank] for rank in turn]
            ways.local("all_gather", [pieces[hosts.local_rank]], pieces)


def gather(ways: Ways, operation: Operation) -> None:
    """Gather on the root's host; the ranks of other hosts send to the root."""
    hosts, root, source = ways.hosts, operation.root, operation.inputs[0].view(-1)
    if hosts.index != hosts.host_of(root):
        ways.start([(root, source)], []).wait()
        return
    outputs = _parts(operation.outputs, ways.size) if hosts.me == root else []
    coming = [(rank, outputs[rank]) for rank in _remote(hosts)] if outputs else []
    transfers = ways.start([], coming)
    mine = [outputs[rank] for rank in hosts.local] if outputs else []
    ways.local("gather", [source], mine, root=hosts.local.index(root))
    transfers.wait()


def scatter(ways: Ways, operation: Operation) -> None:
    """Scatter on the root's host; the root sends to the ranks of other hosts."""
    hosts, root, target = ways.hosts, operation.root, operation.outputs[0].view(-1)
    if hosts.index != hosts.host_of(root):
        ways.start([], [(root, target)]).wait()
        return
    inputs = _parts(operation.inputs, ways.size) if hosts.me == root else []
    leaving = [(rank, inputs[rank]) for rank in _remote(hosts)] if inputs else []
    transfers = ways.start(leaving, [])
    mine = [inputs[rank] for rank in hosts.local] if inputs else []
    ways.local("scatter", mine, [target], root=hosts.local.index(root))
    transfers.wait()


def all_to_all(ways: Ways, operation: Operation) -> None:
    """All-to-all on each host; between hosts every rank sends to every other."""
    hosts = ways.hosts
    inputs, outputs = _parts(operation.inputs, ways.size), _parts(operation.outputs, ways.size)
    taken = {output.data_ptr() for output in outputs if output.numel()}
    # In place, what comes would overwrite what has not left yet.
    leaving = {r: inputs[r].clone() if inputs[r].data_ptr() in taken else inputs[r]
               for r in _remote(hosts)}  # fmt: skip
    transfers = ways.start(list(leaving.items()), [(r, outputs[r]) for r in _remote(hosts)])
    ways.local("all_to_all", [inputs[r] for r in hosts.local], [outputs[r] for r in hosts.local])
    transfers.wait()


def _remote(hosts: Hosts) -> list[int]:
    """The ranks of other hosts; not all begin with the same."""
    return [rank for host in hosts.others for rank in hosts.ranks[host]]


def barrier(ways: Ways, operation: Operation) -> None:
    """Nothing: every rank has come, or they would not agree."""


STEPS: dict[Kind, Callable[[Ways, Operation], None]] = {
    "barrier": barrier,
    "broadcast": broadcast,
    "all_reduce": all_reduce,
    "reduce": reduce,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
}
