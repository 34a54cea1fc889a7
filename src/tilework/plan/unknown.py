"""Values that only a real run has: numbers that stand for them, and the ways that programs branch.

``item()`` gives an :class:`UnknownNumber`, which computes and prints. It is finite. Each other
question to it is answered by the job's :class:`Decisions`.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import linecache
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from traceback import walk_stack
from types import FrameType, ModuleType
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_map_only

from tilework.capture.program.number import Arithmetic, is_float, is_installed
from tilework.comm.per_call.internal import call_site, current_pretence, format_site
from tilework.errors import PretendError

#: The most answers at one line, no and yes: a loop that ends by a value never ends here.
_MOST_ANSWERS = 10_000, 1000
_GIVEN = (
    "makes a plain number of a tensor, or gives the number to code in C, such as struct or an "
    "array of numpy (write item(), and keep numbers in lists)"
)
#: The folder of Python's own modules.
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")
#: Functions of ``math`` as they are before :func:`~tilework.plan.replacing.math_with_numbers`.
_MATH = {name: value for name, value in vars(math).items() if callable(value)}
_is_finite = math.isfinite
#: An unknown number as a text, which Python takes for no number.
_TEXT = "???"
_RAISE = "RAISE_VARARGS"
_SIGNS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=", "ne": "<>?"}
#: The answers of ``math`` about numbers that are finite.
_FINITE: dict[Any, bool] = {math.isnan: False, math.isinf: False, math.isfinite: True}


def refuse(what: str) -> NoReturn:
    """Raise a PretendError: the program, at the line that calls, needs a value."""
    raise _refusal(what, sys._getframe(1))


def _refusal(what: str, inner: FrameType) -> PretendError:
    outer: FrameType | None = inner
    while outer is not None and _is_installed(outer.f_code.co_filename):
        outer = outer.f_back
    frame = outer or inner
    return PretendError(
        f"the program {what} at {format_site((frame.f_code, frame.f_lasti))}, and the value is "
        f"only known in a real run: a pretended rank has tensors without elements. Leave this out "
        f"of the part that is planned (for example by an option of the program)"
    )


def _is_installed(file: str) -> bool:
    return is_installed(file) or file.startswith(_PYTHON)


class RunAgain(BaseException):
    """The run is void: from now on, one more file's ``float`` keeps unknown numbers."""


@dataclass(eq=False)
class Decisions:
    """The answers to what programs ask about values: no, but at some lines."""

    #: The line at which the answer is the other; "": at none.
    flipped: str = ""
    #: The lines at which the answer is yes, since the program raises an error after no.
    yes: set[str] = field(default_factory=set)
    #: The instruction at which code in C last asked for a plain number.
    given: Any = None
    #: By line: the first rank that asked there; and the line that asked last.
    asked: dict[str, int] = field(default_factory=dict)
    last: str = ""
    #: By file in which ``float`` keeps unknown numbers: the globals.
    scopes: dict[str, dict[str, Any]] = field(default_factory=dict)
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

    def keep_floats(self, frame: FrameType) -> bool:
        """Let ``float`` in the file of a frame keep unknown numbers; False if it does."""
        scope, file = frame.f_globals, frame.f_code.co_filename
        if scope.get("float", frame.f_builtins["float"]) is not builtins.float:
            return False
        if _compares_classes(file):
            raise _refusal("compares a class with float by `is` (take isinstance)", frame)
        scope["float"] = _KeptFloat
        self.scopes[file] = scope
        return True

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
        builtin = sys.modules["builtins"]
        for scope in self.scopes.values():
            scope["float"] = _KeptFloat
            if scope.get("__name__") == "__main__":  # a script has other globals in each run
                sys.modules["builtins"] = made = ModuleType("builtins")
                vars(made).update(vars(builtin), float=_KeptFloat)
        try:
            yield
        finally:
            _decisions, sys.modules["builtins"] = before, builtin
            for scope in self.scopes.values():
                scope.pop("float", None)


_decisions = Decisions()


def decided() -> bool:
    """The answer to a question about a value."""
    return _decisions.answer()


class UnknownNumber(Arithmetic):
    """A finite number that only a real run has. It computes, and prints as ???.

    For Python it is a float. Code in C finds none: it has to ask for the value, and is refused.
    """

    value = math.nan

    __class__ = property(lambda self: float)

    def _made(self, function: Callable[..., Any], *inputs: Any) -> Any:
        if not all(isinstance(each, int | float) or is_float(each) for each in inputs):
            return NotImplemented
        function(*with_nan(inputs))  # may raise
        return UnknownNumber()

    def _compared(self, function: Callable[..., bool], other: Any) -> bool:
        if not isinstance(other, int | float):
            return NotImplemented  # type: ignore[no-any-return]
        known = vars(self).setdefault("known", {})
        possible = known.get(other, "<=>")
        if other is self:
            possible = "="
        elif not isinstance(other, UnknownNumber) and not _is_finite(other):
            possible = "<" if other > 0 else ">" if other < 0 else "?"
        signs = _SIGNS[function.__name__]
        yes = possible[0] in signs
        if any((sign in signs) != yes for sign in possible):
            yes = decided()
        known[other] = "".join(sign for sign in possible if (sign in signs) == yes)
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
            raise AttributeError(f"UnknownNumber has no attribute {name!r}")
        return partial(self.given_to, _MATH[name], self)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Numpy computes with the number as with other objects of Python."""
        if ufunc.__name__ in _MATH and len(inputs) == 1 and method == "__call__":
            return self.given_to(_MATH[ufunc.__name__], self)
        return getattr(ufunc, method)(*map(as_object, inputs), **options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operator takes nan for the number, and the result has no values."""
        return func(*with_nan(args), **with_nan(kwargs or {}))

    def __repr__(self) -> str:
        return _TEXT

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(math.nan, spec.replace("d", "f")).replace("nan", _TEXT).replace("NAN", _TEXT)

    def __float__(self) -> float:
        return float_in(sys._getframe(1))

    def __deepcopy__(self, _: Any = None) -> UnknownNumber:
        return self

    __copy__ = __deepcopy__

    def __reduce__(self) -> Any:
        return UnknownNumber, ()


def of_text(text: str) -> UnknownNumber | str:
    """An unknown number for the text of such a number; other texts as they are."""
    return UnknownNumber() if text.strip("+- ") == _TEXT else text


def with_nan(tree: Any) -> Any:
    """The tree, with nan for unknown numbers."""
    return tree_map_only(UnknownNumber, lambda _: math.nan, tree)


def as_object(value: Any) -> Any:
    """An unknown number, or a list with such, as an array of objects for numpy; else ``value``."""
    make = inspect.unwrap(sys.modules["numpy"].array)
    return make(value, dtype=object) if has_unknown(value) else value


def has_unknown(value: Any) -> bool:
    """True for an unknown number, and for a list with such."""
    if isinstance(value, list | tuple):
        return any(map(has_unknown, value))
    return isinstance(value, UnknownNumber)


def with_objects(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of numpy that keeps unknown numbers as they are, in arrays of objects."""

    @functools.wraps(function)
    def compute(*args: Any, **kwargs: Any) -> Any:
        if any(map(has_unknown, (*args, *kwargs.values()))):
            kwargs.pop("dtype", None)
            args = tuple(map(as_object, args))
            kwargs = {name: as_object(value) for name, value in kwargs.items()}
        return function(*args, **kwargs)

    return compute


def is_unknown(value: Any) -> bool:
    """True for a number that came from a tensor without values, and for nan."""
    is_nan = isinstance(value, float) and value != value
    return is_nan or isinstance(value, UnknownNumber)


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
    if dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("BINARY"):
        # Code on the stack may have taken `float` before, to read the text.
        names_float = [each for each, _ in walk_stack(frame) if "float" in each.f_code.co_names]
        own = [each for each in names_float if not _is_installed(each.f_code.co_filename)]
        if sum(_decisions.keep_floats(each) for each in own):
            raise RunAgain
        _decisions.keep_floats(frame)
        return math.nan
    _decisions.given = frame.f_code, frame.f_lasti
    if frame.f_code.co_filename not in _decisions.scopes and _decisions.keep_floats(frame):
        raise RunAgain
    refuse(_GIVEN)


@cache
def _compares_classes(file: str) -> bool:
    """True for a file with ``type(x) is float``."""
    compared = [
        [node.left, *node.comparators]
        for node in ast.walk(ast.parse("".join(linecache.getlines(file))))
        if isinstance(node, ast.Compare)
        and any(isinstance(x, ast.Is | ast.IsNot) for x in node.ops)
    ]
    return any(isinstance(x, ast.Name) and x.id == "float" for pair in compared for x in pair)


def is_void(error: BaseException | None, decisions: Decisions) -> bool:
    """True if a run ended since a file's ``float`` met the first unknown number, or text of it."""
    if error is None or isinstance(error, RunAgain):
        return error is not None
    if error.__traceback__ is None:
        return is_void(error.__context__, decisions)
    frame, is_told = _end_of(error)
    if isinstance(error, ValueError) and _TEXT in str(error) and not is_told:
        return frame.f_code.co_filename not in decisions.scopes and decisions.keep_floats(frame)
    return is_void(error.__context__, decisions)


def refusal_of(error: BaseException | None, decisions: Decisions) -> PretendError | None:
    """The refusal in place of an error of code in C, which found no plain number."""
    if error is None:
        return None
    if error.__traceback__ is None:  # never raised, or without the traceback
        return refusal_of(error.__context__, decisions)
    frame, is_told = _end_of(error)
    names = _TEXT, UnknownNumber.__name__
    is_given = (frame.f_code, frame.f_lasti) == decisions.given
    if is_given or (not is_told and any(name in str(error) for name in names)):
        return _refusal(f"{_GIVEN} ({type(error).__name__}: {error})", frame)
    return refusal_of(error.__context__, decisions)


def _end_of(error: BaseException) -> tuple[FrameType, bool]:
    """The frame that raised an error, and True if the program or a package says ``raise`` there."""
    trace: Any = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    is_python = code.co_filename.startswith(_PYTHON) and "site-packages" not in code.co_filename
    return trace.tb_frame, not is_python and dis.opname[code.co_code[trace.tb_lasti]] == _RAISE


class _LikeFloat(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, builtins.float)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.float

    def __hash__(cls) -> int:
        return hash(builtins.float)


class _KeptFloat(float, metaclass=_LikeFloat):
    """``float``, which leaves unknown numbers as they are, and refuses texts that ``%`` made."""

    def __new__(cls, value: Any = 0.0, *rest: Any) -> Any:
        if rest or cls is not _KeptFloat:
            return builtins.float.__new__(cls, value)
        if isinstance(value, UnknownNumber):
            return value
        if isinstance(value, str) and isinstance(of_text(value), UnknownNumber):
            return UnknownNumber()
        if isinstance(value, Tensor) and value.numel() == 1 and lacks_values(value):
            return UnknownNumber()
        made = builtins.float(value)
        is_text = isinstance(value, str) and value not in sys._getframe(1).f_code.co_consts
        if is_text and made != made:
            refuse(f"reads {value!r}, which % may have made of a number from a tensor (take f'')")
        return made
