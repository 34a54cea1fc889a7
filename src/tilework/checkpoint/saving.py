"""Saving by all ranks together, step by step, in the order of docs/format.md."""

from __future__ import annotations

import datetime
import secrets
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tilework.checkpoint.describing import (
    Description,
    MergedState,
    describe,
    is_partial,
    local_view,
    merge,
    settle,
)
from tilework.checkpoint.flat_state import FlatState, state_json
from tilework.checkpoint.flattening import flatten
from tilework.checkpoint.format import CHUNK_BYTES, Index, Part, SavedFile, SavedTensor
from tilework.checkpoint.index_text import (
    DATA_FILE,
    check_meta,
    is_checkpoint,
    is_ours,
    read_counting,
    write_index,
)
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.save_planning import (
    FILE_BYTES,
    FilePlan,
    PlacedBox,
    assign_writers,
    check_file_bytes,
    plan_files,
)
from tilework.checkpoint.stateful_objects import Containers
from tilework.checkpoint.storage import UNFINISHED, Storage
from tilework.checkpoint.tensor_bytes import byte_view, crc32, pieces_in_order
from tilework.errors import CheckpointError

#: The number and interval of retries of a writer whose path is taken.
_ATTEMPTS, _PAUSE_SECONDS = 10, 0.01
_ONE_FOLDER = "all ranks must save to one folder, which all hosts share"

#: Yields the elements of a box in order, as contiguous tensors.
Source = Callable[[PlacedBox], Iterator[Tensor]]
Progress = Callable[[int], None]


@dataclass(frozen=True)
class SaveOptions:
    """Settings of a save, synchronous or not.

    Args:
        meta: Plain JSON that the program adds to the index, such as the step.
        file_bytes: The maximum of bytes of elements in a file; larger tensors are split.
        overwrite: Replace an existing checkpoint; False: raise if there is one.

    If ranks have different settings, those of the first rank are used.

    Raises:
        ValueError: ``file_bytes`` is below 1.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    file_bytes: int = FILE_BYTES
    overwrite: bool = True

    def __post_init__(self) -> None:
        check_file_bytes(self.file_bytes)


@dataclass
class Save:
    """A prepared save: the merged state of all ranks, and what this rank writes from its leaves."""

    storage: Storage
    ranks: Ranks
    options: SaveOptions
    merged: MergedState
    leaves: dict[Any, Any]
    files: list[FilePlan]
    release: Callable[[], None]

    @property
    def nbytes(self) -> int:
        return sum(box.nbytes for plan in self.files for box in plan.boxes)

    def elements_of(self, placed: PlacedBox) -> Iterator[Tensor]:
        path, _ = self.merged.sources[placed.tensor]
        view = local_view(self.leaves[path], placed.box, self.ranks.here)
        return pieces_in_order(view, CHUNK_BYTES)


def prepare_save(
    storage: Storage, state: Any, ranks: Ranks, options: SaveOptions, first: Callable[[], None]
) -> Save:
    """Compare the ranks' states, plan the files, and lock the folder. Collective; blocks.

    No file is written or removed yet. ``first`` is called on each rank before all else, and may
    raise a CheckpointError.
    """
    flats: list[FlatState] = []
    with ExitStack() as lock:

        def describe_own() -> Any:
            first()
            flats.append(flatten(state, Containers(state)))
            # Partial tensors must be reduced first.
            some_partial = any(map(is_partial, flats[0].leaves.values()))
            described = None if some_partial else tuple(describe(flats[0], ranks.all))
            if ranks.is_first:
                check_meta(options.meta)
                lock.callback(_locked(storage))
                _check_replaceable(storage, options)
            return described

        descriptions = ranks.gather(describe_own)
        if any(described is None for described in descriptions):
            settle(flats[0])
            descriptions = ranks.gather(lambda: tuple(describe(flats[0], ranks.all)))
        # Separately: the facts above are mostly the same on all ranks, and are not sent.
        token = secrets.token_hex(4) if ranks.is_first else ""
        token, file_bytes = ranks.gather(lambda: (token, options.file_bytes))[0]
        options = replace(options, file_bytes=file_bytes)
        known = {id(each): Description(*each) for each in descriptions}
        merged = merge([known[id(each)] for each in descriptions], ranks.all)
        written = assign_writers(merged.tensors, ranks.all)
        prefix = f"{token}-rank{ranks.here:05}"
        files = plan_files(merged.tensors, written[ranks.here], prefix, options.file_bytes)
        release = lock.pop_all().close
    return Save(storage, ranks, options, merged, flats[0].leaves, files, release)


def _locked(storage: Storage) -> Callable[[], None]:
    """Lock the folder of a save, which is made if it is missing; return the lock's release."""
    for _ in range(_ATTEMPTS):
        storage.prepare()
        # Another manager may have taken the new folder for a leftover of a lost save.
        with suppress(FileNotFoundError, CheckpointError):
            return storage.lock()
        time.sleep(_PAUSE_SECONDS)
    storage.prepare()
    return storage.lock()


def _check_replaceable(storage: Storage, options: SaveOptions) -> None:
    if not options.overwrite and is_checkpoint(storage.names(), storage):
        raise CheckpointError(
            f"{storage.location} is a checkpoint already: give another path, or overwrite=True",
            file=storage.location,
        )


def remove_leftovers(storage: Storage) -> list[str]:
    """Remove files of saves that did not end; return their names. The caller holds the lock."""
    names = storage.names()
    used: set[str] = set()
    if is_checkpoint(names, storage):
        try:
            counting, index = read_counting(storage)
            used = {counting, *index.files}
        except CheckpointError:  # but unfinished files belong to no checkpoint
            used = {name for name in names if not name.endswith(UNFINISHED)}
    left = [name for name in names if is_ours(name) and name not in used]
    for name in left:
        storage.remove(name)
    storage.wait_for_room()  # also for files that earlier saves removed
    return left


# -- writing ---------------------------------------------------------------------------------


#: A written file: name, length, CRC-32 of all before the first element, and of each box's chunks.
Report = tuple[str, int, int, list[bytes]]


def write_files(
    storage: Storage, plans: Sequence[FilePlan], source: Source, progress: Progress
) -> list[Report]:
    """Write some files, each whole or absent; ``source`` yields the tensors of a box. Local."""
    written = []
    for plan in plans:
        with storage.create(plan.name) as file:
            file.write(plan.header)
            sums = [_write_box(file.write, source(placed), progress) for placed in plan.boxes]
            file.finish()
        checksums = [each.tobytes() for each in sums]
        written.append((plan.name, plan.nbytes, zlib.crc32(plan.header), checksums))
    if written:
        storage.sync()
    return written


def _write_box(
    write: Callable[[memoryview], None], elements: Iterator[Tensor], progress: Progress
) -> array[int]:
    sums, crc, room = array("I"), 0, CHUNK_BYTES
    for tensor in elements:
        memory = byte_view(tensor)
        while memory.nbytes:
            piece = memory[:room]
            crc, room = crc32(piece, crc), room - piece.nbytes
            write(piece)
            progress(piece.nbytes)
            memory = memory[piece.nbytes :]
            if room == 0:
                sums.append(crc)
                crc, room = 0, CHUNK_BYTES
    if room < CHUNK_BYTES:
        sums.append(crc)
    return sums


# -- the end ---------------------------------------------------------------------------------


def write_and_commit(save: Save, source: Source, ranks: Ranks, progress: Progress) -> Index | None:
    """Write this rank's files; then the first rank writes the index and returns it. Collective."""
    try:
        # Before anybody needs the room.
        ranks.gather(lambda: len(remove_leftovers(save.storage)) if ranks.is_first else 0)

        def write() -> list[Report]:
            _forget_replaced(save, ranks)
            try:
                return write_files(save.storage, save.files, source, progress)
            except FileNotFoundError as error:
                if ranks.is_first or not error.filename:
                    raise
                told = f"{error.filename}: the first rank has made no such folder: {_ONE_FOLDER}"
                raise CheckpointError(told, file=str(error.filename)) from error

        reports = ranks.gather(write)
        committed: list[Index] = []

        def commit() -> None:
            if ranks.is_first:
                committed.append(_index(save, reports))
                commit_index(save.storage, committed[0])

        ranks.gather(commit)
        return committed[0] if committed else None
    except CheckpointError:
        if ranks.is_first:
            with suppress(OSError, CheckpointError):  # the error being raised says more
                remove_leftovers(save.storage)
        raise
    finally:
        save.release()


def _forget_replaced(save: Save, ranks: Ranks) -> None:
    """Drop cached pages of replaced files, for reuse: fresh pages are slow on VMs."""
    if not save.files:
        return
    token = save.files[0].name.partition("-")[0]
    replaced = [name for name in save.storage.names() if DATA_FILE.fullmatch(name)]
    for name in replaced[ranks.number :: len(ranks.all)]:
        if not name.startswith(token):  # the file of another, quicker rank
            save.storage.forget(name)


def commit_index(storage: Storage, index: Index) -> None:
    """Write the index, which completes the checkpoint; then remove replaced files. Local."""
    _check_visible(storage, index)
    replaced = {name for name in storage.names() if DATA_FILE.fullmatch(name)}
    write_index(storage, index)
    for name in replaced - set(index.files):
        storage.remove(name)


def _check_visible(storage: Storage, index: Index) -> None:
    missing = set(index.files) - set(storage.names())
    if missing:
        name = min(missing)
        raise CheckpointError(
            f"{storage.where(name)}, which its rank has written, cannot be seen from the first "
            f"rank: {_ONE_FOLDER}",
            file=storage.where(name),
        )


def _index(save: Save, reports: Sequence[Sequence[Report]]) -> Index:
    merged = save.merged
    files: dict[str, SavedFile] = {}
    parts: dict[int, list[Part]] = {number: [] for number in range(len(merged.tensors))}
    for plans, report in zip(_all_files(save), reports, strict=True):
        for plan, (name, nbytes, header_crc32, checksums) in zip(plans, report, strict=True):
            files[name] = SavedFile(nbytes, header_crc32)
            for placed, sums in zip(plan.boxes, checksums, strict=True):
                parts[placed.tensor].append(
                    Part(placed.box, name, placed.offset, placed.nbytes, tuple(array("I", sums)))
                )
    tensors = {
        tensor.name: SavedTensor(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            tuple(sorted(parts[number], key=lambda part: part.box.offsets)),
            tensor.layout,
        )
        for number, tensor in enumerate(merged.tensors)
    }
    for name, original in merged.aliases.items():
        first = tensors[original]
        tensors[name] = SavedTensor(name, first.dtype, first.shape, first.parts, first.layout)
    now = datetime.datetime.now(datetime.timezone.utc)
    return Index(
        tensors,
        files,
        state_json(merged.flat),
        len(save.ranks.all),
        CHUNK_BYTES,
        dict(save.options.meta),
        now.isoformat(timespec="seconds"),
        "tilework",
    )


def _all_files(save: Save) -> list[list[FilePlan]]:
    """The file plans of all ranks, without names; only the first rank needs them."""
    written = assign_writers(save.merged.tensors, save.ranks.all)
    return [
        plan_files(save.merged.tensors, written[rank], "", save.options.file_bytes)
        for rank in save.ranks.all
    ]
