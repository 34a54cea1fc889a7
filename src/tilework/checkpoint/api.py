"""Saving and loading as programs call them.

torch's names of parameters are taken, too: ``save(state, checkpoint_id=path)``, and
``load(state, checkpoint_id=path)`` with the state first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilework.checkpoint.asynchronous import PendingSave, raise_pending, start
from tilework.checkpoint.filling import MapNames
from tilework.checkpoint.format import Index
from tilework.checkpoint.index_file import read_index
from tilework.checkpoint.loading import LoadOptions, LoadReport, load_into, read_all
from tilework.checkpoint.places import AnyPath, storage_at
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.saving import SaveOptions, prepare, write_and_commit
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.torch_order import loading_names, saving_names
from tilework.comm.world import AnyGroup

Names = str | Sequence[str] | None
_DEFAULT = SaveOptions()


@saving_names
def save(
    state: Any,
    path: AnyPath,
    options: SaveOptions = _DEFAULT,
    *,
    group: AnyGroup = None,
) -> None:
    """Write a checkpoint: whole, or not at all. Collective over the group; blocks.

    Each rank writes its part, to files of its own; what several hold is written once, by them in
    turn. Without a group it is a checkpoint of this process.

    Args:
        state: Any nesting of dicts, lists, tuples, tensors (plain, DTensor, ShardedTensor),
            numbers, strings, bytes and None, and of objects with ``state_dict`` and
            ``load_state_dict``: modules, optimizers, schedulers, :class:`RandomState`. A plain
            value or tensor that differs between ranks is saved for each of them. Nothing else may
            change it meanwhile.
        path: A folder that all ranks see, or a URL for fsspec. A checkpoint that is there stays
            what it is until the new one is complete, which then takes its place.
        options: What goes into the index besides, and whether what is there is replaced.
        group: The ranks that save; None: all, or this process if there is no group.

    Raises:
        CheckpointError: On all ranks alike: a file could not be written, or another save is at
            work there. What was at the path is as it was; or the new checkpoint is there, whole, if
            the disk refused what comes after the index.
        TypeError: The state has something that a checkpoint does not hold; the message says where.
        PeerLostError: A rank died. What was at the path is as it was; or the new checkpoint is
            there, whole, if the first rank died after it had written the index.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2), "step": 3}, folder)
        >>> checkpoint.read(folder)
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    ranks = Ranks(group)
    prepared = prepare(storage_at(path), state, ranks, options, raise_pending)
    with _progress(f"saving {path}", prepared.nbytes, ranks, "the disk") as progress:
        write_and_commit(prepared, prepared.elements_of, ranks, progress)


@saving_names
def async_save(
    state: Any,
    path: AnyPath,
    options: SaveOptions = _DEFAULT,
    *,
    group: AnyGroup = None,
) -> PendingSave:
    """Write a checkpoint while the program goes on. Collective; blocks for one copy in memory.

    What this rank is to write is copied, and a thread writes the copy; the state may change as soon
    as this returns. The thread communicates on a group of its own, never on one of the program's.
    A save that is still at work is waited for first: of a rank's saves one is at work at a time.

    Args:
        state: As for :func:`save`.
        path: As for :func:`save`.
        options: As for :func:`save`.
        group: As for :func:`save`.

    Returns:
        A handle: ``wait()`` blocks until the checkpoint is there, and raises if it failed. Without
        that, the next save raises it. A program that ends waits for it.

    Raises:
        CheckpointError: The save before has failed; or as :func:`save` does before it writes.
        TypeError: As for :func:`save`.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder, state = tempfile.mkdtemp(), {"weight": torch.ones(2)}
        >>> pending = checkpoint.async_save(state, folder)
        >>> _ = state["weight"].zero_()
        >>> pending.wait()
        >>> checkpoint.read(folder)
        {'weight': tensor([1., 1.])}
    """
    return start(storage_at(path), state, Ranks(group).own(), options)


@loading_names
def load(
    path: AnyPath,
    into: Any,
    *,
    names: Names = None,
    map_names: MapNames = None,
    strict: bool = True,
    verify: bool = True,
    group: AnyGroup = None,
) -> LoadReport:
    """Fill a state from a checkpoint, whatever layouts it was saved in. Collective; blocks.

    Tensors are filled in place, in the layout that they have: each rank reads the bytes that it
    needs, and what several ranks of a host need is read once and passed on in memory. Values take
    the place of values, objects are given their state. Optimizers have their states by the names of
    their parameters, in whatever groups these are.

    Args:
        path: As for :func:`save`; or a folder of published weights: safetensors files, with Hugging
            Face's index or without. A model of transformers' takes them in its own names and forms.
        into: A state of the structure that was saved, or a part of it. Models on ``meta`` get their
            memory here, in their layouts, when nothing is missing.
        names: Patterns, such as ``"model.*"``: only names of the state that match one are filled.
            One that matches nothing is an error, if ``strict``.
        map_names: The checkpoint's name for a name of the state: a function, or a dict. A list of
            names is joined along dim 0; a :class:`PieceOf` is cut.
        strict: Raise if the checkpoint lacks a name that is asked for; False: leave it as it is.
        verify: Compare the checksums of what is read.
        group: The ranks that load; None: all, or this process if there is no group.

    Returns:
        What was loaded, left out and converted, with the state as ``report.state``.

    Raises:
        CheckpointError: On all ranks alike; it names the file, the tensor and the rank. Nothing was
            filled, unless elements are damaged: then tensors hold what was read so far.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2), "step": 3}, folder)
        >>> state = {"weight": torch.zeros(2), "step": 0}
        >>> print(checkpoint.load(folder, into=state))
        loaded 1 tensors, 8 bytes read here
        >>> state
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    ranks = Ranks(group)
    options = LoadOptions(_patterns(names), map_names, strict, verify)
    with _progress(f"loading {path}", 0, ranks) as progress:
        return load_into(storage_at(path), into, ranks, options, progress)


@checkpoint_errors()
def read(path: AnyPath, names: Names = None, *, verify: bool = True) -> Any:
    """The state of a checkpoint, in plain containers and full tensors on the CPU. Local.

    For inspection and inference: it needs neither ranks nor the objects that were saved, whose
    states are dicts here. What was saved for each rank is a dict by rank.

    Args:
        path: As for :func:`save`.
        names: Patterns, such as ``"model.*"``; only what matches one is read, and each must match
            something.
        verify: Compare the checksums of what is read.

    Raises:
        CheckpointError: There is none, or it is damaged; or a pattern matches nothing.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"model": torch.nn.Linear(1, 1, bias=False), "step": 3}, folder)
        >>> list(checkpoint.read(folder, "model.*")["model"])
        ['weight']
    """
    with Progress(f"reading {path}", is_shown=None if Ranks().is_first else False) as progress:
        return read_all(storage_at(path), _patterns(names), verify, progress)


@checkpoint_errors()
def index_of(path: AnyPath) -> Index:
    """The index of a checkpoint: its tensors, boxes, files and checksums. Local.

    Raises:
        CheckpointError: There is none, or it is damaged.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2)}, folder)
        >>> checkpoint.index_of(folder).tensors["weight"].shape
        (2,)
    """
    return read_index(storage_at(path))


def _patterns(names: Names) -> tuple[str, ...] | None:
    if names is None:
        return None
    return (names,) if isinstance(names, str) else tuple(names)


def _progress(what: str, total: int, ranks: Ranks, afterwards: str = "") -> Progress:
    """The progress of the first rank's bytes, which are about as many as any other's."""
    others = "other ranks" if len(ranks.all) > 1 else ""
    awaited = " and ".join(filter(None, (afterwards, others)))
    return Progress(what, total, None if ranks.is_first else False, awaited)
