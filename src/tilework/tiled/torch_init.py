"""torch.nn.init's functions, also while another library has put its own in their places.

``transformers`` does so around the making of models: its functions call torch's, which then name
what they find under their own name, the replacement, as the function that a tensor overrides.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, Final

from torch.nn import init

#: As they were when tilework was imported: those that ask tensors whether they override them.
_ORIGINALS: Final = {
    name: function
    for name, function in vars(init).items()
    if isinstance(function, FunctionType) and "handle_torch_function" in function.__code__.co_names
}


def original(func: Any) -> Any:
    """The function of torch's in whose place ``func`` stands in ``torch.nn.init``, or ``func``.

    Example:
        >>> original(init.uniform_).__module__
        'torch.nn.init'
    """
    if not isinstance(func, FunctionType):
        return func
    mine = _ORIGINALS.get(func.__name__)
    return func if mine is None or getattr(init, func.__name__, None) is not func else mine
