"""Files of torch.save, read with ``weights_only``: no code in them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.describing import describe, merge
from tilework.checkpoint.flat_state import FlatState, NamedTensor, PerRank
from tilework.checkpoint.flattening import flatten, rebuild
from tilework.checkpoint.formats.source import Source, mapped_tensors
from tilework.checkpoint.storage import calls
from tilework.errors import CheckpointError
from tilework.layout import Box

#: The text before the cause in messages of torch.
_MARK = "WeightsUnpickler error:"


class StateSource(Source):
    """A state whose tensors are in memory, or in a mapped file."""

    def __init__(self, state: Any) -> None:
        flat = flatten(state)
        merged = merge([describe(flat, [0])], [0])
        self._aliases = merged.aliases
        self._leaves = [flat.leaves[path] for path, _ in merged.sources]
        self.tensors, self.flat, self.meta = merged.tensors, merged.flat, {}
        # If the format has no aliases, one of several names is enough.
        for path, leaf in self.flat.leaves.items():
            if isinstance(leaf, NamedTensor) and leaf.name in self._aliases:
                self.flat.leaves[path] = NamedTensor(self._aliases[leaf.name])

    def region(self, number: int, box: Box) -> Tensor:
        tensor: Tensor = self._leaves[number]
        return tensor.detach()[box.slices]


def open_torch_file(path: Path) -> Source:
    """The state in a file of torch.save, mapped instead of read where torch can."""
    try:
        state = load_weights_only(path, str(path), mmap=True)
    except CheckpointError:  # a file of torch before 1.6, or not a file of torch
        state = load_weights_only(path, str(path))
    try:
        return StateSource(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}", file=str(path)) from None


def load_weights_only(file: Any, where: str, **settings: Any) -> Any:
    """The contents of a file of torch.save: tensors, and plain containers and values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **settings)
    except Exception as error:  # of any class: torch takes other files for instructions
        if isinstance(error, OSError) and error.filename is not None:
            raise  # it cannot be opened
        raise CheckpointError(
            f"{where} cannot be read with weights_only: {_problem(error)}. It is damaged, or has "
            f"objects that are code: save its state dict again, with tensors and plain containers "
            f"only",
            file=where,
        ) from None


def _problem(error: Exception) -> str:
    """The reason in torch's error, without torch's advice to load with ``weights_only=False``."""
    lines = [line.strip() for line in str(error).splitlines()]
    marked = [line.partition(_MARK)[2] for line in lines if _MARK in line]
    plain = [line for line in lines if line and "weights" not in line.lower()]
    told = [*filter(None, marked), *plain, type(error).__name__]
    return told[0].partition(". Please")[0].strip().removesuffix(".")


def write_torch_file(source: Source, path: Path) -> None:
    """Write a source to a file of torch.save. Tensors lie in temporary files meanwhile."""
    with mapped_tensors(path) as mapped:
        state = state_of_source(source, mapped.filled)
        unfinished = path.with_name(f"{path.name}.part")
        try:
            _save(state, unfinished)
            fd = calls.open(unfinished, 0)
            calls.fsync(fd)
            calls.close(fd)
            calls.rename(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def _save(state: Any, path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # from torch's writer, which does not give the reason
        raise CheckpointError(
            f"{path} cannot be written: {str(error).splitlines()[0]}. Is the disk full?",
            file=str(path),
        ) from None


def state_of_source(source: Source, tensor_of: Any) -> Any:
    """The state of a source, with tensors made by ``tensor_of(source, number)``."""
    numbers = {tensor.name: number for number, tensor in enumerate(source.tensors)}
    made: dict[str, Tensor] = {}

    def value_of(leaf: Any) -> Any:
        if isinstance(leaf, PerRank):
            # Other formats have no values per rank: the first rank's value stands for all.
            return value_of(leaf.variants[0][1])
        if not isinstance(leaf, NamedTensor):
            return leaf
        if leaf.name not in made:
            made[leaf.name] = tensor_of(source, numbers[leaf.name])
        return made[leaf.name]

    containers = source.flat.containers
    leaves = {
        path[:-1] if containers.get(path[:-1]) == "numpy" else path: value_of(leaf)
        for path, leaf in source.flat.leaves.items()
    }
    kept = {path: kind for path, kind in containers.items() if kind != "numpy"}
    return rebuild(FlatState(leaves, kept))
