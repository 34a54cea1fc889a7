"""``capture``: a step that is recorded once, and then run as a program."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from tilework.capture.program.code import ProgramCode
from tilework.capture.program.number import NumberError, WrongNumberError, is_float
from tilework.capture.program.passes import table_of
from tilework.capture.program.place import StatePlace, memory_layout_of
from tilework.capture.program.record import NOT_CURRENT, StepRecord
from tilework.capture.program.same_program import VotingRanks, Way
from tilework.capture.recording.arguments import StepCall, flatten
from tilework.capture.recording.judge import judged_call
from tilework.capture.recording.recorded_call import Recording, record_call
from tilework.comm.operations.internal import span
from tilework.comm.per_call.internal import current_pretence, current_recorder
from tilework.comm.world import current_world
from tilework.dtensor import DTensor
from tilework.dtensor.internal import DTensorSpec, layout_of, local_tensor_of
from tilework.errors import CaptureError, DistError

P = ParamSpec("P")
T = TypeVar("T")

#: Records of one step that are kept; then the oldest goes.
MOST_RECORDS = 256
#: Records that are kept of those for models, optimizers and tensors that others have replaced.
MOST_REPLACED = 8
#: Records in a row that served one call each; then calls run uncaptured where no record fits.
MOST_UNUSED = 32


def capture(
    step: Callable[P, T], *, backend: str = "python", check: bool | int | str = True
) -> Program[P, T]:
    """Turn a step of a training or inference loop into one program of this rank.

    Collective if the step is. The result is called like ``step``. The first call runs ``step``
    unchanged, so that states which a step makes the first time exist. The second call runs it again
    and records what torch and the groups do: local operators, collectives, random draws. Later
    calls with arguments of the same layouts run the record, without Python of the model, DTensor's
    dispatch, autograd or the optimizer's loops. Results, gradients, parameters, optimizer states
    and buffers are the same as from ``step``, bit for bit with ``backend="python"``.

    Tensors that the step reaches (arguments, closure, globals, modules, optimizers) are inputs of
    the program, and are read again in each call. So are floats of ``param_groups``: schedulers work
    outside of the step. Arguments of another shape, dtype or layout, other modes (``train()``,
    ``no_grad``, autocast), other numbers and other branches on values are recorded again, once for
    each. The Python of the step does not run in later calls: prints, counters and appends belong
    outside.

    In calls 4, 8, 16, … the step itself runs beside the record, on copies, and a difference raises.

    Args:
        step: The function, or a method in the body of a class. It may use DTensors,
            ``fully_shard``, ``DistributedDataParallel`` and plain modules, call ``backward()``,
            clip, and step optimizers. A returned tensor has no graph.
        backend: "python" runs torch's operators one after the other. "inductor" compiles them
            together with torch's Inductor, which needs a C++ compiler, takes seconds to minutes,
            and rounds as Inductor does.
        check: True: compare each new program with the recorded call, and each program with the step
            in calls 4, 8, 16, …; "always": in each call; a number n: in each n-th call; False or
            "never": never. A check takes a step, one and a half captured steps, and memory for
            copies of everything that the step writes.

    Returns:
        The program.

    Raises:
        CaptureError: In a call that records: the step does something that a program cannot do
            again, or other ranks recorded another program. Tensors are as they were before the
            call. In a call that is checked: the record gives something else than the step, on this
            rank or another one; the step's effects stay.
        CollectiveMismatchError: A rank runs the program while others run something else; on all.

    Example:
        >>> import torch
        >>> from tilework.capture import capture
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     w = torch.nn.Parameter(distribute_tensor(torch.ones(3, 1), mesh))
        ...     optimizer = torch.optim.SGD([w], lr=0.5)
        ...     def step(x):
        ...         loss = (x @ w).sum()
        ...         loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         return loss.detach()
        ...     fast = capture(step)
        ...     x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        ...     return [fast(x).item() for _ in range(3)]
        >>> run_ranks(2, program)[0]
        [12.0, -12.0, -36.0]
    """
    if not callable(step):
        raise TypeError(f"capture() takes a function, got {type(step).__name__}")
    is_count = isinstance(check, int) and check > 0
    if not (isinstance(check, bool) or check in ("always", "never") or is_count):
        raise ValueError(f'check must be True, False, "always", "never" or a count, got {check!r}')
    if backend not in ("python", "inductor"):
        raise ValueError(f'backend must be "python" or "inductor", got {backend!r}')
    return Program(step, backend, check)


class Program(Generic[P, T]):
    """A captured step; see :func:`capture`.

    Args:
        step: The function to record.
        backend: The backend that runs the programs, as for :func:`capture`.
        check: When records are checked against the step, as for :func:`capture`.
    """

    def __init__(self, step: Callable[P, T], backend: str, check: bool | int | str) -> None:
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self.__doc__, self.__wrapped__ = step.__doc__, step
        self._backend, self._check = backend, check
        self.forget()
        #: Floats that are inputs of programs: positions of arguments, and places.
        self._numbers: set[int] = set()
        self._places: list[StatePlace] = []
        #: True if a float could not become an input: then each value has a record.
        self._has_fixed_floats = False
        #: The number of records since a record last ran.
        self._unused = 0

    def forget(self) -> None:
        """Drop all records: the next call runs the step unchanged, as the first call did."""
        #: By key of a call, the records.
        self._records: dict[Any, list[StepRecord]] = {}
        self._ranks = VotingRanks(self.__name__, self)
        #: True once the step ran unchanged, which makes one-time states.
        self.is_warm = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.is_warm or current_recorder() is not None or current_pretence() is not None:
            result = self.__wrapped__(*args, **kwargs)
            self.is_warm = True
            return result
        leaves, key = key_of_call(args, kwargs, self._numbers)
        for record in self._records.get(key, ()):
            inputs = record.inputs_of(leaves)
            if inputs is None:
                continue
            way = self._ranks.decide(Way.CHECK if record.code.is_due() else Way.RUN)
            if way is Way.RUN:
                with span("captured step"):
                    result = record.run(inputs)
                if result is NOT_CURRENT:
                    continue
                current_world().notes.steps += 1
                self._unused = 0
                return result
            call = StepCall(self.__wrapped__, self.__name__, leaves, args, kwargs)
            if way is Way.CHECK:
                return self._judged(record, call, inputs)  # type: ignore[no-any-return]
            return self._record(way, key, call, record)  # type: ignore[no-any-return]
        call = StepCall(self.__wrapped__, self.__name__, leaves, args, kwargs)
        is_vain = self._unused >= MOST_UNUSED
        way = self._ranks.decide(Way.UNCAPTURED if is_vain else Way.RECORD)
        return self._record(way, key, call)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the step: records refer to the original's tensors."""
        return Program, (self.__wrapped__, self._backend, self._check)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind a captured method of a class to an object, as Python binds a function."""
        return self if owner is None else MethodType(self, owner)

    @property
    def records(self) -> list[StepRecord]:
        """The programs that were recorded so far: of each, the first record that runs it."""
        return list({id(x.code): x for x in reversed(self._all())}.values())[::-1]

    def _all(self) -> list[StepRecord]:
        return [record for records in self._records.values() for record in records]

    def _judged(self, record: StepRecord, call: StepCall, inputs: Sequence[Tensor]) -> Any:
        """The result of the step, after a check of the record."""
        code, since = record.code, record.code.last_check
        code.schedule(self._check)
        self._unused = 0
        try:
            return judged_call(record, call, inputs, since)
        except CaptureError:
            self._drop(lambda each: each.code is code)
            raise

    def _drop(self, which: Callable[[StepRecord], bool]) -> None:
        for key, records in list(self._records.items()):
            self._records[key] = [each for each in records if not which(each)]

    def _record(self, way: Way, key: Any, call: StepCall, held: StepRecord | None = None) -> Any:
        """Record a call, or run it uncaptured. Collective if the step is."""
        if way is Way.UNCAPTURED:
            if held is None and self._unused == MOST_UNUSED:
                warnings.warn(
                    f"{self.__name__} runs uncaptured where no record fits: {MOST_UNUSED} records "
                    f"in a row served no second call, since calls differ "
                    f"({self._what_differs(key)}). Make what varies a tensor or a float, or "
                    f"capture the part that stays the same",
                    stacklevel=4,
                )
                self._unused += 1
            return call.run()
        known = [each.code for each in self.records]
        why = self._what_differs(key) if known and held is None else ""
        if held is None:
            self._take_numbers(key)
        else:
            self._drop(lambda each: each is held)
        record, result = self._recorded(call, known)
        if record is not None:
            if why and record.code not in known:  # other sizes share a program
                warnings.warn(f"{self.__name__} is recorded again: {why}", stacklevel=4)
            self._keep(key_of_call(call.args, call.kwargs, self._numbers)[1], record)
            self._unused += held is None
        return result

    def _recorded(
        self, call: StepCall, known: Sequence[ProgramCode]
    ) -> tuple[StepRecord | None, Any]:
        """Record a call. If that fails with floats as inputs, make a record for each value."""
        checks, compiles = self._check not in (False, "never"), self._backend == "inductor"
        how = Recording(self._ranks, checks, compiles, known, sorted(self._numbers), self._places)
        if self._has_fixed_floats:
            return record_call(call, how._replace(options=False))
        try:
            return record_call(call, how)
        except Exception as error:
            is_wrong = isinstance(error, WrongNumberError) and (self._numbers or self._places)
            if isinstance(error, DistError) and not (is_wrong or type(error) is NumberError):
                raise
            self._has_fixed_floats = True
            self._numbers, self._places = set(), []
            if isinstance(error, WrongNumberError):
                return None, error.result
        # Perhaps the step does with a float what only Python can.
        return record_call(call, how._replace(numbers=(), places=(), options=False))

    def _keep(self, key: Any, record: StepRecord) -> None:
        every = self._all()
        gone = [each for each in every if _is_replaced(each)][:-MOST_REPLACED]
        if len(every) >= MOST_RECORDS:
            gone.append(every[0])
        self._drop(gone.__contains__)
        self._records.setdefault(key, []).append(record)
        record.code.schedule(self._check)
        record.release()

    def _take_numbers(self, key: Any) -> None:
        """Make inputs of the floats that differ from earlier calls; drop old records."""
        if self._has_fixed_floats:
            return
        found = set().union(*(_floats_that_differ(known, key) for known in self._records))
        known = len(self._places)
        for record in self._records.get(key, ()):
            place, record.varies = record.varies, None
            if place is not None and place not in self._places:
                self._places.append(place)
        if len(self._places) > known or not found <= self._numbers:
            self._numbers |= found
            self._drop(lambda _: True)

    def _what_differs(self, key: Any) -> str:
        """The difference between a call and a recorded call, in words, for messages."""
        for known, records in reversed(list(self._records.items())):
            if known == key and records:
                return str(records[-1].what_changed())
            if isinstance(known, tuple) and len(known) == len(key):
                odd = next(
                    (i for i, x in enumerate(zip(known, key, strict=True)) if x[0] != x[1]), 0
                )
                where = f"argument {odd}" if 0 < odd <= len(key) - len(_modes()) - 1 else "a mode"
                return f"{where} was {_shown(known[odd])} and is {_shown(key[odd])}"
        return "the arguments have another structure"

    def table(self) -> str:
        """Operators, collectives, bytes and memory of each record, as text. Local."""
        return "\n".join(table_of(each.graph, self.__name__) for each in self.records)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program's text to a file, to read, or to compare with later."""
        Path(path).write_text(f"{self}\n")

    def diff(self, other: Program[..., Any] | str | os.PathLike[str]) -> str:
        """A unified diff from this program to another, or to a saved file; "" if equal. Local.

        Example:
            >>> import torch
            >>> first, second = (capture(lambda x, n=n: x * n) for n in (2.0, 3.0))
            >>> for each in (first, second) * 2:
            ...     _ = each(torch.ones(2))
            >>> print(first.diff(second).splitlines()[-3].partition(";")[0])
            -    t2 = mul(t1, 2.0)
        """
        theirs = str(other) if isinstance(other, Program) else Path(other).read_text().rstrip()
        lines = difflib.unified_diff(str(self).splitlines(), theirs.splitlines(), lineterm="")
        return "\n".join(lines)

    def __str__(self) -> str:
        if not self.records:
            return f"# {self.__name__}: not recorded yet; the second call records it"
        return "\n\n".join(record.code.python.text for record in self.records)

    def __repr__(self) -> str:
        return f"<program of {self.__name__}: {len(self.records)} recorded>"


def _is_replaced(record: StepRecord) -> bool:
    """True if another object is now where a record found a model, an optimizer or a tensor."""
    fixed = [x for x in record.graph.inputs if not (x.is_argument or x.may_change)]
    try:
        return any(place.get() is not thing for place, thing in record.way) or any(
            each.path.get() is not each.tensor for each in fixed
        )
    except LookupError:
        return True


_LEAVES = (DTensor, Tensor, nn.Parameter, int, float, bool, str)


def key_of_call(
    args: tuple[Any, ...], kwargs: dict[str, Any], numbers: Collection[int] = ()
) -> tuple[list[Any], Any]:
    """A call's leaves and a key of records; leaves at ``numbers`` are floats that are inputs."""
    leaves: list[Any]
    if kwargs or not all(arg.__class__ in _LEAVES for arg in args):
        leaves, tree = flatten((args, kwargs))
    else:
        leaves, tree = list(args), None
    parts = list(map(_key_of, leaves))
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    if len(set(tensors)) < len(tensors):  # the same tensor twice
        parts.append(tuple(map(tensors.index, tensors)))
    for i in numbers:
        if i < len(leaves) and is_float(leaves[i]):
            parts[i] = type(leaves[i])
    return leaves, (tree, *parts, *_modes())


def _floats_that_differ(known: Any, key: Any) -> set[int]:
    """The positions of leaves in which two keys differ, if these are floats; else none."""
    if len(known) != len(key):
        return set()
    odd = [i for i, (a, b) in enumerate(zip(known, key, strict=True)) if a != b]
    floats = all(_is_float_key(known[i]) and _is_float_key(key[i]) for i in odd)
    return {i - 1 for i in odd} if floats and known[0] == key[0] else set()


def _is_float_key(key: Any) -> bool:
    return isinstance(key, tuple) and len(key) == 3 and key[0] == "float"


def _key_of(leaf: Any) -> Any:
    if leaf.__class__ is DTensor:
        local = local_tensor_of(leaf)
        layout = layout_of(leaf), local.dtype, local.stride(), local.requires_grad
        return (*layout, leaf.is_snapshot)
    if isinstance(leaf, Tensor):
        bits = leaf.is_conj() or leaf.is_neg()
        return (*memory_layout_of(leaf), type(leaf), bits and (leaf.is_conj(), leaf.is_neg()))
    if is_float(leaf):  # 0.0 equals -0.0, and NaN equals nothing
        return "float", type(leaf), repr(leaf)
    if isinstance(leaf, bool | int | str | torch.Size | torch.device | torch.dtype | None):
        return type(leaf), leaf
    return _Same(leaf)


class _Same:
    """A key for an object by identity, which keeps the object alive."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"{type(self.thing).__name__} at {id(self.thing):x}"


def _shown(key: Any) -> str:
    return str(key[0]) if isinstance(key, tuple) and isinstance(key[0], DTensorSpec) else str(key)


def _modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *[
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
            for kind in ("cpu", "cuda")
        ],
        torch.get_default_dtype(),
        torch._C._len_torch_function_stack(),
    )
