"""``capture``: a step that is recorded once, and then run as a program."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from tilework.capture.program.record import NOT_CURRENT, StepRecord
from tilework.capture.program.table import table_of
from tilework.capture.recording.recorded_call import (
    StepCall,
    all_have,
    record_call,
    run_checked,
    unified,
)
from tilework.comm.per_call.call_recorder import current_recorder
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.tensor import DTensor
from tilework.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")

#: Programs of one step; see ``Program``.
MOST_PROGRAMS = 8


def capture(step: Callable[P, T], *, backend: str = "python", check: bool = True) -> Program[P, T]:
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
    ``no_grad``, autocast) and other numbers are recorded again, once for each. The Python of the
    step does not run in later calls: prints, counters and appends belong outside.

    Args:
        step: The function, or a method in the body of a class. It may use DTensors,
            ``fully_shard``, ``DistributedDataParallel`` and plain modules, call ``backward()``,
            clip, and step optimizers. A returned tensor has no graph.
        backend: "python" runs torch's operators one after the other. "inductor" compiles them
            together with torch's Inductor, which needs a C++ compiler, takes seconds to minutes,
            and rounds as Inductor does.
        check: Run each new program once on copies of the recorded call's inputs, and compare all
            results, bit by bit. Takes the time of a step, and memory for copies of everything that
            the step writes.

    Returns:
        The program.

    Raises:
        CaptureError: In the call that records: the step does something that a program cannot do
            again, or other ranks recorded another program. Tensors are as they were before the
            call.
        CollectiveMismatchError: A rank runs the program while others run something else; on all.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, capture, distribute_tensor, init_device_mesh
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
    if backend not in ("python", "inductor"):
        raise ValueError(f'backend must be "python" or "inductor", got {backend!r}')
    return Program(step, backend, check)


class Program(Generic[P, T]):
    """A captured step; see :func:`capture`.

    Args:
        step: The function to record.
        backend: The backend that runs the programs, as for :func:`capture`.
        check: True if each program is compared with the step once.
    """

    def __init__(self, step: Callable[P, T], backend: str, check: bool) -> None:
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self.__doc__, self.__wrapped__ = step.__doc__, step
        self._backend, self._check = backend, check
        #: By key of a call, the programs, and the size for programs of several sizes.
        self._records: dict[Any, list[tuple[StepRecord, int | None]]] = {}
        #: Programs of several sizes.
        self._sized: list[StepRecord] = []
        #: True once the step ran unchanged, which makes one-time states.
        self.is_warm = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.is_warm or current_recorder() is not None:
            result = self.__wrapped__(*args, **kwargs)
            self.is_warm = True
            return result
        leaves, key = key_of_call(args, kwargs)
        for record, size in self._records.get(key, ()):
            result = record.run(leaves, size)
            if result is not NOT_CURRENT:
                return result
        call = StepCall(self.__wrapped__, self.__name__, leaves, args, kwargs)
        found = self._of_several(key)
        is_checked = found is not None and found[0].is_checked  # then ranks need not agree again
        if found is not None and (is_checked or self._all_have(True)):
            return self._checked(key, call, *found)  # type: ignore[no-any-return]
        if found is None and self._sized:
            self._all_have(False)
        return self._record(key, call)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the step: records refer to the original's tensors."""
        return Program, (self.__wrapped__, self._backend, self._check)

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        """Bind a captured method of a class to an object, as Python binds a function."""
        return self if owner is None else MethodType(self, owner)

    @property
    def records(self) -> list[StepRecord]:
        """The programs that were recorded so far, one for each kind of call."""
        every = [record for records in self._records.values() for record, _ in records]
        return list({id(record): record for record in every}.values())

    def _record(self, key: Any, call: StepCall) -> Any:
        if len(self.records) >= MOST_PROGRAMS:
            raise CaptureError(self._too_many(key))
        if self.records:
            warnings.warn(
                f"{self.__name__} is recorded again: {self._what_differs(key)}", stacklevel=4
            )
        compiles = self._backend == "inductor"
        record, result = record_call(call, self._check, compiles)
        if record is not None:
            record.sign(key)
            self._unify(record)
            self._records.setdefault(key, []).append((record, None))
            record.release()
        return result

    # -- several sizes -----------------------------------------------------------------------

    def _unify(self, record: StepRecord) -> None:
        """Make a program for several sizes from a record and an earlier record, if possible."""
        made = None
        for known in self.records:
            made = made or unified(known, record)
        if self.records and self._all_have(made is not None, record):
            assert made is not None
            self._sized.append(made)

    def _all_have(self, flag: bool, record: StepRecord | None = None) -> bool:
        """True if ``flag`` is true on all ranks of the groups of a record. Collective."""
        return all_have(flag, record or self._sized[-1])

    def _of_several(self, key: Any) -> tuple[StepRecord, int] | None:
        """The program for several sizes that fits a call, and the size; None if none fits."""
        for record in self._sized:
            size = record.size_in(key)
            if size is not None:
                return record, size
        return None

    def _checked(self, key: Any, call: StepCall, record: StepRecord, size: int) -> Any:
        """The result of a call, by a program for several sizes.

        The first call at a third size runs both the step and the program: if they differ on any
        rank, the program is dropped.
        """
        if record.is_checked:
            result = record.run(call.leaves, size)
            if result is NOT_CURRENT:
                return self._record(key, call)
        else:
            is_right, result = run_checked(record, call, size, self._backend == "inductor")
            if is_right is None:
                return self._record(key, call)
            if not self._all_have(is_right, record):
                self._sized.remove(record)
                return result
            record.is_checked = True
            self._records = {
                known: [each for each in records if each[0] not in record.made_of]
                for known, records in self._records.items()
            }
            record.made_of = ()
        if not record.signature_has_places:
            self._records.setdefault(key, []).append((record, size))
        elif record not in self.records:
            self._records.setdefault(_Same(record), []).append((record, None))
        return result

    def _what_differs(self, key: Any) -> str:
        """The difference between a call and a recorded call, in words, for messages."""
        for known, records in reversed(list(self._records.items())):
            if known == key and records:
                return str(records[-1][0].what_changed())
            if isinstance(known, tuple) and len(known) == len(key):
                odd = next(i for i, (a, b) in enumerate(zip(known, key, strict=True)) if a != b)
                where = f"argument {odd}" if 0 < odd <= len(key) - len(_modes()) - 1 else "a mode"
                return f"{where} was {_shown(known[odd])} and is {_shown(key[odd])}"
        return "the arguments have another structure"

    def _too_many(self, key: Any) -> str:
        return (
            f"{self.__name__} would be recorded for the {MOST_PROGRAMS + 1}th time, since calls "
            f"differ ({self._what_differs(key)}): a record serves one layout. Pad to a few sizes, "
            f"make a Python number that varies a tensor, or capture the part that stays the same"
        )

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
        return "\n\n".join(record.code.text for record in self.records)

    def __repr__(self) -> str:
        return f"<program of {self.__name__}: {len(self.records)} recorded>"


_LEAVES = (DTensor, Tensor, nn.Parameter, int, float, bool, str)


def key_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments, and a key: calls with equal keys may share a program."""
    if kwargs or not all(arg.__class__ in _LEAVES for arg in args):
        leaves, tree = _flat((args, kwargs))
    else:
        leaves, tree = list(args), None
    return leaves, (tree, *map(_key_of, leaves), *_modes())


def _flat(tree: Any) -> tuple[list[Any], Any]:
    leaves, spec = tree_flatten(tree)
    try:
        hash(spec)
    except TypeError:  # torch 2.6
        return leaves, repr(spec)
    return leaves, spec


def _key_of(leaf: Any) -> Any:
    if leaf.__class__ is DTensor:
        local = leaf._local_tensor
        return leaf._spec, local.dtype, local.stride(), local.requires_grad
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad, type(leaf)
    if isinstance(leaf, float):  # 0.0 equals -0.0, and NaN equals nothing
        return type(leaf), repr(leaf)
    if isinstance(leaf, bool | int | str | type(None)):
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
