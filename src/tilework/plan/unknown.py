"""Values that only a real run has: numbers that stand for them, and the ways that programs branch.

``item()`` gives an :class:`UnknownNumber`, which computes and prints. It is finite. Each other
question to it is answered by the job's :class:`Decisions`.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor

from tilework.capture.program.number import Number, NumberBook
from tilework.comm.per_call.internal import call_site, current_pretence
from tilework.errors import PretendError

#: The most answers at one line, no and yes: a loop that ends by a value never ends here.
_MOST_ANSWERS = 10_000, 1000
#: Functions of ``math`` as they are before :func:`~tilework.plan.replacing.math_with_numbers`.
_MATH = {name: value for name, value in vars(math).items() if callable(value)}
_is_nan = math.isnan
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=", "ne": "<>"}
#: The answers of ``math`` about numbers that are finite.
_FINITE: dict[Any, bool] = {math.isnan: False, math.isinf: False, math.isfinite: True}


def refuse(what: str) -> NoReturn:
    """Raise a PretendError: the program, at the line that calls, needs a value."""
    raise PretendError(
        f"the program {what} at {call_site()}, and the value is only known in a real run: a "
        f"pretended rank has tensors without elements. Leave this out of the part that is planned "
        f"(for example by an option of the program)"
    )


class RunAgain(BaseException):
    """The run is void: from now on, one more file's ``float`` keeps unknown numbers."""


@dataclass(eq=False)
class Decisions:
    """The answers to what programs ask about values: no, but at some lines."""

    #: The line at which the answer is the other; "": at none.
    flipped: str = ""
    #: The lines at which the answer is yes, since the program raises an error after no.
    yes: set[str] = field(default_factory=set)
    #: By line: the first rank that asked there; and the line that asked last.
    asked: dict[str, int] = field(default_factory=dict)
    last: str = ""
    #: The globals of files in which ``float`` keeps unknown numbers.
    scopes: list[dict[str, Any]] = field(default_factory=list)
    _times: Counter[str] = field(default_factory=Counter)

    def answer(self) -> bool:
        """The answer to a question of the line that runs."""
        site, pretence = call_site(), current_pretence()
        self._times[site] += 1
        self.last, yes = site, (site in self.yes) != (site == self.flipped)
        if self._times[site] > _MOST_ANSWERS[yes]:
            refuse(f"asks {self._times[site]:,} times for a value (a loop without another end?)")
        self.asked.setdefault(site, 0 if pretence is None else pretence.rank)
        return yes

    def other(self, site: str) -> Decisions:
        """The same answers, but at one line."""
        return Decisions(site, self.yes, scopes=self.scopes)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, these are the answers. For one block at a time in a process."""
        global _decisions
        before, _decisions = _decisions, self
        self._times.clear()
        self.last = ""
        for scope in self.scopes:
            scope["float"] = _KeptFloat
        try:
            yield
        finally:
            _decisions = before
            for scope in self.scopes:
                scope.pop("float", None)


_decisions = Decisions()


def decided() -> bool:
    """The answer to a question about a value."""
    return _decisions.answer()


class UnknownNumber(Number):
    """A finite number that only a real run has. It computes, and prints as nan."""

    def _compared(self, function: Callable[..., bool], other: Any) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented  # type: ignore[no-any-return]
        known = vars(self).setdefault("known", {})
        key = id(other) if isinstance(other, Number) else other
        possible = known.get(key, "<=>")
        if other is self:
            possible = "="
        elif not isinstance(other, Number) and abs(other) == math.inf:
            possible = "<" if other > 0 else ">"
        signs = _SIGNS[function.__name__]
        yes = possible[0] in signs
        if any((sign in signs) != yes for sign in possible):
            yes = decided()
        known[key] = "".join(sign for sign in possible if (sign in signs) == yes)
        return yes

    def _decides(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if function in _FINITE:
            return _FINITE[function]
        if function in (float.is_integer, _MATH["isclose"]):
            return decided()
        refuse(f"makes a whole number of a number from a tensor ({function.__name__})")

    def given_to(self, function: Callable[..., Any], *inputs: Any) -> Any:
        try:
            return super().given_to(function, *inputs)
        except (ValueError, OverflowError):  # an integer of it
            self._decides(function)

    def refuse(self, how: str) -> NoReturn:
        refuse(f"has a number from a tensor {how}")

    def __hash__(self) -> int:
        return id(self)

    def __getattr__(self, name: str) -> Any:
        """A function of ``math``, as numpy calls it for objects: ``numpy.exp`` calls ``exp()``."""
        if name not in _MATH:
            raise AttributeError(f"a number has no attribute {name!r}")
        return partial(self.given_to, _MATH[name], self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Numpy computes with the number as with other objects of Python."""
        if ufunc.__name__ in _MATH and len(inputs) == 1 and method == "__call__":
            return self.given_to(_MATH[ufunc.__name__], self)
        return getattr(ufunc, method)(*map(as_object, inputs), **options)

    def __repr__(self) -> str:
        return _Text("nan")

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return _Text(format(math.nan, spec.replace("d", "f")))

    def __float__(self) -> float:
        return float_in(sys._getframe(1))

    def __reduce__(self) -> Any:
        return unknown_number, ()


class _Text(str):
    """A text of an unknown number, of which ``float()`` makes an unknown number."""

    __slots__ = ()

    def __float__(self) -> float:
        return float_in(sys._getframe(1))


def as_object(value: Any) -> Any:
    """An unknown number, or a list with such, as an array of objects for numpy; else ``value``."""
    make = inspect.unwrap(sys.modules["numpy"].array)
    return make(value, dtype=object) if _has_unknown(value) else value


def _has_unknown(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_unknown, value))
    return isinstance(value, UnknownNumber)


def with_objects(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy that keeps unknown numbers as they are, in arrays of objects."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(map(_has_unknown, (*args, *kwargs.values()))):
            kwargs.pop("dtype", None)
            args = tuple(map(as_object, args))
            kwargs = {name: as_object(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return compute


def unknown_number() -> UnknownNumber:
    """A new number that only a real run has."""
    return UnknownNumber(math.nan, None, (), NumberBook())


def is_unknown(value: Any) -> bool:
    """True for a number that came from a tensor without values, also after a way through C."""
    return isinstance(value, float) and _is_nan(value)


def lacks_values(tensor: Tensor) -> bool:
    """True if the elements are only known in a real run."""
    pretence = current_pretence()
    whole: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return pretence is not None and not pretence.has_values(whole)


def float_in(frame: FrameType) -> float:
    """The result of ``float()`` of an unknown number, for the code of ``frame``.

    Raises:
        RunAgain: It was the first in that file: Python would make a plain nan of it, with which no
            comparison is true.
        PretendError: Code in C asked, other than ``%``, which makes a text.
    """
    scope = frame.f_globals
    if "float" not in scope:
        _decisions.scopes.append(scope)
        raise RunAgain
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("BINARY"):
        return math.nan
    refuse(
        "makes a plain number of a tensor, or gives the number to code in C, such as an array of "
        "numpy (write item(), and keep numbers in lists)"
    )


class _LikeFloat(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.float)


class _KeptFloat(float, metaclass=_LikeFloat):
    """``float``, which leaves unknown numbers as they are."""

    def __new__(cls, value: Any = 0.0, *rest: Any) -> Any:
        if rest or cls is not _KeptFloat:
            return builtins.float.__new__(cls, value)
        if isinstance(value, UnknownNumber):
            return value
        if isinstance(value, _Text):
            return unknown_number()
        if isinstance(value, Tensor) and value.numel() == 1 and lacks_values(value):
            return unknown_number()
        return builtins.float(value)
