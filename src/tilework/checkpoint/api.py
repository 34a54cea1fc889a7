"""The functions for saving and loading that programs call.

torch's names of parameters are accepted, too: ``save(state, checkpoint_id=path)``, and
``load(state, checkpoint_id=path)`` with the state first.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tilework.checkpoint.asynchronous import PendingSave, raise_pending, start
from tilework.checkpoint.composing import MapNames
from tilework.checkpoint.format import Index
from tilework.checkpoint.index_text import read_index
from tilework.checkpoint.loading import LoadOptions, LoadReport, load_into, read_all
from tilework.checkpoint.name_patterns import Names
from tilework.checkpoint.progress import Progress
from tilework.checkpoint.ranks import Ranks
from tilework.checkpoint.saving import SaveOptions, prepare_save, write_and_commit
from tilework.checkpoint.storage import Storage
from tilework.checkpoint.system_errors import checkpoint_errors
from tilework.checkpoint.url_storage import AnyPath, storage_at
from tilework.comm.operations.internal import span
from tilework.comm.per_call.internal import ATTRIBUTE, current_pretence, torch_names
from tilework.comm.world import AnyGroup, is_initialized

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_ranks(no_dist: bool) -> bool:
    """True if torch's ``no_dist`` may be given: it is False, or there is no process group."""
    return not no_dist or not is_initialized()


saving_names = torch_names(
    {
        "storage_writer": None,
        "planner": None,
        "no_dist": _without_ranks,
        "use_collectives": True,
        "async_checkpointer_type": lambda kind: getattr(kind, "value", kind) == "thread",
        "async_stager": None,
    },
    state_dict="state",
    checkpoint_id="path",
    process_group="group",
)
_loading_names = torch_names(
    {"storage_reader": None, "planner": None, "no_dist": _without_ranks},
    state_dict="into",
    checkpoint_id="path",
    process_group="group",
)


def loading_names(function: _Function) -> _Function:
    """Decorate ``load(path, into)`` to accept torch's order and names: ``load(state, path)``."""
    named = _loading_names(function)

    @functools.wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], str | os.PathLike | Storage) and "into" not in kwargs:
            state, *rest = args
            if rest and isinstance(rest[0], str | os.PathLike | Storage):
                args = (rest[0], state, *rest[1:])
            elif not rest and not {"path", "checkpoint_id"}.isdisjoint(kwargs):
                args, kwargs = (), {**kwargs, "into": state}
            else:
                raise TypeError(
                    f"load(path, into=state): the first argument is the path of a checkpoint, and "
                    f"got {type(state).__name__}. In torch's order it is load(state, path), or "
                    f"load(state, checkpoint_id=path)"
                )
        return named(*args, **kwargs)

    setattr(load, ATTRIBUTE, getattr(named, ATTRIBUTE))
    return cast(_Function, load)


_DEFAULT = SaveOptions()


@saving_names
def save(
    state: Any, path: AnyPath | Storage, options: SaveOptions = _DEFAULT, *, group: AnyGroup = None
) -> None:
    """Write a checkpoint: whole, or not at all. Collective over the group; blocks.

    Each rank writes its part, to separate files. A part that several ranks hold is written once:
    these ranks share the work. Without a process group, only this process saves.

    Args:
        state: Any nesting of dicts, lists, tuples, tensors (plain, DTensor, ShardedTensor),
            numbers, strings, bytes and None, and of objects with ``state_dict`` and
            ``load_state_dict``: modules, optimizers, schedulers, :class:`RandomState`. A plain
            value or tensor that differs between ranks is saved for each rank. Nothing else may
            change the state during the call.
        path: A folder that all ranks see, a URL for fsspec, or a :class:`Storage`. An existing
            checkpoint stays intact until the new checkpoint is complete and replaces it.
        options: Additions to the index, and whether to replace an existing checkpoint.
        group: The ranks that save; None: all, or this process if there is no group.

    Raises:
        CheckpointError: On all ranks: a file could not be written, or another save is running
            there. The old checkpoint stays intact. Only if the disk refused a step after the index
            was written, the new checkpoint is complete.
        TypeError: The state has something that a checkpoint does not hold; the message says where.
        PeerLostError: A rank died. The old checkpoint stays intact. Only if the first rank died
            after it had written the index, the new checkpoint is complete.

    Example:
        >>> import tempfile, torch
        >>> from tilework import checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> checkpoint.save({"weight": torch.ones(2), "step": 3}, folder)
        >>> checkpoint.read(folder)
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    ranks = Ranks(group)
    storage, pretence = storage_at(path), current_pretence()
    prepared = prepare_save(storage, state, ranks, options, raise_pending)
    if pretence is not None:  # there is nothing to write
        pretence.saved[storage.location] += prepared.nbytes
        prepared.release()
        return
    told = ranks.progress(f"saving {path}", prepared.nbytes, "the disk")
    with span("save a checkpoint"), told as progress:
        write_and_commit(prepared, prepared.elements_of, ranks, progress)


@saving_names
def async_save(
    state: Any, path: AnyPath | Storage, options: SaveOptions = _DEFAULT, *, group: AnyGroup = None
) -> PendingSave:
    """Write a checkpoint while the program continues. Collective; blocks for one copy in memory.

    This rank's part is copied, and a thread writes the copy; the state may change as soon as this
    returns. The thread communicates on a separate group, never on a group of the program. Each rank
    runs one save at a time: the call first waits for an earlier save that is still running. The
    arguments are those of :func:`save`.

    Returns:
        A handle: ``wait()`` blocks until the checkpoint is complete, and raises if the save failed.
        If ``wait()`` is not called, the next save raises the error. The program does not exit
        before the save has ended.

    Raises:
        CheckpointError: The previous save has failed, and no call has raised the error yet; or as
            for :func:`save`, for reasons that are found before anything is written.
        TypeError: As for :func:`save`.

    Example: see docs/how-to/checkpoints.md.
    """
    return start(storage_at(path), state, Ranks(group).own(), options)


@loading_names
def load(
    path: AnyPath | Storage,
    into: Any,
    *,
    names: Names = None,
    map_names: MapNames = None,
    strict: bool = True,
    verify: bool = True,
    group: AnyGroup = None,
) -> LoadReport:
    """Fill a state from a checkpoint, whatever layouts it was saved in. Collective; blocks.

    Tensors are filled in place, in their own layouts: each rank reads the bytes that it needs, and
    bytes that several ranks of a host need are read once and shared in memory. Values replace
    values, and objects get their states. Each parameter gets the
    optimizer's state that was saved under the parameter's name, even if ``param_groups`` differ.

    Args:
        path: As for :func:`save`; or a folder of published weights: safetensors files, with Hugging
            Face's index or without. For a model of transformers, tilework converts published
            names and shapes to those of the model.
        into: A state with the saved structure, or a part of it. Tensors on ``meta``
            that the checkpoint has get memory on the CPU, in their layouts.
        names: Patterns, such as ``"model.*"``: only names of the state that match one are filled.
            With ``strict``, a pattern that matches nothing is an error.
        map_names: A function or a dict that gives the checkpoint's name for a name of the state. If
            it gives a list of names, these tensors are concatenated along dim 0; if it gives a
            :class:`PieceOf`, a piece of a tensor is taken.
        strict: Raise if the checkpoint lacks a name that is asked for; False: leave that part
            unchanged.
        verify: Compare the checksums of everything that is read.
        group: The ranks that load; None: all, or this process if there is no group.

    Returns:
        A report of loaded, left-out and converted names, with the state as ``report.state``.

    Raises:
        CheckpointError: On all ranks; the error names the file, the tensor and the rank. Nothing
            was filled, unless elements are damaged: then tensors hold the elements read so far.

    Example: see docs/how-to/checkpoints.md.
    """
    ranks = Ranks(group)
    options = LoadOptions(names, map_names, strict, verify)
    storage, pretence = storage_at(path), current_pretence()
    if pretence is not None and storage.location in pretence.saved:  # there is nothing to read
        return LoadReport(into)
    with span("load a checkpoint"), ranks.progress(f"loading {path}", 0) as progress:
        return load_into(storage, into, ranks, options, progress)


@checkpoint_errors()
def read(path: AnyPath | Storage, names: Names = None, *, verify: bool = True) -> Any:
    """The state of a checkpoint, in plain containers and full tensors on the CPU. Local.

    For inspection and inference: it needs neither ranks nor the saved objects, whose states are
    dicts here. A value that was saved for each rank becomes a dict from ranks to values.

    Args:
        path: As for :func:`save`.
        names: Patterns, such as ``"model.*"``; only matching names are read, and each pattern must
            match something.
        verify: Compare the checksums of everything that is read.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged; or a pattern matches nothing.

    Example: see docs/how-to/checkpoints.md.
    """
    with Progress(f"reading {path}", is_shown=None if Ranks().is_first else False) as progress:
        return read_all(storage_at(path), names, verify, progress)


@checkpoint_errors()
def index_of(path: AnyPath | Storage) -> Index:
    """The index of a checkpoint: tensors, boxes, files and checksums. Local.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.

    Example: ``index_of(folder).tensors["weight"].shape``.
    """
    return read_index(storage_at(path))
