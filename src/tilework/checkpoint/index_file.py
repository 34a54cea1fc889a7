"""The file of an index: read, and replaced so that a folder always has the old or the new index.

If renames replace files, a rename does this. Elsewhere, as at URLs, a file that is rewritten may be
torn for a while, or for ever. There the old index is first written to a second file, and removed
afterwards: a reader that finds the first file torn or missing reads the second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tilework.checkpoint.flat_state import FlatState, NamedTensor, PerRank, state_of_json
from tilework.checkpoint.format import INDEX_NAME, PREVIOUS_NAME, Index
from tilework.checkpoint.index_text import index_text, parse_index
from tilework.checkpoint.storage import UNFINISHED, Storage
from tilework.checkpoint.values import decode_value
from tilework.errors import CheckpointError

DATA_FILE = re.compile(r"[0-9a-f]{8}-rank[0-9]{5,}-[0-9]{5,}\.safetensors")


def is_checkpoint(names: list[str], storage: Storage) -> bool:
    """True if a folder with files of these names has an index file, which may be damaged."""
    return INDEX_NAME in names or (storage.writes_in_place and PREVIOUS_NAME in names)


def is_ours(name: str) -> bool:
    """True for the names that saves give to files, except the index and the lock."""
    finished = name.removesuffix(UNFINISHED)
    if finished == INDEX_NAME:
        return finished != name
    return finished == PREVIOUS_NAME or DATA_FILE.fullmatch(finished) is not None


def read_index(storage: Storage) -> Index:
    """The index of a checkpoint. Local.

    Raises:
        CheckpointError: There is no index, or it is damaged.
    """
    return read_counting(storage)[1]


def saved_state(
    index: Index, storage: Storage, check: Callable[[Any], object] = decode_value
) -> FlatState:
    """The state in an index. ``check`` is called with each value's JSON, and may raise ValueError.

    Raises:
        CheckpointError: The state is not as docs/format.md says, or names missing tensors.
    """
    where = storage.where(INDEX_NAME)
    try:
        state = state_of_json(index.state, check)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where}: the state in the index cannot be read: {error}. Use another checkpoint, or "
            f"save the state again",
            file=where,
        ) from None
    for name in (name for leaf in state.leaves.values() for name in names_of(leaf)):
        if name not in index.tensors:
            raise CheckpointError(
                f"{where} is damaged: the state in the index names the tensor {name!r}, and the "
                f"index lists no such tensor. Use another checkpoint, or save the state again",
                file=where,
            )
    return state


def names_of(leaf: Any) -> list[str]:
    """The names of the tensors that a leaf stands for, one for each variant that is a tensor."""
    if isinstance(leaf, PerRank):
        return [name for _, each in leaf.variants for name in names_of(each)]
    return [leaf.name] if isinstance(leaf, NamedTensor) else []


def read_counting(storage: Storage) -> tuple[str, Index]:
    """The name of the index file that counts (the first that is valid), and the index. Local.

    Raises:
        CheckpointError: As for :func:`read_index`.
    """
    try:
        return INDEX_NAME, _read(storage, INDEX_NAME)
    except CheckpointError as error:
        names = storage.names()
        if storage.writes_in_place:
            if PREVIOUS_NAME in names:
                with suppress(CheckpointError):
                    return PREVIOUS_NAME, _read(storage, PREVIOUS_NAME)
            if INDEX_NAME in names:
                return INDEX_NAME, _read(storage, INDEX_NAME)  # it may have been replaced meanwhile
        if INDEX_NAME not in names:
            nothing = "" if names else "; there is no such folder, or nothing in it"
            raise CheckpointError(
                f"{storage.location} is not a checkpoint: it has no {INDEX_NAME}, which a "
                f"save writes last{nothing}",
                file=storage.location,
            ) from None
        raise error


def write_index(storage: Storage, index: Index) -> None:
    """Write the index of a folder, in the place of the old index. Local.

    Raises:
        CheckpointError, OSError: The index cannot be written. The old index stays valid.
    """
    before = _kept(storage) if storage.writes_in_place else None
    try:
        _write(storage, INDEX_NAME, index_text(index))
    except BaseException:
        if before is not None:
            with suppress(OSError, CheckpointError):
                _write(storage, INDEX_NAME, before)
                storage.remove(PREVIOUS_NAME)
        raise
    storage.sync()
    if before is not None:
        storage.remove(PREVIOUS_NAME)


def _read(storage: Storage, name: str) -> Index:
    return parse_index(storage.read_all(name), storage.where(name))


def _kept(storage: Storage) -> bytes | None:
    """Keep the valid index in a second file, and return its text; None without a valid index."""
    names = storage.names()
    for name in (INDEX_NAME, PREVIOUS_NAME):
        if name not in names:
            continue
        with suppress(CheckpointError):
            text = storage.read_all(name)
            parse_index(text, storage.where(name))
            break
    else:
        return None
    if name == INDEX_NAME:
        _write(storage, PREVIOUS_NAME, text)
    return text


def _write(storage: Storage, name: str, text: bytes) -> None:
    with storage.create(name) as file:
        file.write(text)
        file.finish()
