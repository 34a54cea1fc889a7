"""Loading into a state, by all ranks of a group together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from functools import partial as with_first
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from tilework.checkpoint.asynchronous import raise_pending
from tilework.checkpoint.composing import MapNames
from tilework.checkpoint.describing import is_partial, local_parts, tiles_of
from tilework.checkpoint.filling import Filling, Target
from tilework.checkpoint.filling_optimizers import visit_optimizer
from tilework.checkpoint.flat_state import FlatState, FlatValue, NamedTensor, PerRank, dotted
from tilework.checkpoint.flattening import rebuild
from tilework.checkpoint.format import Path, SavedTensor
from tilework.checkpoint.host_load import (
    HostLoad,
    WayOfReading,
    exchange_shared,
    read_own,
    read_shared,
    read_split,
)
from tilework.checkpoint.index_text import names_of, read_index, saved_state
from tilework.checkpoint.load_planning import Wanted, plan_load
from tilework.checkpoint.name_patterns import NamePatterns, Names
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.published import open_index
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.reading import PartReader, Targets, read_region
from tilework.checkpoint.stateful_objects import modules_of, places_of_parameters
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.tensor_bytes import DTYPES
from tilework.checkpoint.values import decode_value
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, local_tensor_of
from tilework.errors import CheckpointError
from tilework.layout import Box
from tilework.layout.internal import whole_box
from tilework.tiled import TiledTensor


def has_no_memory(tensor: Tensor) -> bool:
    """True for a tensor on ``meta``, or a sharded tensor with a local part on ``meta``."""
    return any(part.is_meta for part in local_parts(tensor))


def give_memory(module: nn.Module, is_wanted: Callable[[str], bool]) -> None:
    """Give memory on the CPU to tensors of a model on ``meta`` that will be filled. Local.

    Tied tensors stay tied, and layouts stay. Buffers outside of the state dict get their values
    from the model itself, if it belongs to transformers (``_init_weights``).
    """
    _check_fixed(module)
    made: dict[int, tuple[Tensor, Tensor]] = {}
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    for inner in module.modules():
        initialise = False
        for held in cast("list[dict[str, Tensor | None]]", [inner._parameters, inner._buffers]):
            for key, own in held.items():
                if own is None or not has_no_memory(own):
                    continue
                is_fixed = key in inner._non_persistent_buffers_set
                if is_fixed and hasattr(module, "_init_weights"):
                    initialise = True
                elif not any(map(is_wanted, names[id(own)])):
                    continue
                if id(own) not in made:
                    made[id(own)] = own, _empty_like(own)
                held[key] = made[id(own)][1]
        if initialise:
            with torch.no_grad():
                module._init_weights(inner)  # type: ignore[operator]


def _check_fixed(module: nn.Module) -> None:
    if hasattr(module, "_init_weights"):
        return
    for path, inner in module.named_modules():
        for key in inner._non_persistent_buffers_set:
            buffer = inner._buffers.get(key)
            if buffer is not None and has_no_memory(buffer):
                name = f"{path}.{key}" if path else key
                raise CheckpointError(
                    f"the buffer {name} is on 'meta', and no checkpoint has it (persistent=False): "
                    f"give it values first",
                    tensor=name,
                )


def _empty_like(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor.detach(), device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def read_all(storage: Storage, names: Names, verify: bool, progress: Progress) -> Any:
    """Read a checkpoint's state, or the names that match, into plain containers. Local."""
    index = read_index(storage)
    flat = saved_state(index, storage)
    reader = PartReader(storage, index, verify)
    tensors: dict[Any, Tensor] = {}
    patterns = NamePatterns(names)

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, FlatValue):
            return decode_value(leaf.json)
        if isinstance(leaf, PerRank):
            return {rank: value_of(each) for ranks, each in leaf.variants for rank in ranks}
        assert isinstance(leaf, NamedTensor)
        saved = index.tensors[leaf.name]
        # Tied weights become one tensor again.
        if (key := saved.parts or leaf.name) not in tensors:
            tensors[key] = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
            read_region(reader, saved, whole_box(saved.shape), tensors[key])
        return tensors[key]

    with closing(reader):
        asked = [path for path in flat.leaves if patterns.match(dotted(path))]
        patterns.check()
        names_asked = (name for path in asked for name in names_of(flat.leaves[path]))
        used = [index.tensors[name] for name in names_asked]
        reader.check_sizes(sorted({part.file for saved in used for part in saved.parts}))
        distinct = {saved.parts or saved.name: saved.nbytes for saved in used}
        reader.progress, progress.total = progress, sum(distinct.values())
        leaves = {path: value_of(flat.leaves[path]) for path in asked}
    if names is None:
        return rebuild(FlatState(leaves, flat.containers))
    kept = {path[:n] for path in leaves for n in range(len(path))}
    containers = {path: kind for path, kind in flat.containers.items() if path in kept}
    return rebuild(FlatState(leaves, containers)) if leaves else {}


@dataclass(frozen=True)
class LoadOptions:
    """Settings of a load, as for :func:`~tilework.checkpoint.load`."""

    names: Names = None
    map_names: MapNames = None
    strict: bool = True
    verify: bool = True


@dataclass
class LoadReport:
    """The report of a load: the names that were filled on this rank, and those left out.

    Attributes:
        loaded: The names of the tensors that were filled.
        missing: Names of the state that the checkpoint lacks; their values are unchanged.
        unused: Names of the checkpoint that were not requested.
        other_ranks: Names that were saved for other ranks, but not for this rank.
        converted: Names of tensors that have another dtype in the checkpoint.
    """

    state: Any = None
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    other_ranks: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    bytes_read: int = 0

    def __str__(self) -> str:
        lines = [f"loaded {len(self.loaded):,} tensors, {self.bytes_read:,} bytes read here"]
        for what in ("missing", "unused", "other_ranks", "converted"):
            names: list[str] = getattr(self, what)
            if names:
                lines.append(f"{what.replace('_', ' ')}: {_listed(names)}")
        return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def load_into(
    storage: Storage, state: Any, ranks: Ranks, options: LoadOptions, progress: Progress
) -> LoadReport:
    """Fill a state from a checkpoint. Collective; blocks."""
    prepared = _prepared(storage, state, ranks, options)
    filling, reader = prepared.filling, prepared.reader
    with closing(reader):
        temporary = _without_partial(prepared, ranks) if prepared.some_partial else []
        parts = [(t.saved, part) for t in filling.targets for part in local_parts(t.tensor)]
        progress.total = sum(part.numel() * saved.itemsize for saved, part in parts)
        reader.progress = progress
        _fill(prepared, ranks)
    for target, partial in temporary:
        with torch.no_grad():
            filled = cast(DTensor, target.tensor).redistribute(placements=partial.placements)
            local_tensor_of(partial).detach().copy_(local_tensor_of(filled))
    return LoadReport(
        _finished(prepared, storage, ranks),
        filling.filled,
        filling.missing,
        filling.unused,
        filling.other_ranks,
        [t.where for t in filling.targets if t.tensor.dtype != DTYPES[t.saved.dtype]],
        reader.bytes_read,
    )


#: A rank's request for a target: the saved name, and the tiles, or None for the full tensor.
_Asked = tuple[str, tuple[Any, ...] | None]
#: A rank's view: files, unused patterns, the rank's answer, and composed objects.
_Seen = tuple[list[str], list[str], tuple[bool, list[_Asked], bool], list[tuple[Any, ...]]]


@dataclass
class _Prepared:
    """A load for which all ranks have exchanged which tensors they need."""

    reader: PartReader
    filling: Filling
    #: Ends the load on this rank once all tensors are filled; returns the state.
    finish: Callable[[], Any]
    asked: list[list[_Asked]] = field(default_factory=list)
    """The requests of each rank."""
    can_share: list[bool] = field(default_factory=list)
    """For each rank: True if it can share pages of files."""
    some_partial: bool = False
    """True if a rank requests a partial tensor."""


def _prepared(storage: Storage, state: Any, ranks: Ranks, options: LoadOptions) -> _Prepared:
    made: list[_Prepared] = []

    patterns = NamePatterns(options.names)

    def look_up() -> _Seen:
        raise_pending()
        opened = open_index(storage, state)
        index = opened.index
        flat = saved_state(index, storage) if opened.flat is None else opened.flat
        reader = PartReader(opened.storage, index, options.verify and opened.has_sums)
        if patterns.takes_all:
            reader.check_sizes(list(index.files)[ranks.number :: len(ranks.all)], False)
        filling = Filling(
            index,
            flat,
            ranks.here,
            patterns,
            options.map_names,
            places_of_parameters(state),
            visit_optimizer,
            lambda names: reader.check_sizes(names, False),
        )
        for path, module in modules_of(state):
            give_memory(module, with_first(_has, filling, path))
        made.append(_Prepared(reader, filling, filling.visit(state, ())))
        if options.strict and filling.missing:
            raise CheckpointError(_missing_text(storage, filling))
        some_partial = any(is_partial(target.tensor) for target in filling.targets)
        answer = reader.shares_pages(), _asked(filling.targets), some_partial
        return list(index.files), patterns.idle(), answer, filling.composed

    try:
        seen = ranks.gather(look_up)
        if any(each[0] != seen[0][0] for each in seen):
            raise CheckpointError(
                f"ranks see different checkpoints at {storage.location}: it is being replaced, or "
                f"is not on a file system that all hosts share",
                file=storage.location,
            )
        # Ranks may have different states: a pattern is unused if no rank uses it.
        if options.strict and (idle := set.intersection(*(set(each) for _, each, _, _ in seen))):
            patterns.refuse(min(idle))
    except BaseException:
        for each in made:
            each.reader.close()
        raise
    prepared = made[0]
    for *_, (can_share, asked, some_partial), composed in seen:
        prepared.can_share.append(can_share)
        prepared.asked.append(asked)
        prepared.some_partial |= some_partial
        prepared.filling.compose_all(composed)
    return prepared


def _has(filling: Filling, path: Path, name: str) -> bool:
    """True if the tensor ``name`` of the module at ``path`` is asked for and in the checkpoint."""
    full = (*path, name)
    return filling.names.match(dotted(full)) and filling.find(full) is not None


def _finished(prepared: _Prepared, storage: Storage, ranks: Ranks) -> Any:
    """Give objects their loaded states, and return the whole state of this rank. Collective."""
    states: list[Any] = []

    def finish() -> None:
        try:
            states.append(prepared.finish())
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{storage.location}: an object has refused its state ({type(error).__name__}: "
                f"{error}). All tensors are filled, and so are objects that come before it in the "
                f"state: load again, without it (names), before this state is used",
                file=storage.location,
            ) from error

    ranks.gather(finish)
    return states[0]


def _missing_text(storage: Storage, filling: Filling) -> str:
    looked_for = [(name, filling.mapped(name)) for name in filling.missing]
    lacking = [name if name == own else f"{own} (for {name})" for name, own in looked_for]
    others = f". It has {_listed(filling.unused)}, unused" if filling.unused else ""
    return (
        f"{storage.location} lacks {_listed(lacking)}: rename them with map_names, "
        f"choose others with names, or leave them as they are with strict=False{others}"
    )


# -- tensors ---------------------------------------------------------------------------------


def _asked(targets: Sequence[Target]) -> list[_Asked]:
    return [
        (t.saved.name, tiles_of(t.tensor) if isinstance(t.tensor, TiledTensor) else None)
        for t in targets
    ]


def _without_partial(prepared: _Prepared, ranks: Ranks) -> list[tuple[Target, DTensor]]:
    """Request temporary replicas instead of partial targets; returns both. Collective."""
    targets, temporary = prepared.filling.targets, []
    for number, target in enumerate(targets):
        tensor = target.tensor
        if is_partial(tensor):
            detached = cast(DTensor, tensor.detach())
            replicated = detached.redistribute(placements=layout_of(tensor).dual.placements)
            targets[number] = Target(target.saved, replicated, target.where)
            temporary.append((targets[number], tensor))
    prepared.asked = ranks.gather(lambda: _asked(targets))
    return temporary


def _fill(prepared: _Prepared, ranks: Ranks) -> None:
    reader, targets = prepared.reader, prepared.filling.targets
    wanted, mine = merge_wanted(prepared.asked, ranks, prepared.filling.tensors)
    host = ranks.same_host()
    can_share = dict(zip(ranks.all, prepared.can_share, strict=True))
    by_pages = all(can_share[rank] for rank in host.all)
    chunk = reader.index.chunk_bytes
    plan = plan_load(wanted, host.all, ranks.here, chunk, splits=by_pages)
    tensors = [targets[number].tensor if number is not None else None for number in mine]
    places = Targets(wanted, tensors, ranks.here, reader.shares_pages())
    load = HostLoad(plan, wanted, reader, places, ranks.here, host.group)
    ways = (read_own, read_split, read_shared if by_pages else exchange_shared)
    _run_all(ways, load, ranks, [tensor for tensor in tensors if tensor is not None])


def _run_all(
    ways: Sequence[WayOfReading], load: HostLoad, ranks: Ranks, written: Sequence[Tensor]
) -> None:
    """Read in all ways, even after errors; then raise a rank's error on all ranks. Collective."""
    failures: list[Exception] = []
    with torch.no_grad():
        for read in ways:
            try:
                read(load)
            except Exception as error:  # every class: other ranks continue with the next way
                failures.append(error)
        # Autograd sees by the version that memory was written.
        for each in (part for tensor in written for part in local_parts(tensor)):
            if not each.is_inference():
                increment_version(each)

    def outcome() -> None:
        if failures:
            raise failures[0]

    ranks.gather(outcome)


def merge_wanted(
    by_rank: Sequence[Sequence[_Asked]], ranks: Ranks, tensors: Mapping[str, SavedTensor]
) -> tuple[list[Wanted], list[int | None]]:
    """The tensors that ranks want; for each the number of this rank's target, or None."""
    merged: dict[tuple[str, int, tuple[Any, ...] | None], list[int]] = {}
    mine: dict[tuple[str, int, tuple[Any, ...] | None], int] = {}
    alike: dict[int, list[int]] = {}  # ranks with equal requests share a list object
    lists = {id(asked): asked for asked in by_rank}
    for rank, asked in zip(ranks.all, by_rank, strict=True):
        alike.setdefault(id(asked), []).append(rank)
    for identity, asking in alike.items():
        times: dict[tuple[str, tuple[Any, ...] | None], int] = {}
        for number, (name, tiles) in enumerate(lists[identity]):
            count = times[name, tiles] = times.get((name, tiles), 0) + 1
            key = (name, count, tiles)
            merged.setdefault(key, []).extend(asking)
            if ranks.here in asking:
                mine[key] = number
    place = {rank: number for number, rank in enumerate(ranks.all)}
    wanted = []
    boxes_of = cache(_boxes_asked)  # models repeat layers
    for (name, _, tiles), owners in merged.items():
        owners.sort(key=place.__getitem__)
        saved, ranks_asking = tensors[name], tuple(owners)
        whole = ((whole_box(saved.shape), ranks_asking),)
        wanted.append(Wanted(saved, whole if tiles is None else boxes_of(tiles, ranks_asking)))
    return wanted, [mine.get(key) for key in merged]


def _boxes_asked(
    tiles: tuple[Any, ...], owners: tuple[int, ...]
) -> tuple[tuple[Box, tuple[int, ...]], ...]:
    asking = set(owners)
    return tuple(
        (Box(offsets, sizes), tuple([rank for rank in held if rank in asking]))
        for offsets, sizes, held in tiles
    )
