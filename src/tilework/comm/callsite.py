"""Where in the user's program a call came from."""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)


def call_site() -> str:
    """``file:line`` of the innermost frame outside this package; "" if there is none.

    Only called on the way to an error: walking frames is too slow for the way to success.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) or "/testing/" in name[len(_PACKAGE) :]:
            return f"{name}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
