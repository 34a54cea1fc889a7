"""Objects of this library's in functions of torch.distributed's: an error that says whose they are.

torch asks the objects that it is given a few things before it uses them. Asked by its code, they
say what it would take instead.
"""

from __future__ import annotations

import sys

_CALLERS = ("torch.distributed", "torch.nn.parallel")


def refuse_torch_caller(what: object, instead: str) -> None:
    """Raise TypeError if the method that calls this was called by torch.distributed's own code.

    Args:
        what: The object that was given to torch's function.
        instead: The sentence's rest: whose it is, and what torch takes instead.
    """
    if called_by_torch(2):
        raise TypeError(f"{what!r} is {instead}")


def called_by_torch(depth: int = 1) -> bool:
    """True if the function that calls this was called by torch.distributed's own code.

    Args:
        depth: The number of calls between that code and this function, but for this one's.
    """
    caller: str = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return caller.startswith(_CALLERS)
