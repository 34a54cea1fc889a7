"""The call that is recorded, and the check of the record."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilework.capture.program.glue import ProgramConditions
from tilework.capture.program.graph import Graph, Input, ProgramMemory
from tilework.capture.program.number import value_of
from tilework.capture.program.place import Argument, StatePlace, is_dtensor, key_of_constant, plain
from tilework.capture.program.record import StepRecord
from tilework.capture.program.same_program import compare_program
from tilework.capture.program.sizes import Different, Unifier, first_difference, has_size
from tilework.capture.recording.options import OptimizerOptions
from tilework.capture.recording.places import StatePlaces
from tilework.capture.recording.recorder import StepRecorder, storage_bytes_of
from tilework.capture.recording.unseen import Unseen, told_apart
from tilework.comm.world import current_world
from tilework.dtensor.tensor import DTensor
from tilework.errors import CaptureError


class _PlacesOfCall(StatePlaces):
    """The places that a call can reach: those of the step, and those of the arguments.

    Args:
        step: The step.
        leaves: The leaves of the arguments.
    """

    def __init__(self, step: Callable[..., Any], leaves: Sequence[Any]) -> None:
        known = Tensor | bool | int | float | str | None
        super().__init__(step, [leaf for leaf in leaves if not isinstance(leaf, known)])
        self._numbers: dict[int, Argument] = {}
        for number, leaf in enumerate(leaves):
            is_dtensor = leaf.__class__ is DTensor
            if isinstance(leaf, Tensor):
                tensor = Argument(number, is_dtensor).of(leaves)
                self._numbers[id(tensor)] = Argument(number, is_dtensor)

    def add_argument(self, tensor: Any, number: int) -> None:
        """Treat a tensor as the argument with this number, beyond the given ones."""
        argument = Argument(number, is_dtensor(tensor))
        self._numbers[id(plain(tensor))] = argument

    def find(self, tensor: Tensor) -> Any:
        return self._numbers.get(id(tensor)) or super().find(tensor)


class StepCall(NamedTuple):
    """A call of a step.

    Attributes:
        step: The step.
        name: The name of the step.
        leaves: The leaves of the arguments.
        args: The arguments.
        kwargs: The keyword arguments.
    """

    step: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the step itself, and return the result."""
        return self.step(*self.args, **self.kwargs)


def record_call(
    call: StepCall,
    check: bool,
    compiles: bool = False,
    needed: list[Tensor] | None = None,
    accept: Callable[[StepRecord, Any], None] = lambda record, result: None,
) -> tuple[StepRecord | None, Any]:
    """Run a step, and record it. Collective if the step is.

    Args:
        call: The call to run.
        check: True to run the record once on copies of the inputs, and compare bit by bit.
        compiles: True to compile the record by Inductor, and compare the results.
        needed: A list to which the tensors are added whose gradients the call has taken.
        accept: Takes the record and the result. If it raises a CaptureError, the call is undone.

    Returns:
        The record and the result. The record is None if the step has made groups or optimizer
        states, which later calls will not make.
    """
    given = call.leaves
    leaves = told_apart(given, StatePlaces(call.step))
    structure = tree_flatten((call.args, call.kwargs))[1]
    args, kwargs = tree_unflatten(leaves, structure)
    call = call._replace(leaves=leaves, args=args, kwargs=kwargs)
    before = _PlacesOfCall(call.step, call.leaves)
    recorder = StepRecorder(before)
    unseen = Unseen(before, given)
    generators = [(each, each.get_state()) for each in [*_generators(), *before.generators()]]
    try:
        schedulers = before.instances(LRScheduler)
        changing = OptimizerOptions(before.instances(Optimizer), schedulers, recorder.book)
        with changing as options, recorder.recording():
            result = call.run()
            if needed is not None:
                needed += recorder.needed
            _reduce_deferred(before)
        unseen.refuse_changes()
        _refuse_changed_containers(call, structure)
        outputs, tree = tree_flatten(result)
        if unseen.makes_anything_once():
            return None, tree_unflatten([value_of(each) for each in outputs], tree)
        _refuse_unknown(outputs, before)
        recorder.graph.result = [_leaf(each, recorder) for each in outputs]
        record = _record_of(call, recorder, before, options, tree)
        begun = (record.graph.inputs, recorder.before), generators, result
        if check:
            _check(record, begun)
        if compiles:
            record.compile([each.tensor for each in record.graph.inputs])
            _check(record, begun, compiled=True)
        accept(record, result)
    except CaptureError:
        unseen.undo()
        _undo(recorder, before)
        raise
    finally:
        recorder.close()
        unseen.close()
    return record, tree_unflatten([value_of(each) for each in outputs], tree)


def _record_of(
    call: StepCall,
    recorder: StepRecorder,
    before: StatePlaces,
    options: OptimizerOptions,
    tree: Any,
) -> StepRecord:
    """Make the record of a call that has ended. Collective over the groups of its collectives."""
    graph = recorder.graph
    after = _PlacesOfCall(call.step, call.leaves)
    graph.places = list(_changes(before, after, recorder))
    constants = [*_constants(before, after), *options.constants, *_absent(before, graph)]
    graph.drop_dead()
    digests = compare_program(graph, call.name)
    way = [*options.way, *_way_to(graph, before, after)]
    guards = list(dict.fromkeys(recorder.book.guards))
    return StepRecord(
        call.name, graph, digests, tree, ProgramConditions(options.all, way, constants, guards)
    )


def _check(record: StepRecord, begun: Any, compiled: bool = False) -> None:
    """Run a record on copies of the step's inputs, and compare. Collective if the step is.

    Raises:
        CaptureError: Values differ in a bit, or, if compiled, by more than rounding.
    """
    (inputs, kept), generators, result = begun
    states = inputs, _before(inputs, kept)
    same = _nearly if compiled else _same_bits
    wrong = _differing(record, states, generators, result, same=same)
    if wrong is not None and compiled:
        raise CaptureError(
            f"Inductor's program gave another {wrong} than the step itself, by more than sums in "
            f"another order can: use backend='python'"
        )
    if wrong is not None:
        raise CaptureError(
            f"a first run of the record gave another {wrong} than the step itself: the step "
            f"computes something that torch's dispatcher does not show, or draws random numbers in "
            f"a way that a record can't repeat. Leave that part out"
        )


def _generators() -> list[torch.Generator]:
    own = current_world().generator
    found = [torch.default_generator if own is None else own]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return found


def _reduce_deferred(places: StatePlaces) -> None:
    """Reduce the gradients of DTensors now, whose reduction would wait until they are read."""
    for place, _ in places.slots:
        if place.how == "grad" and place.owner.__class__ is DTensor:
            deferred = place.owner._deferred_grad
            if deferred is not None:
                deferred()


def _refuse_changed_containers(call: StepCall, structure: Any) -> None:
    """Refuse a step that changes a list or dict among the arguments.

    Raises:
        CaptureError: The step has put something into a container, or taken something out.
    """
    leaves, now = tree_flatten((call.args, call.kwargs))
    if now != structure or not all(map(operator.is_, leaves, call.leaves)):
        raise CaptureError(
            f"the step {call.name} changes a list or dict among its arguments: a program would not "
            f"do this again, since the step's Python does not run. Change and return a copy "
            f"(dict(x), list(x)); a list of tensors that a later call reads may be an attribute or "
            f"a variable of the step instead"
        )


def _refuse_unknown(outputs: Sequence[Any], places: StatePlaces) -> None:
    """Refuse results that the step has made, other than tensors and constants of Python.

    Raises:
        CaptureError: A later call would return the object of the recorded call.
    """
    for leaf in outputs:
        known = isinstance(leaf, Tensor | torch.dtype | torch.device | None)
        if not known and not places.holds(leaf):
            raise CaptureError(
                f"the step makes and returns an object of class {type(leaf).__name__}: a program "
                f"would return the same object, with the tensors of this call, again and again. "
                f"Return tensors and numbers, or tuples, lists and dicts of them"
            )


def _leaf(leaf: Any, recorder: StepRecorder) -> Any:
    """The stand-in in the program for a leaf of the result: a value, a Number, or the leaf."""
    if leaf.__class__ is DTensor:
        value = recorder.value_of(leaf._local_tensor)
        return "dtensor", value, leaf._spec, leaf._digest or 0
    if isinstance(leaf, Tensor):
        return recorder.value_of(leaf)
    return recorder.book.find(leaf) if type(leaf) is float else leaf


def _changes(
    before: StatePlaces, after: StatePlaces, recorder: StepRecorder
) -> Iterator[tuple[StatePlace, Any]]:
    """The places that hold other tensors after the step, and what stands for the new tensors.

    Raises:
        CaptureError: A program could not put a tensor there, as into a growing list.
    """
    then = {_identity(place): tensor for place, tensor in before.slots}
    read = {_identity(x.path) for x in recorder.graph.inputs if isinstance(x.path, StatePlace)}
    for place, tensor in after.slots:
        known = then.get(_identity(place), _identity)
        if tensor is known:
            continue
        if known is _identity and tensor is None:
            continue
        if isinstance(place.owner, list | deque) and known is _identity and after.is_users(place):
            raise CaptureError(
                f"the step puts a tensor into the list {place.text}: a program would do so to one "
                f"place again and again. Return the tensor, and append it after the call"
            )
        if place.how == "item" and isinstance(place.owner, tuple):
            if after.is_users(place):
                raise CaptureError(
                    f"the step makes a tuple with the tensor {place.text}: a program reads and "
                    f"writes tensors alone. Keep each tensor in a separate attribute or "
                    f"variable, or pass and return them"
                )
            continue
        if not after.is_users(place) and _identity(place) not in read:
            continue
        yield place, (tensor if tensor is None else _leaf(tensor, recorder))
    for place, tensor in before.slots:
        if place.how == "grad" and tensor is not None and place.get() is None:
            yield place, None


def _identity(place: StatePlace) -> tuple[int, str, Any]:
    key = place.key if isinstance(place.key, str | int | type(None)) else id(place.key)
    return id(place.owner), place.how, key


def _constants(before: StatePlaces, after: StatePlaces) -> list[tuple[StatePlace, Any]]:
    """The numbers, texts and flags at places, with the values that later calls must find there.

    Raises:
        CaptureError: The step has changed a number, text or flag of the user's program.
    """
    now = {_identity(place): value for place, value in after.constants}
    kept = []
    for place, value in before.constants:
        is_now = now.get(_identity(place), _identity)
        is_length = place.how == "length" and not isinstance(place.owner, list | deque)
        if is_now is value or (type(is_now) is type(value) and is_now == value) or is_length:
            kept.append((place, value))
            continue
        to = "another object" if is_now is _identity else repr(is_now)
        if place.how == "length":
            raise CaptureError(
                f"the step changes {place.text} from {value} to {to}: a program would not do "
                f"this again. Return what is appended, and do it after the call"
            )
        owner = type(place.owner) if place.how == "attribute" else None
        if isinstance(place.owner, dict) and not place.text.isidentifier():
            owner = before.kind_of(place)
        if owner is not None and owner.__module__.startswith("tilework."):
            continue  # a count that the library keeps
        is_checksum = place.how == "content" and isinstance(value, int)
        values = "" if is_checksum else f", from {value!r} to {to}"
        raise CaptureError(
            f"the step changes {place.text} in Python{values}: a program "
            f"would not do this again, since its Python does not run. Do it outside of the step, "
            f"or keep the number in a tensor"
        )
    return kept


def _absent(before: StatePlaces, graph: Graph) -> Iterator[tuple[StatePlace, Any]]:
    """Conditions that places are empty before each call, as before the recorded call.

    A step would do something else if a gradient, or an item that it makes, were there already.
    """
    then = {_identity(place) for place, _ in before.slots}
    yield from ((place, None) for place, tensor in before.slots if tensor is None)
    for place, _ in graph.places:
        if isinstance(place.owner, dict) and _identity(place) not in then:
            length = StatePlace(
                place.owner, "length", None, f"the number of items with {place.text}"
            )
            yield length, before.lengths.get(id(place.owner), 0)


def _way_to(graph: Graph, places: StatePlaces, after: StatePlaces) -> list[tuple[StatePlace, Any]]:
    """The objects that lead to a program's inputs, and others that the step may have used.

    Raises:
        CaptureError: The step has replaced an object that leads to an input.
    """
    now = {_identity(place): thing for place, thing in after.things}
    found: dict[Any, tuple[StatePlace, Any]] = {}
    for place, thing in places.things:
        if now.get(_identity(place), _identity) is thing:
            found[_identity(place)] = place, thing
        else:
            _refuse_replaced(place, thing, places)
    for each in graph.inputs:
        if isinstance(each.path, StatePlace):
            tensor = each.path.owner if each.is_local else each.tensor
            others = places.others_of(tensor, each.path)
            if each.may_change:
                each.others = others
            found.update(
                {_identity(place): (place, tensor) for place in others if not each.may_change}
            )
            for place, thing in places.way_to(each.path):
                if now.get(_identity(place), thing) is not thing:
                    raise CaptureError(
                        f"the step reads {each.path.text} and replaces {place.text}, a "
                        f"{type(thing).__name__}: a program reads and writes tensors alone. Keep "
                        f"each tensor in an attribute or variable, or pass and return them"
                    )
                found.setdefault(_identity(place), (place, thing))
    return list(found.values())


def _refuse_replaced(place: StatePlace, thing: Any, places: StatePlaces) -> None:
    """Refuse a step that has put something else in a place of the user's program.

    An object or container that the step has made is no state of the step: a program writes the
    tensors in it.

    Raises:
        CaptureError: The new object was at another place before, or it is a plain value.
    """
    try:
        now = place.get()
    except LookupError:
        now = None
    if now is thing or places.kind_of(place).__module__.startswith("tilework."):
        return
    has_parts = isinstance(now, list | dict | set | deque | tuple) or hasattr(now, "__dict__")
    if (has_parts and not places.knows(now)) or (not has_parts and now == thing):
        return
    raise CaptureError(
        f"the step replaces {place.text}, a {type(thing).__name__}, in Python: a program would not "
        f"do this again, since its Python does not run. Do it outside of the step, or choose by an "
        f"argument"
    )


def _before(found: Sequence[Input], kept: dict[ProgramMemory, Tensor]) -> list[Tensor]:
    """The inputs as they were before the step; copies, if the step wrote to the memory."""
    storages = {memory: saved.clone().untyped_storage() for memory, saved in kept.items()}
    before = []
    for each in found:
        tensor: Tensor = each.tensor.detach()
        storage = None if each.value.memory is None else storages.get(each.value.memory)
        if storage is not None:
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.set_(storage, *place)
        before.append(tensor)
    return before


def run_checked(
    record: StepRecord, call: StepCall, size: int, compiles: bool
) -> tuple[bool | None, Any]:
    """Run a step itself, and the program of several sizes on copies of the step's inputs.

    Collective if the step is.

    Args:
        record: The program for several sizes.
        call: The call.
        size: The size in the call.
        compiles: True to compile the program by Inductor, and compare the compiled program, too.

    Returns:
        True if the step and the program gave the same, else False; and the step's result. Both are
        None if the conditions of the program do not hold: nothing was run.
    """
    inputs = record.inputs_of(call.leaves)
    if inputs is None:
        return None, None
    written = {memory for each in record.graph.instructions for memory in each.writes}
    kept: dict[ProgramMemory, Tensor] = {}
    found: list[Input] = []
    for each, tensor in zip(record.graph.inputs, inputs, strict=True):
        found.append(Input(each.value, each.path, tensor, each.layout))
        memory = each.value.memory
        if memory is not None and memory in written and memory not in kept:
            kept[memory] = storage_bytes_of(tensor).clone()
    generators = [(each, each.get_state()) for each in _generators()]
    result = call.run()
    states = found, _before(found, kept)
    is_right = _differing(record, states, generators, result, size) is None
    if compiles:
        states = found, _before(found, kept)
        record.compile(states[1], size)
        wrong = _differing(record, states, generators, result, size, _nearly)
        is_right = is_right and wrong is None
    return is_right, result


def _differing(
    record: StepRecord,
    inputs: tuple[Sequence[Input], Sequence[Tensor]],
    generators: Sequence[tuple[torch.Generator, Tensor]],
    result: Any,
    size: int | None = None,
    same: Callable[[Tensor, Tensor], bool] | None = None,
) -> str | None:
    """Run a record on copies of a call's inputs, and compare. Collective if the step is.

    Args:
        record: The record.
        inputs: The inputs after the call, and before it: in other memory if the call wrote to
            them.
        generators: Generators of random numbers, with their states before the call.
        result: The result of the step itself.
        size: The size, for a record of several sizes.
        same: Compares two tensors; None: bit by bit.

    Returns:
        The name of a value that differs between the step and the record; None if all are equal.
    """
    same = same or _same_bits
    ends = [(each, each.get_state()) for each, _ in generators]
    for generator, state in generators:
        generator.set_state(state)
    kept = record.compute(inputs[1], [option.get() for option in record.options], size)
    for generator, state in ends:
        generator.set_state(state)
    actual = [*tree_leaves(result), *[place.get() for place, _ in record.graph.places]]
    expected = [*record.graph.result, *[leaf for _, leaf in record.graph.places]]
    names = ["result"] * len(record.graph.result)
    names += [place.text for place, _ in record.graph.places]
    for name, now, leaf in zip(names, actual, expected, strict=True):
        again = record.built(leaf, kept, size)
        if isinstance(now, int | float):
            now, again = [torch.tensor(value_of(x), dtype=torch.float64) for x in (now, again)]
        if isinstance(now, Tensor) and not same(plain(now), plain(again)):
            return name
    written = {memory for each in record.graph.instructions for memory in each.writes}
    for each, copy in zip(*inputs, strict=True):
        is_copy = each.value.memory in written and each.tensor.data_ptr() != copy.data_ptr()
        if is_copy and not same(each.tensor, copy):
            return each.path.text if isinstance(each.path, StatePlace) else "argument"
    return None


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = one.detach(), other.detach()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _nearly(one: Tensor, other: Tensor) -> bool:
    """True if tensors are so close that rounding, amplified by an optimizer, may be the cause."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if not one.is_floating_point() or not one.numel():
        return True
    one, other = one.detach().double(), other.detach().double()
    apart = (one - other).nan_to_num().norm()
    return bool(apart <= 0.05 * one.nan_to_num().norm() + 1e-4)


def _undo(recorder: StepRecorder, places: StatePlaces) -> None:
    """Undo what a step that cannot become a program has written and changed. Local."""
    for each in recorder.graph.inputs:
        memory = each.value.memory
        kept = None if memory is None else recorder.before.pop(memory, None)
        if kept is not None:
            storage_bytes_of(each.tensor).copy_(kept)
    for place, then in (*places.things, *places.constants, *places.slots):
        place.put_back(then)


# -- several sizes ---------------------------------------------------------------------------


def _facts(held: ProgramConditions) -> dict[Any, Any]:
    """By place, what must be there for a record to hold."""
    facts: dict[Any, Any] = {_identity(place): id(thing) for place, thing in held.way}
    facts.update({_identity(place): key_of_constant(value) for place, value in held.constants})
    return facts


def all_have(flag: bool, record: StepRecord) -> bool:
    """True if ``flag`` is true on all ranks of the groups of a record. Collective."""
    votes = [group.agree(flag) for group in record.groups]  # each is collective
    return all(votes) if votes else flag


def unified(one: StepRecord, other: StepRecord) -> StepRecord | None:
    """A program for several sizes from two records; None if they differ in more. Local."""
    sizes = first_difference(one.signature, other.signature)
    if sizes is None or one.is_checked or other.is_checked or one.tree != other.tree:
        return None
    if _facts(one.held) != _facts(other.held):
        return None
    unifier = Unifier(sizes)
    try:
        signature = unifier.tree(one.signature, other.signature)
        graph = unifier.graph(one.graph, other.graph)
    except Different:
        return None
    record = StepRecord(one.name, graph, one.digests, one.tree, one.held)
    record.signature, record.made_of = signature, (one, other)
    record.signature_has_places = has_size(signature[1])
    return record
