"""Values that only a real run has: numbers that stand for them, and errors where Python needs more.

``item()`` of a float gives an :class:`UnknownNumber`, which computes and prints, and on which no
program can branch. The methods of ``torch.Tensor`` are replaced while a rank is pretended.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilework.capture.program.number import Number, NumberBook, with_numbers
from tilework.comm.per_call.internal import call_site, current_pretence
from tilework.dtensor import DTensor
from tilework.errors import PretendError

#: Methods that need the values themselves.
_READS = {
    "tolist": "makes a list of a tensor",
    "numpy": "makes a numpy array of a tensor",
    "__array__": "makes a numpy array of a tensor",
    "__bool__": "branches on a tensor",
    "__int__": "makes an integer of a tensor",
    "__index__": "uses a tensor as an index",
    "__complex__": "makes a number of a tensor",
    "__dlpack__": "hands a tensor to another library",
}
#: The folder of tilework, whose code knows of tensors without memory.
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_KINDS = (Tensor, torch.nn.Parameter, DTensor)
_NUMBERS = ("item", "__float__")
_TEXTS = ("__repr__", "__format__")
#: Facts about the device, as the program would see them on a real rank.
_DEVICE = {"is_meta": False, "is_cpu": True, "is_cuda": False}


def refuse(what: str) -> NoReturn:
    """Raise a PretendError: the program, at the line that calls, needs a value."""
    raise PretendError(
        f"the program {what} at {call_site()}, and the value is only known in a real run: a "
        f"pretended rank has tensors without elements. Leave this out of the part that is planned "
        f"(for example by an option of the program)"
    )


class UnknownNumber(Number):
    """A float that only a real run has. It computes, prints as nan, and decides nothing."""

    def _decides(self, function: Callable[..., Any], *inputs: Any) -> NoReturn:
        refuse(f"branches on a number from a tensor ({getattr(function, '__name__', function)})")

    def given_to(self, function: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return super().given_to(function, *inputs)
        except (ValueError, OverflowError):  # an integer of it
            self._decides(function)

    def refuse(self, how: str) -> NoReturn:
        refuse(f"has a number from a tensor {how}")

    def __hash__(self) -> int:
        return self.tag

    def __repr__(self) -> str:
        return "nan"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(math.nan, spec)

    def __float__(self) -> float:
        return self

    def __reduce__(self) -> Any:
        return float, ("nan",)


def unknown_number() -> UnknownNumber:
    """A new number that only a real run has."""
    return UnknownNumber(math.nan, None, (), NumberBook())


def is_unknown(value: Any) -> bool:
    """True for a number that came from a tensor without values, also after a way through C."""
    return isinstance(value, float) and value != value


def lacks_values(tensor: Tensor) -> bool:
    """True if the elements are only known in a real run."""
    pretence = current_pretence()
    whole: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return pretence is not None and not pretence.has_values(whole)


#: The number of operators that run: torch's own code for tensors on meta must see where they are.
_plain_truth = 0


def truthful(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of ``function``, in which tensors say that they have no memory."""
    global _plain_truth
    _plain_truth += 1
    try:
        # Some of torch's code for them is Python, which must see plain tensors.
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    finally:
        _plain_truth -= 1


@contextmanager
def replaced(device: torch.device) -> Iterator[None]:
    """Within the block, tensors without values answer as on ``device``, or raise.

    For one block at a time in a process.
    """
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, made: Any) -> None:
        kept.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, made)

    for name in (*_READS, *_NUMBERS, *_TEXTS):
        put(Tensor, name, _method(name, getattr(Tensor, name)))
    for name, value in {"device": device, **_DEVICE}.items():
        if name == f"is_{device.type}":
            value = True
        elif name == "is_cpu":
            value = device.type == "cpu"
        put(Tensor, name, _attribute(name, getattr(torch._C.TensorBase, name), value))
        put(DTensor, name, _attribute(name, getattr(DTensor, name), value))
    put(torch.autocast, "__enter__", _without_autocast(torch.autocast.__enter__))
    for name in ("tensor", "as_tensor"):
        put(torch, name, _maker(getattr(torch, name)))
    for name, function in list(vars(math).items()):
        if callable(function) and name[0] != "_":
            put(math, name, with_numbers(function))
    try:
        yield
    finally:
        for owner, name, original in reversed(kept):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _method(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not lacks_values(self):
            return original(self, *args, **kwargs)
        if name in _TEXTS:
            shape = "x".join(map(str, self.shape)) or "scalar"
            return f"tensor({shape}, {self.dtype}, pretended)"
        if name in _NUMBERS and self.is_floating_point() and self.numel() == 1:
            return unknown_number()
        refuse(_READS.get(name, f"calls {name}() of a tensor"))

    return read


class _Claim(property):
    """A property with a name, by which DTensors find what to answer."""

    def __init__(self, read: Callable[[Any], Any], name: str) -> None:
        super().__init__(read)
        self.__name__ = name


def _attribute(name: str, original: Any, value: Any) -> property:
    """A property that tells code outside of tilework that a tensor is on the job's device."""
    is_meta: Any = vars(torch._C.TensorBase)["is_meta"].__get__

    def read(self: Tensor) -> Any:
        found = original.__get__(self)
        if found is value or _plain_truth or type(self) not in _KINDS or not is_meta(self):
            return found
        caller = sys._getframe(1).f_code.co_filename
        return found if caller.startswith(_OWN) else value

    return _Claim(read, name)


def _without_autocast(original: Any) -> Any:
    @functools.wraps(original)
    def enter(self: Any) -> Any:
        if self._enabled:
            raise PretendError(
                f"torch.autocast at {call_site()} leaves tensors without memory as they are: "
                f"cast the model for a plan, or pass enabled=False"
            )
        return original(self)

    return enter


def _maker(original: Any) -> Any:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, Number):
            return original(data, *args, **kwargs)
        kwargs["device"] = "meta"
        kwargs.setdefault("dtype", torch.get_default_dtype())
        return torch.empty((), *args, **kwargs)

    return make
