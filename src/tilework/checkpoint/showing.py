"""Pictures and tables of a checkpoint, for a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tilework.checkpoint.flat_state import FlatState, FlatValue, PerRank, dotted
from tilework.checkpoint.format import DRAWN, INDEX_NAME, LISTED, checkpoint_parts
from tilework.checkpoint.index_text import read_index, saved_state
from tilework.checkpoint.manager import KeptCheckpoint, kept_in, run_page
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.safetensors_index import safetensors_index
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.checkpoint.values import value_text
from tilework.show import Page, Styled


@checkpoint_errors()
def show(path: AnyPath, names: Sequence[str] | None = None) -> None:
    """Print a checkpoint: tensors, pictures of their layouts, sizes and checksums. Local.

    For the folder of a :class:`CheckpointManager` it prints the existing steps.

    Args:
        path: A folder, or a URL; also a safetensors file, or a folder of such files.
        names: Patterns: only tensors whose names match a pattern are shown, however many.

    Raises:
        CheckpointError: It is not a checkpoint, or the index is damaged; or a pattern matches
            nothing.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2)}, folder)
        >>> checkpoint.show(folder)  # doctest: +ELLIPSIS
        1 tensor, 8 B in 1 file, saved by 1 rank ...
    """
    storage = storage_at(path)
    found = _names_at(storage)
    if found and INDEX_NAME not in found:
        kept = [each for each in kept_in(storage) if isinstance(each, KeptCheckpoint)]
        if kept:
            run_page(kept).print()
            return
    is_foreign = INDEX_NAME not in found and (
        str(path).endswith(".safetensors") or any(n.endswith(".safetensors") for n in found)
    )
    index = safetensors_index(path)[1] if is_foreign else read_index(storage)
    state = FlatState() if names or is_foreign else saved_state(index, storage, value_text)
    patterns = NamePatterns(names or None)
    tensors = [t for t in index.tensors.values() if patterns.match(t.name)]
    patterns.check()
    most = (len(tensors), len(tensors)) if names else (LISTED, DRAWN)
    listed = checkpoint_parts(str(index), index.meta, tensors, *most)
    Page(*listed, *_values(state)).print()


def _names_at(storage: Storage) -> list[str]:
    with contextlib.suppress(OSError):
        return list(storage.names())
    return []


def _values(state: FlatState) -> Iterator[str | Styled]:
    values = [
        (dotted(path), leaf)
        for path, leaf in state.leaves.items()
        if isinstance(leaf, FlatValue | PerRank)
    ]
    if values:
        yield ""
        yield "values", "bold"
    for name, leaf in values[:LISTED]:
        text = f"{len(leaf.variants)} variants" if isinstance(leaf, PerRank) else _value(leaf)
        yield f"{name} = {text if len(text) <= 60 else text[:57] + '…'}"
    if len(values) > LISTED:
        yield f"… and {len(values) - LISTED:,} more"


def _value(leaf: FlatValue) -> str:
    """The value as Python writes it; the saved JSON if the kind of value is unknown."""
    try:
        return value_text(leaf.json)
    except ValueError:
        return str(leaf.json)
