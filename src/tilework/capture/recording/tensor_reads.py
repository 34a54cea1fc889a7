"""Reads of tensors' values by Python while a step is recorded: numbers, or errors.

``item()`` of a float gives a :class:`~tilework.capture.program.number.Number`. Other reads (numpy,
lists, branches, prints) would silently leave current values in the program: they raise, naming the
line. The methods of ``torch.Tensor`` and the functions of ``math`` are replaced while any thread of the
process records.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilework.capture.program.number import Number
from tilework.comm.per_call.call_recorder import current_recorder, recorded
from tilework.comm.per_call.callsite import call_site, in_library
from tilework.errors import CaptureError

#: Methods that read values, with a description for errors.
_READS = {
    "tolist": "makes a list of a tensor",
    "numpy": "makes a numpy array of a tensor",
    "__array__": "makes a numpy array of a tensor",
    "__bool__": "branches on the value of a tensor",
    "__int__": "makes a Python number of a tensor",
    "__index__": "makes a Python number of a tensor",
    "__complex__": "makes a Python number of a tensor",
    "__repr__": "prints the value of a tensor",
    "__format__": "prints the value of a tensor",
    "__dlpack__": "hands a tensor to another library",
}
#: Reads on which libraries branch, and which torch's dispatcher does not show faithfully.
_DECISIONS = ("tolist", "__bool__", "__int__", "__index__")
_NUMBERS = ("item", "__float__")
#: Functions of the default generator's state, used by recomputed layers.
_STATES = ("get_rng_state", "set_rng_state", "manual_seed")
#: Functions in C, which would compute with the NaN that a Number is to them.
_MATH = [name for name, value in vars(math).items() if callable(value) and name[0] != "_"]
_lock = threading.Lock()
_users = 0
_originals: dict[str, Any] = {}


@contextmanager
def watched_reads() -> Iterator[None]:
    """Within the block, record or refuse reads of tensors' values by threads that record."""
    global _users
    with _lock:
        if not _users:
            _replace()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _put_back()


def _replace() -> None:
    for name in _STATES:
        original = getattr(torch.random, name)
        _originals[f"torch.{name}"] = original
        for place in (torch, torch.random):
            setattr(place, name, recorded(original))
    for name in _MATH:
        _originals[f"math.{name}"] = original = getattr(math, name)
        setattr(math, name, _without_numbers(original))
    for name in (*_READS, *_NUMBERS, "as_subclass"):
        _originals[name] = vars(Tensor).get(name)
        made = _number(name) if name in _NUMBERS else _refused(name)
        made = _shared if name == "as_subclass" else made
        setattr(Tensor, name, functools.wraps(getattr(Tensor, name))(made))


def _put_back() -> None:
    for name, original in _originals.items():
        if name.startswith("torch."):
            for place in (torch, torch.random):
                setattr(place, name.removeprefix("torch."), original)
        elif name.startswith("math."):
            setattr(math, name.removeprefix("math."), original)
        elif original is None:
            delattr(Tensor, name)
        else:
            setattr(Tensor, name, original)
    _originals.clear()


def _without_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        listed = [x for arg in args if isinstance(arg, list | tuple) for x in arg]
        for each in (*args, *kwargs.values(), *listed):
            if isinstance(each, Number):
                each.refuse(f"given to math.{function.__name__}")
        return function(*args, **kwargs)

    return compute


def _number(name: str) -> Callable[..., Any]:
    original: Any = getattr(Tensor, name)

    def read(self: Tensor) -> Any:
        recorder: Any = current_recorder()
        caller = sys._getframe(1).f_code.co_filename
        if recorder is None or (is_installed(caller) and not self.is_floating_point()):
            return original(self)
        whole: Any = self.full_tensor() if hasattr(self, "full_tensor") else self
        if whole.numel() != 1:
            return original(self)
        return recorder.number_of(whole.detach().reshape(()))

    return read


def decides_itself(file: str) -> bool:
    """True for code of an installed package, except torch's optimizers.

    Packages may branch on values. Optimizers branch on step counts, which change in each call.
    """
    return is_installed(file) and not file.startswith(torch.optim.__path__[0])


#: torch's dispatcher does not show it.
_as_subclass: Any = Tensor.as_subclass


def _shared(self: Tensor, kind: Any) -> Any:
    result = _as_subclass(self, kind)
    recorder: Any = current_recorder()
    if recorder is not None:
        recorder.share(result, self)
    return result


def is_installed(file: str) -> bool:
    """True for code of an installed package, which may read values while a step is recorded."""
    return in_library[file] or "site-packages" in file


def _refused(name: str) -> Callable[..., Any]:
    original: Any = getattr(Tensor, name)
    what = _READS.get(name, "")

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = current_recorder()
        if recorder is None:
            return original(self, *args, **kwargs)
        if is_installed(sys._getframe(1).f_code.co_filename):
            if name in _DECISIONS:
                return recorder.decided(original, self)
            return original(self, *args, **kwargs)
        raise CaptureError(
            f"the step {what} at {call_site()}, which a recorded program cannot repeat: it runs no "
            f"Python, and would use the value of this recording each time. Compute with tensors "
            f"(torch.where instead of a branch), or return the tensor and do this after the call"
        )

    return read
