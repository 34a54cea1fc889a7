"""Loading by one process alone: a checkpoint as plain containers and full tensors on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.dtypes import DTYPES
from tilework.checkpoint.flat_state import FlatState, FlatValue, NamedTensor, PerRank, dotted
from tilework.checkpoint.flattening import rebuild
from tilework.checkpoint.index_file import names_of, read_index, saved_state
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.reading import PartReader
from tilework.checkpoint.saved import SavedTensor
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.values import decode_value


def read_all(
    storage: Storage, names: Sequence[str] | None, verify: bool, progress: Progress
) -> Any:
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
            tensors[key] = read_tensor(reader, saved)
        return tensors[key]

    try:
        asked = [path for path in flat.leaves if patterns.match(dotted(path))]
        patterns.check()
        names_asked = (name for path in asked for name in names_of(flat.leaves[path]))
        used = [index.tensors[name] for name in names_asked]
        reader.check_sizes(sorted({part.file for saved in used for part in saved.parts}))
        distinct = {saved.parts or saved.name: saved.nbytes for saved in used}
        reader.progress, progress.total = progress, sum(distinct.values())
        leaves = {path: value_of(flat.leaves[path]) for path in asked}
    finally:
        reader.close()
    if names is None:
        return rebuild(FlatState(leaves, flat.containers))
    kept = {path[:n] for path in leaves for n in range(len(path))}
    containers = {path: kind for path, kind in flat.containers.items() if path in kept}
    return _rebuild_some(FlatState(leaves, containers))


def _rebuild_some(flat: FlatState) -> Any:
    return rebuild(flat) if flat.leaves else {}


def read_tensor(reader: PartReader, saved: SavedTensor) -> Tensor:
    """Read a full tensor into new memory on the CPU."""
    tensor = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
    for part in saved.parts:
        reader.read_box(saved, part, part.box, tensor[part.box.slices])
    return tensor
