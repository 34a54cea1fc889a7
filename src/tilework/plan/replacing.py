"""Replacements in torch and ``math`` while a rank is pretended, for tensors without values."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from tilework.capture.program.number import with_numbers
from tilework.comm.per_call.internal import call_site, lacks_memory
from tilework.dtensor import DTensor
from tilework.errors import PretendError
from tilework.plan.autocast import autocast_entered, autocast_left
from tilework.plan.unknown import (
    Decisions,
    UnknownNumber,
    decided,
    float_in,
    has_unknown,
    is_unknown,
    lacks_values,
    of_text,
    refuse,
    with_nan,
    with_objects,
)

#: Methods that need the values themselves.
_READS = {
    "numpy": "makes a numpy array of a tensor",
    "__array__": "makes a numpy array of a tensor",
    "__int__": "makes an integer of a tensor",
    "__index__": "uses a tensor as an index",
    "__complex__": "makes a number of a tensor",
    "__dlpack__": "hands a tensor to another library",
}
_ANSWERS = ("item", "__float__", "__bool__", "tolist", "__repr__", "__format__")
#: The classes of functions of Python, of ``math``, and of numpy.
_FUNCTIONS = ("function", "builtin_function_or_method", "_ArrayFunctionDispatcher")
#: The folder of tilework, whose code knows of tensors without memory.
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_KINDS = (Tensor, torch.nn.Parameter, DTensor)
#: Facts about the device, as the program would see them on a real rank.
_DEVICE = {"is_meta": False, "is_cpu": True, "is_cuda": False}
_GROUPED = "_group_tensors_by_device_and_dtype"
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


def is_truthful(frame: Any) -> bool:
    """True for code of tilework, and within :func:`truthful`: it sees where tensors are."""
    while frame.f_code.co_name == "__torch_function__":  # modes between the caller and torch
        frame = frame.f_back
    return _plain_truth > 0 or frame.f_code.co_filename.startswith(_OWN)


@contextmanager
def replaced(device: torch.device, decisions: Decisions) -> Iterator[None]:
    """Within the block, tensors without values answer as on ``device``, or raise.

    For one block at a time in a process.
    """
    kept: list[tuple[Any, str, Any]] = []

    def put(owner: Any, name: str, made: Any) -> None:
        kept.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, made)

    for name in (*_READS, *_ANSWERS):
        put(Tensor, name, _method(name, getattr(Tensor, name)))
    for name, value in {"device": device, **_DEVICE}.items():
        if name == f"is_{device.type}":
            value = True
        elif name == "is_cpu":
            value = device.type == "cpu"
        put(Tensor, name, _attribute(name, getattr(torch._C.TensorBase, name), value))
        put(DTensor, name, _attribute(name, getattr(DTensor, name), value))
    put(torch._C, _GROUPED, _grouped(getattr(torch._C, _GROUPED), device))
    put(torch.autocast, "__enter__", autocast_entered(torch.autocast.__enter__, device))
    put(torch.autocast, "__exit__", autocast_left(torch.autocast.__exit__))
    put(DataLoader, "_get_iterator", _iterator(DataLoader._get_iterator))
    put(torch.distributed, "init_process_group", _without_torch)
    put(json.JSONEncoder, "iterencode", _written(json.JSONEncoder.iterencode))
    put(json.JSONDecoder, "decode", _read(json.JSONDecoder.decode))
    for name in ("tensor", "as_tensor"):
        put(torch, name, _maker(getattr(torch, name)))
    with decisions.in_use(), torch.serialization.safe_globals([UnknownNumber]):
        try:
            yield
        finally:
            for owner, name, original in reversed(kept):
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


@contextmanager
def math_with_numbers() -> Iterator[None]:
    """Within the block, functions of ``math`` and numpy take unknown numbers, wherever they were
    imported.
    """
    functions = {value: _computing(value) for value in vars(math).values() if _is_function(value)}
    numpy: Any = sys.modules.get("numpy")
    names = {} if numpy is None else vars(numpy)
    functions |= {value: with_objects(value) for value in names.values() if _is_function(value)}
    found = [
        (scope, key, value)
        for scope in [vars(module) for module in list(sys.modules.values())]
        for key, value in list(scope.items())
        if _is_function(value) and value in functions
    ]
    for scope, key, value in found:
        scope[key] = functions[value]
    try:
        with contextlib.nullcontext() if numpy is None else numpy.errstate(invalid="ignore"):
            yield
    finally:
        for scope, key, value in found:
            scope[key] = value


def _computing(function: Any) -> Any:
    """A function of ``math`` that takes unknown numbers, and tensors of them."""
    compute = with_numbers(function)

    @functools.wraps(function)
    def numbered(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, list | tuple) and has_unknown(x) for x in args):  # fsum, prod, dist
            return UnknownNumber()
        return compute(*[x.item() if isinstance(x, Tensor) else x for x in args], **kwargs)

    return numbered


def _is_function(value: object) -> bool:
    return type(value).__name__ in _FUNCTIONS


def _method(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not lacks_values(self) or lacks_memory(self):
            found = original(self, *args, **kwargs)
            return UnknownNumber() if is_unknown(found) else found
        if name in ("__repr__", "__format__"):
            return _text(self, *args)
        if name == "tolist":
            return _nested(list(self.shape))
        if name in _READS or self.numel() != 1 or self.is_complex():
            refuse(_READS.get(name, f"calls {name}() of a tensor"))
        if name == "__bool__":
            return decided()
        return UnknownNumber() if name == "item" else float_in(sys._getframe(1))

    return read


def _text(tensor: Tensor, spec: str = "") -> str:
    if spec:
        return format(UnknownNumber(), spec)
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"tensor({shape}, {tensor.dtype}, pretended)"


def _nested(shape: list[int]) -> Any:
    return [_nested(shape[1:]) for _ in range(shape[0])] if shape else UnknownNumber()


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
        if found is value or type(self) not in _KINDS or not is_meta(self):
            return found
        return found if is_truthful(sys._getframe(1)) or lacks_memory(self) else value

    return _Claim(read, name)


def _grouped(original: Any, device: torch.device) -> Any:
    @functools.wraps(original)
    def group(*args: Any) -> Any:
        """Lists of tensors by device and dtype, as optimizers ask for, by the job's device."""
        found = original(*args)
        return {(device if at.type == "meta" else at, of): x for (at, of), x in found.items()}

    return group


def _maker(original: Any) -> Any:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, UnknownNumber):
            kwargs["device"] = torch.device("meta")
            kwargs.setdefault("dtype", torch.get_default_dtype())
            return torch.empty((), *args, **kwargs)
        made = original(with_nan(data), *args, **kwargs)
        holds = not made.is_meta and made.is_floating_point() and made.isnan().any().item()
        return torch.empty_like(made) if holds else made  # some of the numbers are unknown

    return make


def _written(original: Any) -> Any:
    @functools.wraps(original)
    def encode(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, tree_map_only(UnknownNumber, str, value), *args, **kwargs)

    return encode


def _read(original: Any) -> Any:
    @functools.wraps(original)
    def decode(*args: Any, **kwargs: Any) -> Any:
        return tree_map_only(str, of_text, original(*args, **kwargs))

    return decode


def _without_torch(*args: Any, **kwargs: Any) -> NoReturn:
    raise PretendError(
        f"torch.distributed.init_process_group at {call_site()} waits for ranks that do not run: "
        f"import tilework.distributed, which has the same functions, for a plan"
    )


def _iterator(original: Any) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        """Batches come from this process, which knows which tensors have values."""
        kept = {name: vars(self)[name] for name in ("num_workers", "timeout")}
        vars(self).update(num_workers=0, timeout=0)
        try:
            return original(self)
        finally:
            vars(self).update(kept)

    return iterate
