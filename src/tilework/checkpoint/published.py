"""Published weights: a folder of safetensors files, with names and forms that a model converts.

A folder with safetensors files, but without an index of tilework, is read as if it had one: by the
names of the model. transformers defines for each model which tensors are renamed, joined and
stacked (the conversion mapping). These conversions are applied to boxes, before anything is read.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tilework.checkpoint.composing import PieceOf, joined, piece, stacked, unstacked
from tilework.checkpoint.flat_state import FlatState, NamedTensor
from tilework.checkpoint.format import Index, SavedTensor
from tilework.checkpoint.index_text import is_checkpoint, read_index
from tilework.checkpoint.safetensors_index import is_published, published_index, with_links
from tilework.checkpoint.stateful_objects import modules_of
from tilework.checkpoint.storage import Storage
from tilework.errors import CheckpointError


@dataclass(frozen=True)
class Opened:
    """An index, and the state of published weights; None: the state is in the index."""

    storage: Storage
    index: Index
    flat: FlatState | None = None
    has_sums: bool = True


def open_index(storage: Storage, state: Any) -> Opened:
    """The index of a checkpoint, or of published weights by the names of a model. Local."""
    names = storage.names()
    if is_checkpoint(names, storage) or not is_published(names):
        return Opened(storage, read_index(storage))
    storage = with_links(storage)
    index = published_index(storage)
    modules = list(modules_of(state))
    path, module = modules[0] if len(modules) == 1 else ((), None)
    tensors = index.tensors if module is None else _Conversion(module).of(index.tensors)
    flat = FlatState({(*path, name): NamedTensor(name) for name in tensors}, {})
    flat.containers.update((path[:depth], "dict") for depth in range(len(path) + 1))
    return Opened(storage, replace(index, tensors=tensors), flat, has_sums=False)


@dataclass
class _Sources:
    """Published tensors that one converter turns into tensors of the model, by pattern."""

    converter: Any
    by_pattern: dict[str, list[SavedTensor]] = field(default_factory=lambda: defaultdict(list))


def with_renamings(name: str, renamings: Sequence[Any]) -> str:
    """The name after each of transformers' renamings."""
    for each in renamings:
        name, _ = each.rename_source_key(name)
    return name


def with_first_match(name: str, converters: Sequence[Any]) -> tuple[str, str | None]:
    """The name after the first converter that matches, with the pattern that did; else None."""
    for each in converters:
        renamed, pattern = each.rename_source_key(name)
        if pattern is not None:
            return renamed, pattern
    return name, None


def conversion_mapping(module: nn.Module) -> Any:
    """The module of transformers with a model's conversions, or None."""
    if not (hasattr(module, "base_model_prefix") and hasattr(module, "config")):
        return None
    try:
        return importlib.import_module("transformers.conversion_mapping")
    except ImportError:  # before version 5 models have the published names
        return None


class _Conversion:
    def __init__(self, module: nn.Module) -> None:
        mapping = conversion_mapping(module)
        self._transforms = mapping.get_model_conversion_mapping(module) if mapping else ()
        self._module, self._own = module, dict.fromkeys(module.state_dict(), True)
        self._prefix = getattr(module, "base_model_prefix", "") or ""

    def of(self, published: Mapping[str, SavedTensor]) -> dict[str, SavedTensor]:
        renamings = [each for each in self._transforms if not hasattr(each, "operations")]
        converters = [each for each in self._transforms if hasattr(each, "operations")]

        def apply(name: str) -> tuple[str, str | None]:
            renamed, pattern = with_first_match(with_renamings(name, renamings), converters)
            renamed = self._at_model(renamed)
            if name in self._own and (pattern is None or renamed != name):
                return name, None  # a published name that the model has needs no conversion
            return renamed, pattern

        tensors = dict(converted(published, converters, apply))
        tensors = {name: replace(saved, name=name) for name, saved in tensors.items()}
        self._add_tied(tensors)
        return tensors

    def _add_tied(self, tensors: dict[str, SavedTensor]) -> None:
        """Add the missing names of tied parameters: a file has them under a single name."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        for tied in names.values():
            saved = next((tensors[name] for name in tied if name in tensors), None)
            if saved is not None:
                tensors.update({name: saved for name in tied if name not in tensors})

    def _at_model(self, name: str) -> str:
        """The name as the model has it: with or without the prefix of the base model."""
        start = f"{self._prefix}."
        if self._prefix and name not in self._own:
            if name.startswith(start) and name.removeprefix(start) in self._own:
                return name.removeprefix(start)
            if start + name in self._own:
                return start + name
        return name


def converted(
    tensors: Mapping[str, SavedTensor],
    converters: Sequence[Any],
    apply: Callable[[str], tuple[str, str | None]],
) -> Iterator[tuple[str, SavedTensor]]:
    """Apply transformers' converters to tensors; yield the new names and tensors.

    ``apply`` gives the new name of a tensor, and the pattern of the converter that the name
    matches; None if the tensor is only renamed.
    """
    by_pattern = {p: each for each in converters for p in each.source_patterns}
    together: dict[str, _Sources] = {}
    for name in sorted(tensors, key=_natural):
        renamed, pattern = apply(name)
        if pattern is None:
            yield renamed, tensors[name]
            continue
        sources = together.setdefault(renamed, _Sources(by_pattern[pattern]))
        sources.by_pattern[pattern].append(tensors[name])
    for renamed, sources in together.items():
        yield from _converted(renamed, sources)


def _converted(name: str, sources: _Sources) -> Iterator[tuple[str, SavedTensor]]:
    converter = sources.converter
    patterns = [p for p in converter.source_patterns if p in sources.by_pattern]
    made: list[list[SavedTensor]] = [sources.by_pattern[pattern] for pattern in patterns]
    for step in converter.operations:
        made = _step(step, made, len(converter.target_patterns), name)
    targets = converter.target_patterns
    if len(made) != len(targets) or any(
        len(each) != 1 and "*" not in pattern for pattern, each in zip(targets, made, strict=False)
    ):
        raise CheckpointError(
            f"the conversion of {name!r} gives {sum(map(len, made))} tensors, and the model "
            f"expects {len(targets)}: files of the weights may be missing",
            tensor=name,
        )
    known = next((p for p in targets if p in name), None)
    for pattern, several in zip(targets, made, strict=True):
        for number, result in enumerate(several):
            own = pattern.replace("*", str(number))
            yield (name if known is None else name.replace(known, own)), result


def _step(
    step: Any, made: list[list[SavedTensor]], targets: int, name: str
) -> list[list[SavedTensor]]:
    kind, dim = type(step).__name__, getattr(step, "dim", 0)
    if kind == "MergeModulelist" and dim == 0:
        return [[stacked(each)] for each in made]
    if kind == "SplitModulelist" and dim == 0 and all(len(each) == 1 for each in made):
        return [unstacked(each[0]) for each in made]
    if kind == "Concatenate":
        return [[joined([each for several in made for each in several], dim)]]
    is_split = kind == "Chunk" and getattr(step, "num_shards_attribute", None) is None
    if is_split and len(made) == len(made[0]) == 1:
        return [[piece(made[0][0], PieceOf("", n, targets, dim))] for n in range(targets)]
    raise CheckpointError(
        f"{name!r} is converted by {kind}, which changes the order of elements: load such weights "
        f"with transformers' from_pretrained, and distribute them",
        tensor=name,
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which "layers.10" comes after "layers.9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
