"""Reads of tensors' values by Python while a step is recorded: numbers, or errors.

``item()`` of a float gives a :class:`~tilework.capture.program.number.Number`. Branches on
values become conditions of the record. Other reads (numpy, lists, prints) would silently leave
current values in the program: they raise, naming the line. The methods of ``torch.Tensor`` and the
functions of ``math`` are replaced while any thread of the process records.
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

from tilework.capture.program.number import Number, is_installed, with_numbers
from tilework.comm.per_call.internal import call_site, current_recorder, recorded
from tilework.errors import CaptureError

#: Methods that read values, with a description for errors.
_READS = {
    "tolist": "makes a list of a tensor",
    "numpy": "makes a numpy array of a tensor",
    "__array__": "makes a numpy array of a tensor",
    "__bool__": "",
    "__int__": "",
    "__index__": "",
    "__complex__": "makes a Python number of a tensor",
    "__repr__": "prints the value of a tensor",
    "__format__": "prints the value of a tensor",
    "__dlpack__": "hands a tensor to another library",
}
#: Reads on which libraries branch, and which torch's dispatcher does not show faithfully.
_DECISIONS = ("tolist", "__bool__", "__int__", "__index__")
#: Those among them on which the user's code may branch.
_BRANCHES = ("__bool__", "__int__", "__index__")
_NUMBERS = ("item", "__float__")
#: Methods that make a tensor of another's memory, which torch's dispatcher does not show.
_SHARING = ("as_subclass", "_make_subclass")
#: Functions of the default generator's state, used by recomputed layers.
_STATES = ("get_rng_state", "set_rng_state", "manual_seed")
#: Functions that make a tensor of a number.
_MAKERS = ("tensor", "as_tensor")
#: Functions in C, which would compute with the NaN that a Number is to them.
_MATH = [name for name, value in vars(math).items() if callable(value) and name[0] != "_"]
_lock = threading.Lock()
_users = 0
#: The blocks in which compiled functions run as they are, and what puts the stance back.
_uncompiled = 0
_stance: Any = None
#: The replaced functions: owner, name, function.
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within the block, functions of torch.compile run as they are: compilers hide operators."""
    global _uncompiled, _stance
    with _lock:
        if not _uncompiled and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")  # of the whole process
        _uncompiled += 1
    try:
        yield
    finally:
        with _lock:
            _uncompiled -= 1
            if not _uncompiled and _stance is not None:
                _stance.__exit__(None, None, None)
                _stance = None


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
        made = recorded(getattr(torch.random, name))
        _set(torch, name, made)
        _set(torch.random, name, made)
    for name in _MAKERS:
        _set(torch, name, _of_numbers(getattr(torch, name)))
    for name in _MATH:
        _set(math, name, with_numbers(getattr(math, name)))
    for names, made_for in ((_READS, _refused), (_NUMBERS, _number), (_SHARING, _shared)):
        for name in names:
            _set(Tensor, name, functools.wraps(getattr(Tensor, name))(made_for(name)))


def _set(owner: Any, name: str, made: Callable[..., Any]) -> None:
    _originals.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, made)


def _put_back() -> None:
    for owner, name, original in _originals:
        if original is None:  # a base has it
            delattr(owner, name)
        else:
            setattr(owner, name, original)
    _originals.clear()


def _of_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Number):
            return original(data, *args, **kwargs)
        kwargs.setdefault("dtype", torch.get_default_dtype())
        return torch.full((), data, *args, **kwargs)

    return make


def _number(name: str) -> Callable[..., Any]:
    original: Any = getattr(Tensor, name)

    def read(self: Tensor) -> Any:
        recorder: Any = current_recorder()
        if recorder is None or not self.is_floating_point():
            return original(self)
        whole: Any = self.full_tensor() if hasattr(self, "full_tensor") else self
        if whole.numel() != 1:
            return original(self)
        return recorder.number_of(whole.detach().reshape(()))

    return read


def _shared(name: str) -> Callable[..., Any]:
    original: Any = getattr(Tensor, name)

    def make(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        recorder: Any = current_recorder()
        if recorder is not None:
            recorder.share(result, next(each for each in args if isinstance(each, Tensor)))
        return result

    return make


def _refused(name: str) -> Callable[..., Any]:
    original: Any = getattr(Tensor, name)
    what = _READS.get(name, "")

    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = current_recorder()
        if recorder is None:
            return original(self, *args, **kwargs)
        is_library = is_installed(sys._getframe(1).f_code.co_filename)
        if name in _DECISIONS if is_library else name in _BRANCHES:
            return recorder.decided(original, self)
        if is_library:
            return original(self, *args, **kwargs)
        raise CaptureError(
            f"the step {what} at {call_site()}, which a recorded program cannot repeat: it runs no "
            f"Python, and would use the value of this recording each time. Return the tensor, and "
            f"do this after the call"
        )

    return read
