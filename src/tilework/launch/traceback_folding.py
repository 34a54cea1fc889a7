"""Tracebacks for a person: frames of tilework and torch folded to a line.

The text of a traceback is folded, not the traceback itself: the launcher that prints it has only
the text, and keeps the full text for a rank's log.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Final

from tilework.comm.per_call.internal import in_library

#: ``full`` shows every frame.
VARIABLE: Final = "TILEWORK_TRACEBACK"
_OWN_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
#: A frame's first line; the margin of an exception group has bars.
_FRAME: Final = re.compile(r'(?P<margin>[ |]*)  File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def folded(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """``text`` with each run of frames of tilework, torch and the interpreter as one line.

    Unchanged with ``TILEWORK_TRACEBACK=full``, or if no frame belongs to the program.

    Example:
        >>> folded('  File "train.py", line 7, in step')
        '  File "train.py", line 7, in step'
    """
    blocks = _blocks(text.split("\n"))
    own = [frame for frame, _ in blocks if frame is not None and not in_library[frame["file"]]]
    if environment.get(VARIABLE) == "full" or not own:
        return text
    lines: list[str] = []
    run: list[re.Match[str]] = []
    is_told = False
    for frame, block in [*blocks, (None, [])]:
        if frame is not None and in_library[frame["file"]]:
            run.append(frame)
            continue
        if run:
            hint = "" if is_told else f"; {VARIABLE}=full shows all"
            lines.append(_fold(run, hint))
            run, is_told = [], True
        lines += block
    return "\n".join(lines)


def _blocks(lines: Sequence[str]) -> list[tuple[re.Match[str] | None, list[str]]]:
    """The lines of a traceback in blocks: each frame with the lines of source below it.

    A line between frames is a block by itself, with None in place of the frame.
    """
    blocks: list[tuple[re.Match[str] | None, list[str]]] = []
    inside = ""
    for line in lines:
        frame = _FRAME.match(line)
        if frame is None and inside and line.startswith((inside, f"{inside[:-2]}[Previous")):
            blocks[-1][1].append(line)
            continue
        blocks.append((frame, [line]))
        inside = f"{frame['margin']}    " if frame is not None else ""
    return blocks


def _fold(run: Sequence[re.Match[str]], hint: str) -> str:
    count = "1 frame" if len(run) == 1 else f"{len(run)} frames"
    owners = " and ".join(dict.fromkeys(_owner(frame["file"]) for frame in run))
    last = run[-1]
    where = f"{os.path.basename(last['file'])}:{last['line']}"
    return f"{last['margin']}  ... {count} of {owners}, to {where}{hint}"


def _owner(file: str) -> str:
    if file.startswith("<frozen "):
        return "Python"
    return "tilework" if file.startswith(_OWN_FOLDER) else "torch"
