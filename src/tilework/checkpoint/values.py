"""Values that are not tensors, as exact JSON; the key ``$`` names a kind that JSON lacks."""

from __future__ import annotations

import base64
import importlib
import math
import sys
from typing import Any

#: The largest integer that every reader of JSON reads exactly.
_EXACT = 1 << 53
KIND = "$"
_PLAIN = {type(None), bool, int, float, str}


def encode_value(value: Any, where: str) -> Any:
    """The value as JSON that :func:`decode_value` turns back; else a TypeError about ``where``."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # for a member of an enum, the string itself
    if isinstance(value, int):
        return int(value) if abs(value) < _EXACT else _of_kind("int", _digits(int(value), where))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _of_kind("float", repr(float(value)))
    if isinstance(value, bytes | bytearray | memoryview):
        return _of_kind("bytes", base64.b64encode(value).decode())
    if is_plain_sequence(value):
        values = [encode_value(each, where) for each in value]
        return values if isinstance(value, list) else _of_kind("tuple", values)
    return _encode_rare(value, where)


def _digits(value: int, where: str) -> str:
    try:
        return str(value)
    except ValueError as error:
        raise TypeError(
            f"{where} is an integer of {value.bit_length():,} bits, too long for the digits to be "
            f"read again ({error}): save the bytes"
        ) from None


def is_plain_sequence(value: Any) -> bool:
    """True for a list or tuple of numbers, strings, bools and None, which counts as one value."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_plain, value))


def _is_plain(value: Any) -> bool:
    """True for None, bools, ints, floats, strings, and numpy scalars of these kinds."""
    if type(value) in _PLAIN:
        return True
    if isinstance(value, int | float | str):
        return True
    return _is_numpy_scalar(value) and isinstance(value.item(), int | float | str)


def _of_kind(kind: str, value: Any) -> dict[str, Any]:
    return {KIND: kind, "v": value}


def _encode_rare(value: Any, where: str) -> Any:
    if isinstance(value, complex):
        return _of_kind("complex", [repr(value.real), repr(value.imag)])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype):
        return _of_kind("dtype", str(value).removeprefix("torch."))
    if torch is not None and isinstance(value, torch.device):
        return _of_kind("device", str(value))
    if _is_numpy_scalar(value) and not _is_numpy_scalar(item := value.item()):
        return encode_value(item, where)
    raise TypeError(
        f"{where} is of type {type(value).__name__}, which a checkpoint does not hold. It holds "
        f"tensors, numbers, strings, bytes, None, dicts, lists, tuples, sets of these, and objects "
        f"with state_dict() and load_state_dict()"
    )


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def decode_value(listed: Any) -> Any:
    """The value that :func:`encode_value` encoded. Raises ValueError for any other JSON."""
    if isinstance(listed, list):
        return [decode_value(each) for each in listed]
    if not isinstance(listed, dict):
        return listed
    kind, value = listed.get(KIND), listed.get("v")
    decode = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decode is None:
        raise ValueError(f"values of kind {kind!r} are not known")
    try:
        return decode(value)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise ValueError(f"{value!r:.60} is not a value of kind {kind!r}: {error}") from None


def value_text(listed: Any) -> str:
    """The text that Python shows for a value that :func:`encode_value` encoded; without torch."""
    if isinstance(listed, list):
        return f"[{', '.join(map(value_text, listed))}]"
    kind, value = (listed.get(KIND), listed.get("v")) if isinstance(listed, dict) else (None, None)
    if kind == "dtype":
        return f"torch.{value}"
    if kind == "device":
        kind, _, number = str(value).partition(":")
        return f"device(type={kind!r}{f', index={number}' if number else ''})"
    if kind == "tuple" and isinstance(value, list):
        texts = [value_text(each) for each in value]
        return f"({', '.join(texts)}{',' * (len(texts) == 1)})"
    return repr(decode_value(listed))


def _torch() -> Any:
    """torch, imported only for values of its types."""
    return importlib.import_module("torch")


def _dtype(name: str) -> Any:
    torch = _torch()
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


_DECODERS: dict[str, Any] = {
    "int": int,
    "float": float,
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "dtype": _dtype,
    "device": lambda text: _torch().device(text),
    "tuple": lambda values: tuple(map(decode_value, values)),
}
