"""Names that a package offers for a package above it: one table, read when a name is first used.

Imports point down the layers. So a package with such a name looks it up here, in ``__getattr__`` or
in a function, and imports nothing from above.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

_BUCKETS = "tilework.parallel.data_parallel.buckets"
_STALE = "tilework.parallel.stale_optimizers"
#: By package and name: the module above, and the object's name there ("" for the module itself).
LATE_NAMES: Final = {
    ("distributed", "_compute_bucket_assignment_by_size"): (
        _BUCKETS,
        "compute_bucket_assignment_by_size",
    ),
    ("models", "state_dict"): ("tilework.checkpoint.state_dict", ""),
    ("sharded", "mark_replaced"): (_STALE, "mark_replaced"),
    ("dtensor", "marking_replaced"): (_STALE, "marking_replaced"),
    ("dtensor", "to_dtensor"): ("tilework.interop", "to_dtensor"),
    ("dtensor", "to_sharded"): ("tilework.interop", "to_sharded"),
    ("dtensor", "capture"): ("tilework.capture.step", "capture"),
    ("parallel", "CompiledFunction"): ("tilework.capture.modules", "CompiledFunction"),
    ("dtensor", "compile_model"): ("tilework.capture.compile_entry", "compile_model"),
}


def late_name(package: str, name: str) -> Any:
    """The object that a package offers as ``name``. Imports the module that defines the object.

    Raises:
        KeyError: The table has no such name.

    Example:
        >>> late_name("dtensor", "to_sharded").__module__
        'tilework.interop'
    """
    place, attribute = LATE_NAMES[package, name]
    module = importlib.import_module(place)
    return getattr(module, attribute) if attribute else module
