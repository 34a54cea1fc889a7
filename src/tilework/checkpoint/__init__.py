"""Checkpoints in an open format: whole or absent, readable by anyone, loadable into any layout.

    from tilework import checkpoint

    checkpoint.save({"model": model, "optimizer": optimizer, "step": step}, "run/step-100")
    checkpoint.load("run/step-100", into={"model": model, "optimizer": optimizer})

A checkpoint is a folder of safetensors files and one JSON index; docs/format.md specifies it.
docs/architecture/checkpoint.md says which modules save and load, in order.
"""

# ruff: noqa: F405

import importlib
from typing import TYPE_CHECKING, Any

from tilework.from_torch import refuse_left_out

if TYPE_CHECKING:
    from tilework.checkpoint.public import *  # noqa: F403

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "ConvertOptions",
    "Difference",
    "FileReader",
    "FileWriter",
    "KeptCheckpoint",
    "LoadReport",
    "PendingSave",
    "PieceOf",
    "RandomState",
    "SaveOptions",
    "Stateful",
    "Storage",
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


if not TYPE_CHECKING:  # type checkers would take any name as defined

    def __getattr__(name: str) -> Any:
        """The object of a public name, imported at the first use. Raises for any other name."""
        if name in __all__:
            return getattr(importlib.import_module(f"{__name__}.public"), name)
        refuse_left_out(__name__, name)
