"""Conversions between formats, in bounded memory."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tilework.checkpoint.describing import MergedState
from tilework.checkpoint.flat_state import FlatState, NamedTensor
from tilework.checkpoint.format import FORMATS, INDEX_NAME, PREVIOUS_NAME
from tilework.checkpoint.formats.dcp import METADATA, open_dcp, write_dcp
from tilework.checkpoint.formats.source import (
    IndexedSource,
    Source,
    open_safetensors,
    open_torch_file,
    write_safetensors,
    write_torch_file,
)
from tilework.checkpoint.index_text import is_checkpoint, is_ours, read_index, saved_state
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.no_collections import no_collections
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.ranks import Ranks, of_group
from tilework.checkpoint.safetensors_index import HF_INDEX, is_shard
from tilework.checkpoint.save_planning import (
    FILE_BYTES,
    assign_writers,
    check_file_bytes,
    plan_files,
)
from tilework.checkpoint.saving import Save, SaveOptions, remove_leftovers, write_and_commit
from tilework.checkpoint.storage import LOCK_NAME, UNFINISHED, is_url, plain_path
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.errors import CheckpointError
from tilework.layout import Box

_TORCH_SUFFIXES = {".pt", ".pth", ".bin", ".ckpt"}


@dataclass(frozen=True)
class ConvertOptions:
    """Settings of a conversion.

    Args:
        names: Patterns; only tensors whose names match a pattern are written. None: all.
        strip: A text to remove from the beginning of names.
        file_bytes: The maximum of bytes of elements in a file, where a format has several files.

    With ``names``, ``strip`` or ``prefix``, only tensors are written: other values are dropped.
    """

    names: Sequence[str] | None = None
    strip: str = ""
    prefix: str = ""
    file_bytes: int = FILE_BYTES

    def __post_init__(self) -> None:
        check_file_bytes(self.file_bytes)


@checkpoint_errors()
@no_collections()
def convert(
    source: AnyPath, target: AnyPath, to: str | None = None, options: ConvertOptions | None = None
) -> None:
    """Convert a file or folder to another format. Local; in bounded memory.

    Formats are ``"tilework"``; ``"safetensors"``, a file, or a folder of several with Hugging
    Face's index; ``"dcp"``, a folder of torch.distributed.checkpoint; and ``"torch"``, a file of
    torch.save. Values other than tensors are kept if the format supports them.

    Args:
        source: A file or folder in any of these formats. Files of torch.save are read with
            ``weights_only``.
        target: A path that does not exist yet.
        to: The format to write; None: by the name of ``target``, else ``"tilework"``.
        options: Names, and sizes of files.

    Raises:
        CheckpointError: The source is in no known format, or damaged; the target is there already,
            or cannot be written; or two tensors would have the same name without ``strip``.
        ValueError: There is no such format.

    Example: see docs/how-to/checkpoints.md.
    """
    options = options or ConvertOptions()
    kind = to or format_of_name(target)
    if kind not in FORMATS:
        raise ValueError(f"the format must be one of {', '.join(FORMATS)}, got {kind!r}")
    source, target = plain_path(source), plain_path(target)
    _check_target(target, kind)
    _check_apart(source, target)
    with (
        closing(open_source(source)) as opened,
        Progress(f"converting {source}", afterwards="the disk") as progress,
    ):
        _write(_Chosen(opened, options, progress), target, kind, options)


def _write(source: Source, target: AnyPath, kind: str, options: ConvertOptions) -> None:
    if kind == "tilework":
        _write_tilework(source, target, options)
    elif kind == "safetensors":
        write_safetensors(source, target, options.file_bytes)
    elif kind == "dcp":
        write_dcp(source, Path(target))
    else:
        write_torch_file(source, Path(target))


def _check_apart(source: AnyPath, target: AnyPath) -> None:
    if is_url(source) or is_url(target):
        return
    inside = Path(target).resolve()
    if Path(source).resolve() in inside.parents:
        raise CheckpointError(
            f"{target} lies inside of {source}, which is read: give a path outside of it",
            file=str(target),
        )


def _check_target(target: AnyPath, kind: str) -> None:
    if not is_url(target):
        place = Path(target)
        free = not place.exists() or (place.is_dir() and _is_left_over(set(os.listdir(place))))
    elif kind in ("dcp", "torch"):
        raise ValueError(
            f"the format {kind!r} is written to files of this machine, not to {target}: convert "
            f"to a path, and copy that"
        )
    elif kind == "safetensors" and str(target).endswith(".safetensors"):
        folder, _, name = str(target).rpartition("/")
        free = name not in storage_at(folder).names()
    else:
        free = _is_left_over(set(storage_at(target).names()))
    if not free:
        raise CheckpointError(f"{target} is there already: give another path", file=str(target))


def _is_left_over(names: set[str]) -> bool:
    """True if a folder is empty, or has only leftovers of an unfinished conversion."""
    if names & {INDEX_NAME, PREVIOUS_NAME, HF_INDEX}:
        return False
    unfinished_index = f"{HF_INDEX}{UNFINISHED}"
    return all(
        is_ours(name) or is_shard(name) or name in (LOCK_NAME, unfinished_index) for name in names
    )


def format_of_name(path: AnyPath) -> str:
    """The format that the suffix of a path to write means; ``"tilework"`` for other suffixes."""
    suffix = Path(str(path)).suffix
    if suffix == ".safetensors":
        return "safetensors"
    return "torch" if suffix in _TORCH_SUFFIXES else "tilework"


def open_source(path: AnyPath) -> Source:
    """The source of a file or folder, in any known format; raises CheckpointError for others."""
    if is_url(path):
        storage = storage_at(path)
        names = storage.names()
        files = [name for name in names if name.endswith(".safetensors")]
        is_other = files and not is_checkpoint(names, storage)
        is_other = str(path).endswith(".safetensors") or is_other
        return open_safetensors(path) if is_other else _open_tilework(path)
    if (Path(path) / INDEX_NAME).exists():
        return _open_tilework(path)
    place = Path(path)
    if (place / METADATA).exists():
        return open_dcp(place)
    if place.suffix == ".safetensors" or (place / HF_INDEX).exists():
        return open_safetensors(place)
    if place.is_dir() and any(place.glob("*.safetensors")):
        return open_safetensors(place)
    if place.is_file():
        return open_torch_file(place)
    raise CheckpointError(
        f"{path} is in no known format: give a checkpoint of tilework, a folder of DCP, "
        f"safetensors files, or a file of torch.save",
        file=str(path),
    )


def _open_tilework(path: AnyPath) -> Source:
    storage = storage_at(path)
    index = read_index(storage)
    return IndexedSource(storage, index, saved_state(index, storage), verify=True)


class _Chosen(Source):
    def __init__(self, source: Source, options: ConvertOptions, progress: Progress) -> None:
        self._source, self._progress = source, progress
        self.meta = source.meta
        patterns = NamePatterns(options.names)
        self._numbers = [
            n for n, tensor in enumerate(source.tensors) if patterns.match(tensor.name)
        ]
        patterns.check()
        kept = [source.tensors[number] for number in self._numbers]
        self._renamed = {
            tensor.name: options.prefix + tensor.name.removeprefix(options.strip) for tensor in kept
        }
        _check_unique(self._renamed)
        self.tensors = [replace(tensor, name=self._renamed[tensor.name]) for tensor in kept]
        self.flat = self._state(source.flat, options)
        progress.total = sum(math.prod(each.shape) * each.itemsize for each in kept)

    def _state(self, flat: FlatState, options: ConvertOptions) -> FlatState:
        if options == ConvertOptions(file_bytes=options.file_bytes):
            return flat
        # By name, as the containers have changed.
        leaves = {(name,): NamedTensor(name) for name in self._renamed.values()}
        return FlatState(dict(leaves), {(): "dict"})

    def region(self, number: int, box: Box) -> Tensor:
        region = self._source.region(self._numbers[number], box)
        self._progress(region.nbytes)
        return region


def _check_unique(renamed: Mapping[str, str]) -> None:
    first: dict[str, str] = {}
    for name, new in renamed.items():
        if first.setdefault(new, name) != name:
            raise CheckpointError(
                f"{first[new]!r} and {name!r} would both be named {new!r}: convert them apart, "
                f"each with other names, or with another strip",
                tensor=name,
            )


def _write_tilework(source: Source, target: AnyPath, options: ConvertOptions) -> None:
    storage = storage_at(target)
    storage.prepare()
    with ExitStack() as lock:
        lock.callback(storage.lock())
        remove_leftovers(storage)
        alone: Ranks = of_group(None)
        merged = MergedState(source.flat, source.tensors, [((), (0,))] * len(source.tensors), {})
        tasks = assign_writers(source.tensors, [0])[0]
        files = plan_files(
            source.tensors, tasks, f"{secrets.token_hex(4)}-rank00000", options.file_bytes
        )
        meta: dict[str, Any] = dict(source.meta)
        settings = SaveOptions(meta, options.file_bytes)
        save = Save(storage, alone, settings, merged, {}, files, lock.pop_all().close)
    write_and_commit(
        save, lambda placed: source.elements(placed.tensor, placed.box), alone, lambda _: None
    )
