"""Comparison of parameters and gradients between ranks: on request, and after optimizer steps.

Two things are compared. Digests show whether ranks have computed a tensor in the same way
(``provenance/``). If a tensor is replicated, the elements must be equal, too: ranks exchange hashes
of the elements. If the hashes differ, ranks compare the elements themselves, since values that each
rank computes in another order may differ in the last bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, all_gather_into_tensor, device_of
from tilework.comm.per_call.internal import call_site, unrecorded
from tilework.comm.provenance_digest import advice_from_above
from tilework.comm.world import get_default_group, is_initialized
from tilework.dtensor.debug.formatting import layout_text
from tilework.dtensor.provenance.content import Mode, hash_of, mode
from tilework.dtensor.provenance.digests import digest_of, moving
from tilework.dtensor.provenance.replicas import compare_plain, difference_from_first
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.errors import CollectiveMismatchError
from tilework.layout import Partial
from tilework.mesh import DeviceMesh
from tilework.tiled import TiledTensor

#: In the sampled mode, the first ``_STEPS`` steps of an optimizer are compared, then every
#: ``_STEPS``-th, and after ``_OFTEN`` steps every ``_LATER_STEPS``-th.
_STEPS, _OFTEN, _LATER_STEPS = 4, 64, 16
#: If steps take less than ``_QUICK`` seconds on all ranks, comparisons would slow them noticeably:
#: only every ``_QUICK_STEPS``-th is compared.
_QUICK, _QUICK_STEPS = 2e-3, 64
_NEXT_STEP = (
    "; all ranks of a mesh have to compute the same with replicated values: look for data that "
    "each rank has loaded or drawn by itself (plain tensors count as replicated along all axes of "
    "the mesh, except in modules of parallelize_module: make a DTensor of Shard(0) of them, with "
    "from_local), and for branches, numbers or steps that differ by rank."
)

_ADVICE = (
    "Ranks that train one model have the same plain parameters: look for what one rank alone has "
    "loaded, drawn or written"
)

Named = Sequence[tuple[str, DTensor]]


class _Facts(NamedTuple):
    """The facts about a tensor that ranks exchange and compare."""

    #: The name of the tensor in the model.
    name: str
    #: The layout as text.
    layout: str
    #: The provenance digest.
    provenance: int
    #: The place along the axes that shard the tensor: ranks at the same place have equal elements.
    shard: tuple[int, ...]
    #: A hash of the local elements; 0 for a partial value.
    content: int


def verify(what: nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor]) -> None:
    """Raise unless all ranks have the same parameters, buffers and gradients. Collective; blocks.

    The ranks of a mesh compare the provenance of every DTensor, and every element of the parts that
    the mesh replicates. Plain parameters of a module count as replicas. They are compared over the
    group of a wrapper such as ``DistributedDataParallel``, over the meshes of the module's
    DTensors, or, without both, over the default group. Other plain tensors are not compared.

    Args:
        what: A module, a tensor, tensors by name, or an iterable of tensors; the same on all ranks.

    Raises:
        CollectiveMismatchError: Ranks differ, or pass other tensors; on every rank. The error names
            the tensor and the ranks.
        TypeError: ``what`` is neither a module nor tensors, or has a DTensor of
            torch.distributed.tensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import distribute_module, init_device_mesh, verify
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = distribute_module(torch.nn.Linear(3, 4), init_device_mesh("cpu", (2,)))
        ...     verify(model)
        ...     model.bias.to_local().data[0] = rank  # behind the DTensor's back
        ...     try:
        ...         verify(model)
        ...     except RuntimeError as error:
        ...         return str(error).partition(":")[0]
        >>> run_ranks(2, program)[0]
        "'bias' is not the same on all ranks"
    """
    by_mesh: dict[DeviceMesh, list[tuple[str, DTensor]]] = {}
    for name, tensor in _named_tensors(what):
        by_mesh.setdefault(tensor.device_mesh, []).append((name, tensor))
    for mesh, tensors in by_mesh.items():
        if mesh.here and mesh.size() > 1:
            group = mesh.axes_group(range(mesh.ndim))
            with moving(1, "verify"):
                _compare_each(tensors, group, full=True)
    if isinstance(what, nn.Module):
        for replicas, group in _plain_replicas(what, list(by_mesh)):
            if group.size() > 1:
                compare_plain(replicas, group, full=True, advice=_ADVICE)


def _plain_replicas(
    module: nn.Module, meshes: Sequence[DeviceMesh]
) -> Iterator[tuple[Sequence[tuple[str, Tensor]], ProcessGroup]]:
    """The plain parameters of a module, and the groups whose ranks are to have the same."""
    every: list[Any] = list(module.modules())
    wrappers = [part for part in every if hasattr(part, "replicated_parameters")]
    for wrapper in wrappers:
        yield wrapper.replicated_parameters(), wrapper.process_group
    named = [(n, p) for n, p in module.named_parameters() if not isinstance(p, TiledTensor)]
    for mesh in meshes:
        if mesh.here:
            yield named, mesh.axes_group(range(mesh.ndim))
    if named and not wrappers and not meshes and is_initialized():
        yield named, get_default_group()


def _named_tensors(what: Any) -> Named:
    if isinstance(what, nn.Module):
        named: list[tuple[str, Any]] = [*what.named_parameters(), *what.named_buffers()]
    elif isinstance(what, Mapping):
        named = list(what.items())
    elif isinstance(what, Tensor):
        named = [("the tensor", what)]
    elif isinstance(what, Iterable):
        named = [(f"tensor {i}", tensor) for i, tensor in enumerate(what)]
    else:
        raise TypeError(f"verify() takes a module or tensors, got {type(what).__name__}")
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"verify() compares tensors, got {type(tensor).__name__} as {name!r}")
        refuse_torch_dtensor(tensor, f"verify() of {name!r}")
    return _with_gradients([(name, x) for name, x in named if isinstance(x, DTensor)])


def _with_gradients(tensors: Named) -> Named:
    graded = [(name, tensor.grad) for name, tensor in tensors if tensor.is_leaf]
    return [*tensors, *[(f"{name}.grad", grad) for name, grad in graded if grad is not None]]


# -- at optimizer steps ----------------------------------------------------------------------

#: The attributes of an optimizer for the count of steps, and for the last comparison by mesh.
_COUNT, _COMPARED = "_tilework_steps", "_tilework_compared"


class _Compared(NamedTuple):
    """The steps of the last and the next comparison, equal on all ranks."""

    #: The number of the optimizer step after which parameters were compared last.
    step: int
    #: The number of the step after which they will be compared next.
    next_step: int
    #: The time of the last comparison, in seconds of this rank's clock.
    at: float


def compare_after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Compare an optimizer's parameters, if it is time to: a hook. Collective in that case.

    The count of steps decides, which is the same on all ranks. The full mode compares after all
    steps. The sampled mode compares after the first four, every fourth up to the 64th and every
    16th later; every 64th if steps take less than two milliseconds, which ranks exchange when they
    compare. Raises CollectiveMismatchError on every rank if parameters differ.
    """
    how, state = mode(), optimizer.__dict__
    step = state[_COUNT] = state.get(_COUNT, 0) + 1
    if how == "off" or (how == "sampled" and step > _STEPS and step % _STEPS):
        return
    compared: dict[DeviceMesh, _Compared] = state.setdefault(_COMPARED, {})
    if how == "sampled" and compared and all(step < each.next_step for each in compared.values()):
        return
    _compare_where_due(optimizer, step, how, compared)


@unrecorded
def _compare_where_due(
    optimizer: Optimizer, step: int, how: Mode, compared: dict[DeviceMesh, _Compared]
) -> None:
    for mesh, params in _by_mesh(optimizer).items():
        last = compared.get(mesh)
        if not mesh.here or mesh.size() < 2 or (how == "sampled" and not _is_due(step, last)):
            continue
        with moving(step, f"the comparison after step {step} of {type(optimizer).__name__}"):
            more = _compare_quickly(optimizer, params, how == "full", _steps_until(step, last))
        compared[mesh] = _Compared(step, step + more, time.monotonic())


def _by_mesh(optimizer: Optimizer) -> dict[DeviceMesh, list[DTensor]]:
    by_mesh: dict[DeviceMesh, list[DTensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.__class__ is DTensor:
                by_mesh.setdefault(param._spec.mesh, []).append(param)
    return by_mesh


def _is_due(step: int, last: _Compared | None) -> bool:
    if last is not None:
        return step >= last.next_step
    return step <= _STEPS or not step % (_STEPS if step <= _OFTEN else _LATER_STEPS)


def _steps_until(step: int, last: _Compared | None) -> int:
    """The number of steps until the next comparison that this rank suggests."""
    if step < _OFTEN:
        return 1 if step < _STEPS else _STEPS - step % _STEPS
    is_quick = last is not None and time.monotonic() - last.at < _QUICK * (step - last.step)
    return _QUICK_STEPS if is_quick else _LATER_STEPS


def _compare_quickly(optimizer: Optimizer, params: Sequence[DTensor], full: bool, more: int) -> int:
    """Compare one hash, then each parameter if it differs; return the next interval."""
    mesh = params[0]._spec.mesh
    group = mesh.axes_group(range(mesh.ndim))
    digest = hash(tuple([digest_of(param) for param in params]))
    contents = [hash_of(param._local_tensor, full) for param in params if param._spec.is_replicated]
    alike = [digest, hash(tuple(contents))]
    along = [_content_along(axis, params, full) for axis in range(mesh.ndim)] * (mesh.ndim > 1)
    row = torch.tensor([*along, *alike, more], device=device_of(group))
    rows = row.new_empty(group.size(), len(row))
    all_gather_into_tensor(rows, row, group)
    every = rows.tolist()
    by_rank = dict(zip(group.global_ranks, every, strict=True))
    if any(other[-3:-1] != alike for other in every) or not all(
        _is_same_along(axis, mesh, by_rank) for axis in range(len(along))
    ):
        _compare_each(_named_params(optimizer, params), group, full)
    return min(int(number) for *_, number in every)


def _content_along(axis: int, params: Sequence[DTensor], full: bool) -> int:
    """A hash of the parameters that are replicated along this axis, and sharded along another."""
    contents = [
        hash_of(param._local_tensor, full)
        for param in params
        if param._spec.placements[axis].is_replicate() and not param._spec.is_replicated
    ]
    return hash(tuple(contents))


def _is_same_along(axis: int, mesh: DeviceMesh, by_rank: Mapping[int, Sequence[int]]) -> bool:
    """True if ranks that differ only in the place along the axis have equal hashes for it."""
    first: dict[tuple[int, ...], int] = {}
    for rank, row in by_rank.items():
        place = list(mesh.spec.coordinate(rank) or ())
        place[axis] = 0
        if first.setdefault(tuple(place), row[axis]) != row[axis]:
            return False
    return True


def _named_params(optimizer: Optimizer, params: Sequence[DTensor]) -> Named:
    """An optimizer's parameters with their names, or with numbers if they have no names."""
    names: dict[int, str] = {}
    for group in optimizer.param_groups:
        known = group.get("param_names") or ()
        for i, param in enumerate(group["params"]):
            names[id(param)] = known[i] if i < len(known) else f"parameter {len(names)}"
    return _with_gradients([(names[id(param)], param) for param in params])


# -- each tensor -----------------------------------------------------------------------------


def _compare_each(tensors: Named, group: ProcessGroup, full: bool) -> None:
    """Raise for the first tensor that is not the same on all ranks. Collective."""
    every: list[Any] = agree(lambda: [tuple(_facts(*each, full)) for each in tensors], group)
    facts = [[_Facts(*fact) for fact in of_rank] for of_rank in every]
    ranks = group.global_ranks
    _check_same_tensors(facts, group)
    for number, (name, tensor) in enumerate(tensors):
        of_tensor = [of_rank[number] for of_rank in facts]
        odd = _odd(of_tensor)
        if odd is None:
            continue
        pair, what = odd, "it came about differently"
        if of_tensor[pair[0]].provenance == of_tensor[pair[1]].provenance:
            pair, what = _difference(tensor, group) or (odd, "")
        if what:
            sites: list[str] = agree(call_site, group)
            _raise(name, tensor, [(ranks[rank], sites[rank]) for rank in pair], what)


def _check_same_tensors(facts: Sequence[Sequence[_Facts]], group: ProcessGroup) -> None:
    """Raise if some rank passes other tensors than the first rank. Collective in that case."""
    by_rank = [{fact.name: fact.layout for fact in of_rank} for of_rank in facts]
    for other, theirs in enumerate(by_rank):
        if list(theirs.items()) == list(by_rank[0].items()):
            continue
        names = [*by_rank[0], *theirs]
        odd = [name for name in names if by_rank[0].get(name) != theirs.get(name)]
        name = odd[0] if odd else names[0]
        sites: list[str] = agree(call_site, group)
        each = [
            f"{of_rank.get(name, 'missing')} on rank {group.global_ranks[rank]}"
            + (f" at {sites[rank]}" if sites[rank] else "")
            for rank, of_rank in ((0, by_rank[0]), (other, theirs))
        ]
        what = " and ".join(each) if odd else "in another order on other ranks"
        raise CollectiveMismatchError(
            f"{name!r} is not the same on all ranks: {what}{_NEXT_STEP}",
            ranks=(group.global_ranks[0], group.global_ranks[other]),
        )


def _facts(name: str, tensor: DTensor, full: bool) -> _Facts:
    spec, local = tensor._spec, tensor._local_tensor
    coordinate = spec.mesh.get_coordinate() or []
    shard = tuple([
        0 if placement.is_replicate() else place
        for place, placement in zip(coordinate, spec.placements, strict=True)
    ])  # fmt: skip
    is_partial = any(isinstance(placement, Partial) for placement in spec.placements)
    content = 0 if is_partial else hash_of(local, full)
    return _Facts(name, layout_text(spec, local.dtype), digest_of(tensor), shard, content)


def _odd(facts: Sequence[_Facts]) -> tuple[int, int] | None:
    """Two group ranks that computed a tensor differently, or differ in shared elements; or None."""
    first: dict[tuple[int, ...], int] = {}
    for rank, fact in enumerate(facts):
        if fact.provenance != facts[0].provenance:
            return 0, rank
        known = first.setdefault(fact.shard, rank)
        if fact.content != facts[known].content:
            return known, rank
    return None


def _difference(tensor: DTensor, group: ProcessGroup) -> tuple[tuple[int, int], str] | None:
    """Two group ranks whose elements differ by more than rounding, and how; or None. Collective."""
    spec, ranks = tensor._spec, group.global_ranks
    axes = [axis for axis, placement in enumerate(spec.placements) if placement.is_replicate()]
    replicas = spec.mesh.axes_group(axes)
    mine = difference_from_first(tensor._local_tensor, replicas)
    if mine is not None:
        one, other = (ranks.index(replicas.global_ranks[rank]) for rank in mine[0])
        mine = (one, other), mine[1]
    for found in agree(lambda: mine, group):
        if found is not None:
            (one, other), (x, y) = found
            what = f"an element is {x} on rank {ranks[one]} and {y} on rank {ranks[other]}"
            return (one, other), what
    return None


def _raise(name: str, tensor: DTensor, sides: Sequence[tuple[int, str]], what: str) -> NoReturn:
    text = layout_text(tensor._spec, tensor.dtype)
    where = " and ".join(
        [f"on rank {rank} at {site}" if site else f"on rank {rank}" for rank, site in sides]
    )
    raise CollectiveMismatchError(
        f"{name!r} is not the same on all ranks: {text} {where}: {what}{_NEXT_STEP}"
        f"{advice_from_above()}",
        ranks=tuple(rank for rank, _ in sides),
    )
