"""Checkpoints in an open format: whole or absent, readable by anyone, loadable into any layout.

    from tilework import checkpoint

    checkpoint.save({"model": model, "optimizer": optimizer, "step": step}, "run/step-100")
    checkpoint.load("run/step-100", into={"model": model, "optimizer": optimizer})

A checkpoint is a folder of safetensors files and one JSON index; docs/format.md specifies it.

- ``api``: what programs call; ``asynchronous``: saving beside training;
  ``manager``: the checkpoints of one run;
- ``objects``, ``flat_state``, ``values``: states of objects as containers, containers as paths;
- ``describing``, ``save_planning``, ``saving``: what ranks have, who writes what, the protocol;
- ``safetensors_index``, ``published``, ``composing``, ``memory_for_meta``: published weights, in
  the names and forms of a model that has no memory yet; ``publishing``: the way back;
- ``name_patterns``, ``filling``, ``load_planning``, ``reading``, ``sharing``, ``exchanging``,
  ``loading``: the way back;
- ``state_dict``, ``copying``: state dicts by names, whole or sharded, as torch's functions make;
- ``showing``, ``verifying``, ``convert``, ``command``: looking at it, and other formats;
- ``format``, ``index_text``, ``dtypes``: the index; ``storage``, ``url_storage``: files.
"""

from typing import TYPE_CHECKING, NoReturn

from tilework.checkpoint.api import async_save, index_of, load, read, save
from tilework.checkpoint.asynchronous import PendingSave
from tilework.checkpoint.composing import PieceOf
from tilework.checkpoint.convert.converting import ConvertOptions, convert
from tilework.checkpoint.loading import LoadReport
from tilework.checkpoint.manager import CheckpointManager, KeptCheckpoint
from tilework.checkpoint.objects import RandomState
from tilework.checkpoint.publishing import save_pretrained
from tilework.checkpoint.saving import SaveOptions
from tilework.checkpoint.showing import show
from tilework.checkpoint.stateful import Stateful
from tilework.checkpoint.verifying import Difference, diff, verify
from tilework.errors import CheckpointError
from tilework.from_torch import refuse_left_out

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "ConvertOptions",
    "Difference",
    "KeptCheckpoint",
    "LoadReport",
    "PendingSave",
    "PieceOf",
    "RandomState",
    "SaveOptions",
    "Stateful",
    "async_save",
    "convert",
    "diff",
    "index_of",
    "load",
    "read",
    "save",
    "save_pretrained",
    "show",
    "verify",
]


if not TYPE_CHECKING:  # which would take any name for one that is here

    def __getattr__(name: str) -> NoReturn:
        """An error about a name that the package has not."""
        refuse_left_out(__name__, name)
