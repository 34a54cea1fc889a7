"""``capture``: a step that is recorded once, and then run as a program."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilework.capture.agreement import agree_on
from tilework.capture.glue import Held
from tilework.capture.graph import Graph
from tilework.capture.number import value_of
from tilework.capture.options import Options
from tilework.capture.places import Argument, Place, Places
from tilework.capture.record import NOT_CURRENT, Record
from tilework.capture.recorder import Recorder, bytes_of
from tilework.capture.table import table_of
from tilework.comm.recording import current_recorder
from tilework.comm.world import current_world
from tilework.dtensor.spec import DTensorSpec
from tilework.dtensor.tensor import DTensor
from tilework.errors import CaptureError

P = ParamSpec("P")
T = TypeVar("T")

#: Programs of one step; see ``Program``.
MOST_PROGRAMS = 8
_below_autograd = torch._C._AutoDispatchBelowAutograd


def capture(step: Callable[P, T], *, backend: str = "python", check: bool = True) -> Program[P, T]:
    """A step of a training or inference loop as one program of this rank.

    Collective as the step is. The result is called as ``step`` is. The first call runs ``step`` as
    it is, so that states which a step makes the first time are there. The second runs it again and
    records what torch and the groups do: local operators, collectives, random draws. Later calls
    with arguments of the same layouts run the record, without Python of the model, DTensor's
    dispatch, autograd or the optimizer's loops. Results, gradients, parameters, optimizer states
    and buffers are those that ``step`` would give, bit for bit with ``backend="python"``.

    Tensors that the step reaches (arguments, closure, globals, modules, optimizers) are inputs of
    the program, and are read anew in each call; floats of ``param_groups``, too, so that schedulers
    work outside of the step. Arguments of another shape, dtype or layout, other modes (``train()``,
    ``no_grad``, autocast) and other numbers are recorded again, once for each. The Python of the
    step does not run in later calls: prints, counters and appends belong outside.

    Args:
        step: The function. It may use DTensors, ``fully_shard``, ``DistributedDataParallel`` and
            plain modules, call ``backward()``, clip, and step optimizers. A tensor that it returns
            has no graph.
        backend: "python" runs torch's operators one after the other. "inductor" compiles them
            together with torch's Inductor, which needs a C++ compiler, takes seconds to minutes,
            and rounds as Inductor does.
        check: Run each new program once on copies of what the recorded call began with, and compare
            all that it computes, bit by bit. Takes the time of a step, and copies of what the step
            writes.

    Returns:
        The program.

    Raises:
        CaptureError: In the call that records: the step does what a program cannot do again, or
            other ranks recorded another program. Tensors are as they were before the call.
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
        step: The step.
        backend: What runs the records.
        check: True if each record is checked once.
    """

    def __init__(self, step: Callable[P, T], backend: str, check: bool) -> None:
        self.__name__ = getattr(step, "__name__", type(step).__name__)
        self.__doc__ = step.__doc__
        self._step, self._backend, self._check = step, backend, check
        self._records: dict[Any, list[Record]] = {}
        self._is_warm = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._is_warm or current_recorder() is not None:
            result = self._step(*args, **kwargs)
            self._is_warm = True
            return result
        if kwargs or not all(arg.__class__ in _LEAVES for arg in args):
            leaves, tree = _flat((args, kwargs))
        else:
            leaves, tree = list(args), None
        key = (tree, *map(_key_of, leaves), *_modes())
        for record in self._records.get(key, ()):
            result = record.run(leaves)
            if result is not NOT_CURRENT:
                return result
        return self._record(key, leaves, args, kwargs)  # type: ignore[no-any-return]

    @property
    def records(self) -> list[Record]:
        """The programs so far, one for each kind of call."""
        return [record for records in self._records.values() for record in records]

    def _record(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        if len(self.records) >= MOST_PROGRAMS:
            raise CaptureError(self._too_many(key))
        if self.records:
            warnings.warn(
                f"{self.__name__} is recorded again: {self._what_differs(key)}", stacklevel=3
            )
        record, result = _recorded(self._step, self.__name__, args, kwargs, leaves, self._check)
        if record is not None:
            if self._backend == "inductor":
                record.compile()
            self._records.setdefault(key, []).append(record)
        return result

    def _what_differs(self, key: Any) -> str:
        """The difference between a call and the records, in words."""
        for known, records in reversed(list(self._records.items())):
            if known == key:
                return str(records[-1].what_changed())
            if len(known) == len(key):
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
        """The lines in which another program, or a saved one, differs; "" if none do. Local.

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


def _flat(tree: Any) -> tuple[list[Any], Any]:
    return tree_flatten(tree)


def _key_of(leaf: Any) -> Any:
    if leaf.__class__ is DTensor:
        local = leaf._local_tensor
        return leaf._spec, local.dtype, local.stride(), local.requires_grad
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride(), leaf.device, leaf.requires_grad, type(leaf)
    if isinstance(leaf, bool | int | float | str | type(None)):
        return type(leaf), leaf
    return _Same(leaf)


class _Same:
    """An object as a key: equal to itself alone, and alive as long as the key is."""

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
    is_cast = torch.is_autocast_enabled("cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        is_cast and torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
    )


# -- recording -------------------------------------------------------------------------------


class _PlacesOfCall(Places):
    """The places of a step, and its arguments.

    Args:
        step: The step.
        leaves: The leaves of the arguments.
    """

    def __init__(self, step: Callable[..., Any], leaves: Sequence[Any]) -> None:
        plain = Tensor | bool | int | float | str | None
        super().__init__(step, [leaf for leaf in leaves if not isinstance(leaf, plain)])
        self._numbers: dict[int, Argument] = {}
        for number, leaf in enumerate(leaves):
            is_dtensor = leaf.__class__ is DTensor
            if isinstance(leaf, Tensor):
                tensor = Argument(number, is_dtensor).of(leaves)
                self._numbers[id(tensor)] = Argument(number, is_dtensor)

    def find(self, tensor: Tensor) -> Any:
        return self._numbers.get(id(tensor)) or super().find(tensor)


def _recorded(
    step: Callable[..., Any], name: str, args: Any, kwargs: Any, leaves: Sequence[Any], check: bool
) -> tuple[Record | None, Any]:
    """Run a step, and record it.

    Returns:
        The record, None if the step has made groups, which later calls will not; and the result.
    """
    groups = set(current_world().records)
    before = _PlacesOfCall(step, leaves)
    recorder = Recorder(before)
    generators = [(each, each.get_state()) for each in _generators()]
    try:
        with Options(before.optimizers, recorder.book) as options, recorder.recording():
            result = step(*args, **kwargs)
            _reduce_deferred(before)
        if set(current_world().records) != groups:
            return None, result
        graph = recorder.graph
        outputs, tree = tree_flatten(result)
        graph.result = [_leaf(each, recorder) for each in outputs]
        after = _PlacesOfCall(step, leaves)
        graph.places = list(_changes(before, after, recorder))
        constants = _constants(before, after)
        graph.drop_dead()
        digests = agree_on(graph, name)
        way = _way_to(graph, before)
        guards = list(dict.fromkeys(recorder.book.guards))
        held = Held(options.all, way, constants, guards)
        record = Record(name, graph, digests, tree, held)
        if check:
            _check(record, recorder, leaves, generators, result)
    except CaptureError:
        _undo(recorder, before)
        raise
    return record, tree_unflatten([value_of(each) for each in outputs], tree)


def _generators() -> list[torch.Generator]:
    own = current_world().generator
    return [torch.default_generator if own is None else own]


def _reduce_deferred(places: Places) -> None:
    """Have gradients that wait for somebody to read them reduced within the step."""
    for place, _ in places.slots:
        if place.how == "grad" and place.owner.__class__ is DTensor:
            deferred = place.owner._deferred_grad
            if deferred is not None:
                deferred()


def _leaf(leaf: Any, recorder: Recorder) -> Any:
    """The stand-in of a tensor or number that outlives the call."""
    if leaf.__class__ is DTensor:
        value = recorder.value_of(leaf._local_tensor)
        return "dtensor", value, leaf._spec, leaf._digest or 0
    if isinstance(leaf, Tensor):
        return recorder.value_of(leaf)
    return recorder.book.find(leaf) if type(leaf) is float else leaf


def _changes(before: Places, after: Places, recorder: Recorder) -> Iterator[tuple[Place, Any]]:
    """The places that hold other tensors after the step, with what they hold."""
    then = {_identity(place): tensor for place, tensor in before.slots}
    read = {_identity(x.path) for x in recorder.graph.inputs if isinstance(x.path, Place)}
    for place, tensor in after.slots:
        known = then.get(_identity(place), _identity)
        if tensor is known:
            continue
        if known is _identity and tensor is None:
            continue
        if isinstance(place.owner, list) and known is _identity and after.is_users(place):
            raise CaptureError(
                f"the step puts a tensor into the list {place.text}: a program would do so to one "
                f"place again and again. Return the tensor, and append it after the call"
            )
        if place.how == "item" and isinstance(place.owner, tuple):
            continue
        if not after.is_users(place) and _identity(place) not in read:
            continue
        yield place, (tensor if tensor is None else _leaf(tensor, recorder))
    for place, tensor in before.slots:
        if place.how == "grad" and tensor is not None and place.get() is None:
            yield place, None


def _identity(place: Place) -> tuple[int, str, Any]:
    key = place.key if isinstance(place.key, str | int | type(None)) else id(place.key)
    return id(place.owner), place.how, key


def _constants(before: Places, after: Places) -> list[tuple[Place, Any]]:
    """Numbers, texts and flags that the step left as they were: later calls must find the same.

    Raises:
        CaptureError: The step has changed some of the program's.
    """
    now = {_identity(place): value for place, value in after.constants}
    kept = []
    for place, value in before.constants:
        is_now = now.get(_identity(place), _identity)
        if is_now is value or (type(is_now) is type(value) and is_now == value):
            kept.append((place, value))
            continue
        owner = type(place.owner) if place.how == "attribute" else None
        if isinstance(place.owner, dict) and not place.text.isidentifier():
            owner = before.kind_of(place)
        if owner is not None and owner.__module__.startswith(("torch.", "tilework.")):
            continue  # a count that the library keeps
        raise CaptureError(
            f"the step changes {place.text} in Python, from {value!r} to {is_now!r}: a program "
            f"would not do this again, since its Python does not run. Do it outside of the step, "
            f"or keep the number in a tensor"
        )
    for found, length, text in before.lists:
        if len(found) != length:
            raise CaptureError(
                f"the step changes the length of the list {text} from {length} to {len(found)}: a "
                f"program would not do this again. Return what is appended, and do it after the "
                f"call"
            )
    return kept


def _way_to(graph: Graph, places: Places) -> list[tuple[Place, Any]]:
    """The objects on the way to a program's inputs, each once."""
    found: dict[int, tuple[Place, Any]] = {}
    for each in graph.inputs:
        if isinstance(each.path, Place):
            for place, thing in places.way_to(each.path):
                found.setdefault(id(thing), (place, thing))
    return list(found.values())


def _check(
    record: Record,
    recorder: Recorder,
    leaves: Sequence[Any],
    generators: Sequence[tuple[torch.Generator, Tensor]],
    result: Any,
) -> None:
    """Run a record on what the recorded call began with, and compare. Collective as the step is.

    Raises:
        CaptureError: A value differs in a bit.
    """
    copies: dict[Any, Tensor] = {}
    inputs = []
    for each in record.graph.inputs:
        tensor, memory = each.tensor.detach(), each.value.memory
        if memory in recorder.before:
            storage = copies.setdefault(memory, recorder.before[memory].clone())
            copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            copy.set_(
                storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
            tensor = copy
        inputs.append(tensor)
    ends = [(each, each.get_state()) for each, _ in generators]
    for generator, state in generators:
        generator.set_state(state)
    options = [option.number.value for option in record.options]
    kept = record.compute(inputs, options)
    for generator, state in ends:
        generator.set_state(state)
    pairs = [
        (each.path.text if isinstance(each.path, Place) else "an argument", each.tensor, copy)
        for each, copy in zip(record.graph.inputs, inputs, strict=True)
        if each.value.memory in recorder.before
    ]
    actual = [*tree_leaves(result), *[place.get() for place, _ in record.graph.places]]
    expected = [*record.graph.result, *[leaf for _, leaf in record.graph.places]]
    names = ["the result"] * len(record.graph.result)
    names += [place.text for place, _ in record.graph.places]
    for name, now, leaf in zip(names, actual, expected, strict=True):
        again = record.built(leaf, kept)
        if isinstance(now, Tensor):
            pairs.append((name, _plain(now), _plain(again)))
    for name, now, again in pairs:
        if not _same_bits(now.detach(), again.detach()):
            raise CaptureError(
                f"a first run of the record gave another {name} than the step itself: the step "
                f"computes something that torch's dispatcher does not show, or draws random "
                f"numbers in a way that a record can't repeat. Leave that part out of the step"
            )


def _plain(tensor: Any) -> Any:
    return tensor._local_tensor if tensor.__class__ is DTensor else tensor


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _undo(recorder: Recorder, places: Places) -> None:
    """Put back what a step has written that cannot be a program. Local."""
    for each in recorder.graph.inputs:
        memory = each.value.memory
        kept = None if memory is None else recorder.before.pop(memory, None)
        if kept is not None:
            bytes_of(each.tensor).copy_(kept)
    for place, tensor in places.slots:
        if place.how == "grad":
            place.set(tensor)
