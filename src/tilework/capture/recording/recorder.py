"""The recorder of a step: a genuine call, in which torch's dispatcher shows every operator.

The step runs as always, with real tensors; below autograd a torch dispatch mode notes each
operator, the arguments and the results. Since no tensor is replaced, layouts, storages, versions,
hooks and gradients are the same as without a recorder. A tensor is identified by its Python object
(torch keeps one for each tensor), or, if it comes from elsewhere, by the memory that it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from tilework.capture.program.graph import (
    ALIAS,
    BOUNDARY,
    ITEM,
    Expected,
    Graph,
    Input,
    Instruction,
    ProgramMemory,
    Value,
    leaves_of,
    mapped,
)
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.memory import nbytes_spanned
from tilework.capture.program.number import Number, NumberBook, NumberError, is_float
from tilework.capture.program.number import value_of as plain
from tilework.capture.program.place import memory_layout_of
from tilework.capture.program.record import storage_bytes_of
from tilework.capture.recording.group_calls import RecordedGroups, paused
from tilework.capture.recording.places import StatePlaces
from tilework.capture.recording.tensor_reads import uncompiled, watched_reads
from tilework.comm.per_call.internal import call_site, set_recorder
from tilework.comm.world import current_world
from tilework.dtensor.internal import layout_of
from tilework.errors import CaptureError

T = TypeVar("T")
aten = torch.ops.aten
_DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CONSTANTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default)
#: Arguments that operators write to though their schemas do not say so, by position.
_UNDECLARED = {aten.native_batch_norm.default: (3, 4)}
#: Operators that read lengths, by the position of the tensor: torch then branches on them in C++.
_LENGTHS = {aten._pack_padded_sequence.default: 1, aten._pad_packed_sequence.default: 1}
_DRAWS = torch.Tag.nondeterministic_seeded


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records a step: ``places`` has what it can reach, ``book`` the recording's numbers."""

    def __init__(self, places: StatePlaces, book: NumberBook) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.book, self.places = Graph(), book, places
        self.book.recorder = self
        self._values: Any = WeakTensorKeyDictionary()
        #: By id, objects that are not tensors: keys of random draws.
        self._objects: dict[int, tuple[object, Value]] = {}
        self._memories: dict[int, ProgramMemory] = {}
        self._count = 0
        self._input_memories: set[ProgramMemory] = set()
        #: By memory of an input that the step writes to, the bytes before the write.
        self.before: dict[ProgramMemory, Tensor] = {}
        #: The tensors whose gradients the record takes; see ``modules``.
        self.needed: list[Tensor] = []
        #: The nodes of autograd's graph through which the step went backward.
        self.passed: set[Any] = set()
        self._groups: RecordedGroups | None = None

    # -- begin and end -----------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record everything that this thread does within the block."""
        self._groups = RecordedGroups(self._keep_of_group_call, self._note_group_call)
        before = set_recorder(self)
        try:
            single = torch.autograd.set_multithreading_enabled(False)
            with uncompiled(), watched_reads(), self, single:
                yield
        finally:
            set_recorder(before)
            self._groups.leave()

    def close(self) -> None:
        """Free the copies of inputs: numbers of the record keep the recorder alive."""
        self.book.recorder = None
        self.before.clear()
        self.passed.clear()

    def begin_backward(self, number: int, grads: Sequence[Tensor]) -> None:
        """Note that the backward pass begins, with ``grads`` as arguments from ``number`` on."""
        for i, grad in enumerate(grads):
            self.places.add_argument(grad, number + i)
        self._note(BOUNDARY, ((), {}), None, _About((), "call", "backward"))

    # -- operators ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Below autograd, classes of tensors have no part in an operator without a recorder either.
        with torch._C.DisableTorchFunctionSubclass(), paused() as recorder:
            if recorder is None:  # a part of the step outside of the program
                return func(*args, **kwargs)
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None:
            self.passed.add(node)
        if func is aten._local_scalar_dense.default or func is aten.equal.default:
            return self._read(func, args)
        if func in _CONSTANTS:
            return self._constant(func, args[0])
        if func in _LENGTHS:
            lengths = args[_LENGTHS[func]]
            self.expect(_listed, (self._input(lengths),), lengths.tolist())
        args, kwargs = mapped(self._with_numbers, (args, kwargs))
        inputs = mapped(self._input, (args, kwargs))
        plain_args, plain_kwargs = mapped(plain, (args, kwargs))
        written = _written(func, args, kwargs)
        self._keep(written)
        result = func(*plain_args, **plain_kwargs)
        draws = _DRAWS in func.tags
        own = current_world().generator if draws else None
        if own is not None and any(x.name == "generator" for x in func._schema.arguments):
            inputs = (inputs[0], {"generator": own, **inputs[1]})
        self._note(
            func, inputs, result, _About(written, "draw" if draws else "operator", str(func))
        )
        if any(tag in func.tags for tag in _DATA_DEPENDENT):  # Python sees the shape of the result
            for leaf in leaves_of(result):
                if _is_tensor(leaf):
                    self.expect(_shape_of, (self.value_of(leaf),), tuple(leaf.shape))
        return result

    def _constant(self, func: Any, tensor: Tensor) -> Tensor:
        """Note a tensor that the step makes from Python numbers: each run makes a new copy."""
        if self._values.get(tensor) is not None or self.places.find(tensor) is not None:
            return tensor  # it was made by an operator, or before the step
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise NumberError(
                f"torch.tensor() at {call_site()} is given NaN, or a number that comes from item() "
                f"or an option of an optimizer: use the tensor itself, or torch.full((), number)"
            )
        if not tensor.untyped_storage().resizable():
            raise CaptureError(
                f"the step makes a tensor of a numpy array at {call_site()}: a program would keep "
                f"what the array holds now. Make the tensor before the step, and refer to it"
            )
        result: Tensor = func(tensor)
        constant = tensor.clone()
        self._note(
            aten.clone.default, ((constant,), {}), result, _About((), "operator", "torch.tensor")
        )
        return result

    def _with_numbers(self, leaf: Any) -> Any:
        return self.book.find(leaf) if is_float(leaf) else leaf

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        """Note a library's read: a float becomes a Number, any other value a condition."""
        value = func(*args)
        if isinstance(value, float):
            return self.number_of(args[0])
        inputs = mapped(self._input, args)
        self.expect(func, inputs, value)
        return value

    def decided(self, function: Callable[[Tensor], T], tensor: Tensor) -> T:
        """Call a library's read of a tensor, and note that each call must find the same value."""
        with paused() as recorder:
            plain_tensor: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            value = function(plain_tensor)
            if recorder is not None:
                self.expect(function, (self._input(plain_tensor),), value)
            return value

    def expect(self, function: Callable[..., Any], inputs: Any, value: Any) -> None:
        """Note that ``function(*inputs)`` must be ``value`` in each call: code branched on it."""
        expected = Expected(function, value, call_site())
        self._note(expected, (tuple(inputs), {}), None, _About((), "call", f"expect {value}"))

    def number_of(self, tensor: Tensor) -> Any:
        """The Number that stands for the only element of a tensor, as ``item()`` returns it."""
        with paused():
            value: Any = aten._local_scalar_dense.default(tensor)
            read = _Read()
            self._note(ITEM, ((self._input(tensor),), {}), read, _About((), "operator", "item"))
            return Number(value, _same, (self._objects[id(read)][1],), self.book)

    # -- values ------------------------------------------------------------------------------

    def _input(self, leaf: Any) -> Any:
        """The stand-in for an argument in the program: the value of a tensor, or a plain object."""
        if isinstance(leaf, Tensor):
            return self.value_of(leaf)
        known = self._objects.get(id(leaf))
        if known is None and isinstance(leaf, torch.Generator):
            held = self.places.generator(leaf)
            if held is not None:
                return held
            raise CaptureError(
                f"the operator at {call_site()} draws from a generator that the step has made: a "
                f"program would draw from it again. Make the generator before the step, and pass "
                f"it or refer to it"
            )
        return leaf if known is None else known[1]

    def value_of(self, tensor: Tensor) -> Value:
        """The value that stands for a tensor. A new tensor at a known place becomes an input."""
        value: Value | None = self._values.get(tensor)
        if value is not None and value.memory is self._memory_of(tensor):
            return value
        path = self.places.find(tensor)
        if value is None and path is not None:
            value = self._new_value(tensor)
            found = Input(value, path, tensor)
            if found.is_local:
                found.layout = layout_of(path.owner)
            elif not found.is_argument and not (tensor.is_leaf and tensor.requires_grad):
                found.layout = memory_layout_of(tensor)
            self.graph.inputs.append(found)
            self._input_memories.add(self._memory_of(tensor))
            return value
        return self._alias_of(tensor)

    def share(self, tensor: Tensor, shown: Tensor) -> None:
        """Note that ``tensor`` is ``shown`` with another class: both are one value."""
        with paused():
            self._values[tensor] = self.value_of(shown)

    def _alias_of(self, tensor: Tensor) -> Value:
        """A value for an unknown tensor, as a view of a known tensor's memory."""
        begin, nbytes = tensor.data_ptr(), nbytes_spanned(tensor)
        if not nbytes:
            inputs = (tuple(tensor.shape),), {"dtype": tensor.dtype}
            about = _About((), "operator", "aten.empty")
            self._note(aten.empty.memory_format, inputs, tensor, about)
            made: Value = self._values[tensor]
            return made
        shown = self.places.showing(tensor)
        if shown is not None and self._values.get(shown) is None:
            self.value_of(shown)
        for other, value in list(self._values.items()):
            storage = other.untyped_storage()
            first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if first <= begin and begin + nbytes <= end and other.dtype == tensor.dtype:
                if value.memory is not None:
                    self._memories[tensor.untyped_storage()._cdata] = value.memory
                offset = (begin - first) // tensor.itemsize
                view = value, tuple(tensor.shape), tensor.stride(), offset
                about = _About((), "operator", ALIAS)
                self._note(aten.as_strided.default, (view, {}), tensor, about)
                made = self._values[tensor]
                return made
        raise CaptureError(
            f"the operator at {call_site()} uses a tensor of shape {list(tensor.shape)} and "
            f"{tensor.dtype} that the step can't be seen to hold: neither its arguments nor what "
            f"the function, its modules, optimizers and variables refer to. A program would keep "
            f"the tensor as it is now. Pass it as an argument, register it as a buffer, or make it "
            f"with torch's operators inside of the step"
        )

    def _memory_of(self, tensor: Tensor) -> ProgramMemory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = ProgramMemory(storage.nbytes())
        return memory

    def _new_value(self, leaf: Any) -> Value:
        self._count += 1
        if not isinstance(leaf, Tensor):
            value = Value(self._count, text=type(leaf).__name__)
            self._objects[id(leaf)] = leaf, value
            return value
        _refuse_sparse(leaf)
        shape = tuple(leaf.shape)
        name = str(leaf.dtype).removeprefix("torch.")
        facts = f"{name}{list(shape)}", shape, leaf.dtype, leaf.device
        value = Value(self._count, self._memory_of(leaf), *facts)
        self._values[leaf] = value
        return value

    def _keep(self, written: Sequence[Any]) -> None:
        """Copy the memory of inputs that are about to be written for the first time."""
        for tensor in leaves_of(list(written)):
            if not _is_tensor(tensor):
                continue
            memory = self._memory_of(tensor)
            if memory in self.before or memory not in self._input_memories:
                continue
            self.before[memory] = storage_bytes_of(tensor).clone()

    # -- instructions ------------------------------------------------------------------------

    def _note(self, function: Callable[..., Any], inputs: Any, result: Any, about: _About) -> None:
        written, kind, name, nbytes = about
        targets = [leaf for leaf in leaves_of(list(written)) if _is_tensor(leaf)]
        memories = [self._memory_of(tensor) for tensor in targets]
        given = {id(tensor) for tensor in targets}
        outputs: list[Value | None] = []
        for leaf in leaves_of(result):
            is_constant = leaf is None or isinstance(leaf, bool | int | float | str)
            if is_constant or id(leaf) in given:
                outputs.append(None)
                continue
            if _is_tensor(leaf):
                _refuse_sparse(leaf)
                self._forget_storage(leaf, inputs)
            outputs.append(self._new_value(leaf))
        self.graph.has_grad_mode |= torch.is_grad_enabled()
        self.graph.instructions.append(
            Instruction(
                function,
                inputs[0],
                inputs[1],
                outputs,
                _form_of(result),
                tuple(memories),
                kind,
                call_site(),
                name,
                nbytes,
            )
        )

    def _forget_storage(self, tensor: Tensor, inputs: Any) -> None:
        """Forget freed memory at a new tensor's address, unless it is in use."""
        storage = tensor.untyped_storage()._cdata
        memory = self._memories.get(storage)
        if memory is None:
            return
        for leaf in leaves_of(inputs):
            if isinstance(leaf, Value) and leaf.memory is memory:
                return
        del self._memories[storage]

    # -- calls that torch does not show-------------------------------------------------------

    def call(self, function: Callable[..., T], args: Any, kwargs: Any) -> T:
        """Run a call and record it as one instruction, which may write to all tensor arguments."""
        with paused():
            inputs = mapped(self._input, (tuple(args), dict(kwargs)))
            plain_args, plain_kwargs = mapped(plain, (tuple(args), dict(kwargs)))
            written = [leaf for leaf in leaves_of((args, kwargs)) if _is_tensor(leaf)]
            self._keep(written)
            result = function(*plain_args, **plain_kwargs)
            name = function.__name__.lstrip("_")
            self._note(function, inputs, result, _About(written, "call", name))
        return result

    def _keep_of_group_call(self, tensors: tuple[Any, ...], written: Sequence[Any]) -> None:
        mapped(self._input, tensors)
        self._keep(written)

    def _note_group_call(
        self, call: GroupCall, tensors: tuple[Any, ...], written: Sequence[Any]
    ) -> Callable[[], None]:
        work = object() if call.is_async else None
        with paused():
            inputs = mapped(self._input, tensors)
            sent = [leaf for leaf in leaves_of(tensors) if _is_tensor(leaf)]
            nbytes = max((tensor.nbytes for tensor in sent), default=0)
            about = _About(written, "collective", call.text(), nbytes)
            self._note(call, (inputs, {}), work, about)

        def note_wait() -> None:
            if work is not None:
                value = self._objects[id(work)][1]
                self._note(_wait, ((value,), {}), None, _About(written, "wait", "wait"))

        return note_wait


class _About(NamedTuple):
    """Facts of an instruction besides function, arguments and result; see ``Instruction``."""

    #: The tensors that the instruction writes to, or trees of tensors.
    written: Sequence[Any]
    kind: str
    name: str
    nbytes: int = 0


def _shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _listed(tensor: Tensor) -> list[int]:
    return tensor.tolist()


def _refuse_sparse(tensor: Tensor) -> None:
    if tensor.is_nested:
        raise CaptureError(
            f"the step makes a nested tensor at {call_site()}, as the fast path of torch's "
            f"encoders does: a program has plain tensors. Call "
            f"torch.backends.mha.set_fastpath_enabled(False)"
        )
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"the step makes or uses a tensor with layout {tensor.layout} at {call_site()}: a "
            f"program has strided tensors alone. Use dense gradients (sparse=False)"
        )


class _Read:
    """Stands, as the result of ``item()``, for the number that the program reads."""


def _same(number: float) -> float:
    return number


def _wait(work: Any) -> None:
    work.wait()


def _form_of(result: Any) -> str:
    if not isinstance(result, list | tuple):
        return "leaf"
    return "deep" if any(isinstance(each, list | tuple | dict) for each in result) else "flat"


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments to which an operator writes: tensors, and lists of them."""
    found = []
    for position, name in _written_places(func):
        if position is not None and position < len(args):
            found.append(args[position])
        elif name in kwargs:
            found.append(kwargs[name])
    return [each for each in found if each is not None]


@cache
def _written_places(func: Any) -> list[tuple[int | None, str]]:
    """The positions (None: by keyword alone) and names of arguments to which an operator writes."""
    return [
        (None if each.kwarg_only else position, each.name)
        for position, each in enumerate(func._schema.arguments)
        if (each.alias_info is not None and each.alias_info.is_write)
        or position in _UNDECLARED.get(func, ())
    ]
