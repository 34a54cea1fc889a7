"""Advice for errors that do not come from tilework, but happen in programs that use it.

Each hint is a function of the error and of the frames that it came through, outermost first. Hints
load no package: an error about a package comes from a program that has loaded the package.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Final

from tilework.errors import text_of
from tilework.from_torch import MODULES

_NO_GROUP: Final = re.compile(
    "Default process group has not been init|Error initializing torch.distributed using env://"
)
_VIEW: Final = re.compile(r"shape '\[(?P<shape>[-\d, ]+)\]' is invalid for input of size \d+")


def hint(error: BaseException) -> str:
    """The advice for ``error``; empty where there is none. Never raises.

    Example:
        >>> hint(ValueError("too large"))
        ''
    """
    with suppress(Exception):  # the error must be reported, whatever objects are in the frames
        text = text_of(error)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        for advise in _ADVICE:
            if advice := advise(text, frames):
                return advice
    return ""


def _torch_has_no_group(text: str, frames: Sequence[FrameType]) -> str:
    if not _NO_GROUP.search(text) or not _has_group():
        return ""
    theirs, ours = _modules(frames)
    return (
        f"the program made tilework's process group and called {theirs}, which has another: import "
        f"{ours} in place of {theirs}, or make torch's group by "
        'import tilework.torch_backend; torch.distributed.init_process_group("tilework")'
    )


def _modules(frames: Sequence[FrameType]) -> tuple[str, str]:
    """The module of torch that the program called, and the module here that has the names."""
    for frame in frames:
        module = str(frame.f_globals.get("__name__"))
        while "." in module and module not in MODULES:
            module = module.rpartition(".")[0]
        if not MODULES.get(module, "tilework.distributed").startswith("tilework.distributed"):
            return module, MODULES[module]
    return "torch.distributed", "tilework.distributed"


def _has_group() -> bool:
    world: Any = sys.modules.get("tilework.comm.world")
    return world is not None and world.current_world().default_group is not None


def _torch_wants_a_port(text: str, frames: Sequence[FrameType]) -> str:
    name = re.search(r"MASTER_ADDR|MASTER_PORT", text)
    if name is None or name[0] in os.environ or "TILEWORK_STORE" not in os.environ:
        return ""
    return (
        "torch's own env:// meets at a TCP port, which the launcher sets if asked: tilework run "
        "--tcp …; or let torch meet without a port by import tilework.torch_backend"
    )


def _heads_do_not_divide(text: str, frames: Sequence[FrameType]) -> str:
    found = _VIEW.search(text)
    if found is None:
        return ""
    width = int(found["shape"].rpartition(",")[2])
    for features, parts, name in _sharded_layers(frames):
        if width > 0 and features % width == 0 and features // width % parts:
            heads = features // width
            sizes = ", ".join(str(width * n) for n in _shares(heads, parts))
            return (
                f"{name} has {heads} heads of {width} features, which {parts} ranks cannot share "
                f"evenly: use a number of ranks that divides {heads}, or whole heads for each "
                f"rank, ColwiseParallel(output_layouts=Shard(-1, sizes=({sizes}))), and the same "
                f"sizes for the input_layouts of the layer after it"
            )
    return ""


def _shares(heads: int, parts: int) -> list[int]:
    return [heads // parts + (part < heads % parts) for part in range(parts)]


def _sharded_layers(frames: Sequence[FrameType]) -> Iterator[tuple[int, int, str]]:
    """(output features, ranks, name) of layers in ``frames`` that shard these, innermost first."""
    dtensor: Any = sys.modules.get("tilework.dtensor")
    if dtensor is None:
        return
    for frame in reversed(frames):
        module = frame.f_locals.get("self")
        for name, child in getattr(module, "_modules", {}).items():
            weight = getattr(child, "weight", None)
            if isinstance(weight, dtensor.DTensor):
                for axis, placement in enumerate(weight.placements):
                    if placement.is_shard(0):
                        yield weight.shape[0], weight.device_mesh.size(axis), name


def _file_of_dtensors(text: str, frames: Sequence[FrameType]) -> str:
    if "Unsupported global: GLOBAL tilework.dtensor" not in text:
        return ""
    return (
        "the file holds DTensors, which torch.load reads with weights_only=True after "
        "import tilework.dtensor, in a job of as many ranks as saved it"
    )


_ADVICE: Final[tuple[Callable[[str, Sequence[FrameType]], str], ...]] = (
    _torch_has_no_group,
    _torch_wants_a_port,
    _heads_do_not_divide,
    _file_of_dtensors,
)
