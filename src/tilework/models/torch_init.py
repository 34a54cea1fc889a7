"""torch.nn.init's functions, even while another library has replaced them there.

``transformers`` does so while it makes models. Those functions call torch's, which then look up
their own name, find the replacement, and report it as the function that a tensor overrides.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Final

from torch.nn import init

#: The functions at import of tilework, if they let tensors override them.
_ORIGINALS: Final = {
    name: function
    for name, function in vars(init).items()
    if isinstance(function, FunctionType) and "handle_torch_function" in function.__code__.co_names
}


def original(func: Any) -> Any:
    """The function that ``func`` replaces in ``torch.nn.init``; else ``func``."""
    if not isinstance(func, FunctionType):
        return func
    mine = _ORIGINALS.get(func.__name__)
    return func if mine is None or getattr(init, func.__name__, None) is not func else mine
