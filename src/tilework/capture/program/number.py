"""Numbers of a program that are not known when the program is made.

``item()`` of a tensor and the options of an optimizer are numbers which change from call to call.
While a step is recorded a :class:`Number` stands for each. Python arithmetic on it makes an
expression. An operator of torch recognises it: as a float it is a *signaling* NaN with a tag, whose
bits reach torch's dispatcher unchanged, while arithmetic outside of Python's operators (an ``exp``
imported from ``math``, numpy) makes a *quiet* NaN, which the recorder refuses.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from tilework.comm.per_call.internal import call_site, in_library
from tilework.errors import CaptureError

T = TypeVar("T")
_SIGNALING = 0x7FF0 << 48
_SIGN = 1 << 63
_QUIET = 1 << 51


@dataclass
class NumberBook:
    """The numbers that were made while one step is recorded."""

    #: By tag minus one. They stay, as autograd keeps operators' floats for the backward pass.
    numbers: list[Number] = field(default_factory=list)
    #: The recorder; None: numbers from tensors are not compared.
    recorder: Any = None
    #: Comparisons of options of optimizers, and their results.
    guards: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = field(default_factory=list)

    def guards_once(self) -> list[tuple[Callable[..., Any], tuple[Any, ...], Any]]:
        """The comparisons, each once. A comparison of Numbers would add to them."""
        found = {}
        for guard in self.guards:
            inputs = [id(x) if isinstance(x, Number) else repr(x) for x in guard[1]]
            found[(guard[0], *inputs)] = guard
        return list(found.values())

    def find(self, value: float) -> Number | float:
        """The Number that a tagged NaN stands for; other floats unchanged; computed NaNs raise."""
        if value == value:
            return value
        bits: int = struct.unpack("<Q", struct.pack("<d", value))[0]
        tag = bits & (_QUIET - 1)
        is_lost = not isinstance(value, float) and bool(self.numbers)  # numpy drops the tag
        if not is_lost and not 0 < tag <= len(self.numbers):
            return value
        if is_lost or bits & _QUIET:
            raise NumberError(
                f"an operator at {call_site()} takes a number that a function such as numpy's "
                f"computed from item() or an option of an optimizer: a program would keep "
                f"it as it is now. Compute it with torch's operators, from the tensor"
            )
        number = self.numbers[tag - 1]
        return -number if bits & _SIGN else number


class NumberError(CaptureError):
    """Python does something with a Number that a program cannot repeat."""


class WrongNumberError(NumberError):
    """A record with Numbers gives another result than the step, which has run with ``result``."""

    def __init__(self, wrong: str, result: Any) -> None:
        super().__init__(
            f"a record gave another {wrong} than the step, since torch's C++ or another library "
            f"decides by a number that comes from item() or that varies from call to call. The "
            f"results of this call are the step's. Leave that part out, or use a tensor"
        )
        self.result = result


def is_installed(file: str) -> bool:
    """True for code of an installed package, which may read values while a step is recorded."""
    return in_library[file] or "site-packages" in file


def is_float(value: Any) -> bool:
    """True for a float of Python or of numpy."""
    kind = type(value)
    is_numpys = kind.__module__ == "numpy" and kind.__name__.startswith("float")
    return isinstance(value, float) or is_numpys


class Arithmetic:
    """The operators of a float, which a class answers by the first four methods."""

    value: float
    #: The result of arithmetic, and that of a comparison; NotImplemented with other things.
    _made: Callable[..., Any]
    _compared: Callable[..., bool]
    #: A plain value that Python makes of the number.
    _decides: Callable[..., Any]
    #: Raises an error that says what Python does with the number, and where.
    refuse: Callable[..., NoReturn]

    def given_to(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """The result of a function of ``math``: a number, or a value that decides."""
        values = [each.value if isinstance(each, Arithmetic) else each for each in inputs]
        is_number = type(function(*values)) is float
        return (self._made if is_number else self._decides)(function, *inputs)

    def __neg__(self) -> Any:
        return self._made(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._made(operator.abs, self)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0.0)

    def __int__(self) -> Any:
        return self._decides(int, self)

    __trunc__ = __int__

    def __index__(self) -> int:
        self.refuse("used as an index")

    def __floor__(self) -> int:
        return int(self._decides(math.floor, self))

    def __ceil__(self) -> int:
        return int(self._decides(math.ceil, self))

    def __round__(self, ndigits: Any = None) -> Any:
        return self._decides(round, self) if ndigits is None else self._made(round, self, ndigits)

    def is_integer(self) -> Any:
        return self._decides(float.is_integer, self)

    def as_integer_ratio(self) -> tuple[int, int]:
        self.refuse("made a ratio of integers")

    def hex(self) -> str:
        self.refuse("printed")

    def conjugate(self) -> Any:
        return self

    real = property(conjugate)

    def __divmod__(self, other: Any) -> Any:
        self.refuse("given to divmod()")

    __rdivmod__ = __divmod__


class Number(Arithmetic, float):
    """A number of a program that is only known when the program runs.

    Args:
        function: Computes the number from ``inputs`` when the program runs; None: the program sets
            the number before the call, and comparisons become guards.
        inputs: The arguments of ``function``: Numbers, Python numbers and values of the program.
    """

    function: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    book: NumberBook
    tag: int
    #: True if the number is known before the program runs.
    is_option: bool

    def __new__(
        cls,
        value: float,
        function: Callable[..., Any] | None,
        inputs: Sequence[Any],
        book: NumberBook,
    ) -> Number:
        tag = len(book.numbers) + 1
        self = float.__new__(cls, _float_of(_SIGNALING | tag))
        self.tag = tag
        self.value, self.function, self.inputs, self.book = value, function, tuple(inputs), book
        numbers = [each for each in inputs if isinstance(each, Number)]
        self.is_option = function is None or (
            bool(numbers) and all(each.is_option for each in numbers)
        )
        book.numbers.append(self)
        return self

    def _made(self, function: Callable[..., Any], *inputs: Any) -> Any:
        for each in inputs:
            if not isinstance(each, int | float) and not is_float(each):
                return NotImplemented
        inputs = tuple([self.book.find(x) if type(x) is float else x for x in inputs])
        value = function(*[each.value if isinstance(each, Number) else each for each in inputs])
        return type(self)(value, function, inputs, self.book)

    def _compared(self, function: Callable[..., bool], other: Any) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented  # type: ignore[no-any-return]
        return self._decides(function, self, other)

    def _decides(self, function: Callable[..., T], *inputs: Any) -> T:
        """A plain value that Python makes of the number: later calls must find the same."""
        result = function(*[each.value if isinstance(each, Number) else each for each in inputs])
        if all(each.is_option for each in inputs if isinstance(each, Number)):
            self.book.guards.append((function, inputs, result))
        elif self.book.recorder is None:
            self.refuse("read after the step")
        else:
            self.book.recorder.expect(function, inputs, result)
        return result

    def refuse(self, how: str) -> NoReturn:
        """Raise a CaptureError that says what Python does with the number, and where."""
        raise NumberError(
            f"a number that comes from a tensor (item()), or that varies from call to call, is "
            f"{how} in Python, at {call_site()}: a program has no Python, so a text or a number "
            f"made of the value would stay as it is now. Return the number, or the tensor, and do "
            f"this after the call"
        )

    def __hash__(self) -> int:
        if not is_installed(sys._getframe(1).f_code.co_filename):
            self.refuse("looked up in a dict, set or cache")
        return hash(self.value)

    def __float__(self) -> float:
        if in_library[sys._getframe(1).f_code.co_filename]:  # a library hands it on to operators
            return _float_of(_SIGNALING | self.tag)
        self.refuse("made a plain number")

    def __repr__(self) -> str:
        if is_installed(sys._getframe(1).f_code.co_filename):
            return repr(self.value)
        if self.is_option:
            return self._decides(repr, self)
        self.refuse("printed")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.is_option:
            return self._decides(format, self, spec)
        self.refuse("printed")

    def __reduce__(self) -> NoReturn:
        self.refuse("copied or pickled")


def _arithmetic(function: Callable[..., Any], is_swapped: bool) -> Callable[..., Any]:
    def method(self: Arithmetic, other: Any, mod: None = None) -> Any:
        return self._made(function, *((other, self) if is_swapped else (self, other)))

    return method


def _comparison(function: Callable[..., bool]) -> Callable[..., bool]:
    return lambda self, other: self._compared(function, other)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Arithmetic, f"__{_name}__", _arithmetic(getattr(operator, _name), False))
    setattr(Arithmetic, f"__r{_name}__", _arithmetic(getattr(operator, _name), True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Arithmetic, f"__{_name}__", _comparison(getattr(operator, _name)))


def with_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``math`` that takes Numbers, too."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        listed = [x for arg in args if isinstance(arg, list | tuple) for x in arg]
        for each in (*kwargs.values(), *listed):
            if isinstance(each, Arithmetic):
                each.refuse(f"given to math.{function.__name__} in a list or by keyword")
        number = next((each for each in args if isinstance(each, Arithmetic)), None)
        return function(*args, **kwargs) if number is None else number.given_to(function, *args)

    return compute


def value_of(number: Any) -> Any:
    """The float that a Number is in the recorded call; other objects unchanged."""
    return float(number.value) if isinstance(number, Number) else number


def _float_of(bits: int) -> float:
    result: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    assert math.isnan(result)
    return result
