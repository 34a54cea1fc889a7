"""Errors for objects of this library that are given to functions of torch.distributed.

torch queries some attributes of its arguments before it uses them. If torch's code asks them, these
objects raise, and say what torch takes instead.
"""

from __future__ import annotations

import sys

_CALLERS = ("torch.distributed", "torch.nn.parallel")


def refuse_torch_caller(what: object, instead: str) -> None:
    """Raise TypeError if the method that calls this was called by code of torch.distributed.

    Args:
        what: The object that was given to torch's function.
        instead: The rest of the sentence: the object's library, and what torch takes instead.
    """
    if called_by_torch(2):
        raise TypeError(f"{what!r} is {instead}")


def called_by_torch(depth: int = 1) -> bool:
    """True if code of torch.distributed, or of torch.nn.parallel, called the caller of this.

    Args:
        depth: The caller to look at: 1 is the caller of the function that calls this, 2 the caller
            of that caller.
    """
    caller: str = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return caller.startswith(_CALLERS)
