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
    caller: str = sys._getframe(2).f_globals.get("__name__", "")
    if caller.startswith(_CALLERS):
        raise TypeError(f"{what!r} is {instead}")
