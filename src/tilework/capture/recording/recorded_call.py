"""The call that is recorded, and the record that is made of it."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilework.capture.program.code import ProgramCode
from tilework.capture.program.glue import ProgramConditions
from tilework.capture.program.number import Number, NumberBook, WrongNumberError, value_of
from tilework.capture.program.passes import run_passes
from tilework.capture.program.place import StatePlace
from tilework.capture.program.record import StepRecord, key_of_storage, storage_bytes_of
from tilework.capture.program.same_program import VotingRanks, compare_program
from tilework.capture.program.skeleton import take_apart
from tilework.capture.recording.arguments import StepCall, flatten, is_size, replaced
from tilework.capture.recording.effects import (
    MadeOnce,
    absent,
    changes,
    constants_of,
    identity_of,
    layouts_of_others,
    leaf_of,
    memory_of_dtensors,
    refuse_graphs,
    refuse_snapshots,
    way_to,
)
from tilework.capture.recording.inputs import Inputs
from tilework.capture.recording.judge import (
    all_have,
    check_new,
    compared_call,
    generators_with_states,
    reduce_deferred,
)
from tilework.capture.recording.places import HOOKS_OF_TENSORS, StatePlaces
from tilework.capture.recording.recorder import StepRecorder
from tilework.capture.recording.unseen import Unseen, told_apart
from tilework.errors import CaptureError


class Recording(NamedTuple):
    """Options of a recording.

    Attributes:
        ranks: The ranks that run the step.
        check: True to run a new program once on copies of the inputs, and compare bit by bit.
        compiles: True to compile a new program by Inductor, and compare the results.
        codes: The programs that a record may join.
        numbers: The positions of floats among the leaves that are inputs of the program.
        places: The places of floats that are inputs of the program.
        options: True to make inputs of the floats of optimizers, too.
    """

    ranks: VotingRanks
    check: bool
    compiles: bool = False
    codes: Sequence[ProgramCode] = ()
    numbers: Sequence[int] = ()
    places: Sequence[StatePlace] = ()
    options: bool = True


def record_call(
    call: StepCall,
    how: Recording,
    needed: list[Tensor] | None = None,
    accept: Callable[[StepRecord, Any], None] = lambda record, result: None,
) -> tuple[StepRecord | None, Any]:
    """Run a step, and record it. Collective if the step is.

    The tensors whose gradients the call has taken are added to ``needed``. ``accept`` takes the
    record and the result: if it raises a CaptureError, the call is undone. The record is None if
    the step has made groups or optimizer states, which later calls will not make.
    """
    book, original, record = NumberBook(), call, None
    call, structure, arguments, before = _copied(call, how, book)
    recorder, unseen = StepRecorder(before, book), Unseen(before, original.leaves)
    generators = generators_with_states(before)
    places = how.places if how.options else None
    torch.clear_autocast_cache()  # else weights that were cast before the call are none of the call
    try:
        with Inputs(before, arguments, places, book) as inputs, recorder.recording():
            result = call.run()
            if needed is not None:
                needed += recorder.needed
            reduce_deferred(before)
        unseen.refuse_changes()
        _refuse_changed_containers(call, structure)
        outputs, tree = tree_flatten(result, is_size)
        if not unseen.makes_anything_once():
            _refuse_unknown(outputs, before)
            refuse_snapshots(recorder.graph, call.leaves)
            if needed is None:
                refuse_graphs(outputs, before, recorder)
            recorder.graph.result = [leaf_of(each, recorder) for each in outputs]
            record, is_new = _record_of(call, recorder, inputs, tree, how)
            _check(record, recorder, how, is_new, (generators, result))
            accept(record, result)
            if how.check and needed is None and inputs.lead_beyond(record.graph):
                _undo(recorder, unseen)
                return record, _proven(record, original, generators)
    except MadeOnce:
        pass
    except WrongNumberError:
        raise
    except Exception as error:
        if isinstance(error, CaptureError) or how.options:  # else it is the step's, as uncaptured
            _undo(recorder, unseen)
        raise
    finally:
        recorder.close()
        unseen.close()
    return record, tree_unflatten([value_of(each) for each in outputs], tree)


def _proven(record: StepRecord, call: StepCall, generators: Sequence[tuple[Any, Tensor]]) -> Any:
    """Run the step without Numbers and compare: C++ may branch on a Number's NaN. Collective."""
    for generator, state in generators:
        generator.set_state(state)
    inputs = record.inputs_of(call.leaves)
    if not all_have(inputs is not None, record):
        return call.run()
    assert inputs is not None
    result, wrong = compared_call(record, call, inputs)
    if not all_have(wrong is None, record):
        raise WrongNumberError(wrong or "result on another rank", result)
    return result


def _copied(
    call: StepCall, how: Recording, book: NumberBook
) -> tuple[StepCall, Any, dict[int, Number], StatePlaces]:
    """The call with copied containers, the arguments' structure, the Numbers, and the places."""
    numbers = {i: Number(call.leaves[i], None, (), book) for i in how.numbers}
    places = StatePlaces(call.step, call.leaves)
    # Where no argument is searched, the places are those of the step alone.
    duplicates = told_apart(call.leaves, StatePlaces(call.step) if places.arguments else places)
    args, kwargs = replaced((call.args, call.kwargs), {**duplicates, **numbers})
    leaves, structure = flatten((args, kwargs))
    if duplicates:
        places = StatePlaces(call.step, leaves)
    return call._replace(leaves=leaves, args=args, kwargs=kwargs), structure, numbers, places


def _check(
    record: StepRecord, recorder: StepRecorder, how: Recording, is_new: bool, begun: tuple[Any, Any]
) -> None:
    """Compare a record with the recorded call, and compile the record. Collective."""
    kept = {
        key_of_storage(each.tensor): recorder.before[each.value.memory]
        for each in record.graph.inputs
        if each.value.memory in recorder.before
    }
    if how.check and is_new:
        check_new(record, kept, *begun)
    if how.compiles:
        record.compile([each.tensor for each in record.graph.inputs])
        check_new(record, kept, *begun)


def _record_of(
    call: StepCall, recorder: StepRecorder, inputs: Inputs, tree: Any, how: Recording
) -> tuple[StepRecord, bool]:
    """The record of a call that has ended; True if it runs no ``how.codes``. Collective."""
    graph, before = recorder.graph, recorder.places
    after = StatePlaces(call.step, call.leaves)
    graph.places = list(changes(before, after, recorder))
    known = {
        identity_of(x.place)
        for x in inputs.all
        if isinstance(x.place, StatePlace) and x.part is None
    }
    unread = () if graph.has_grad_mode else HOOKS_OF_TENSORS  # they run in backward passes
    constants = [
        (place, value)
        for place, value in chain(
            constants_of(before, after, graph), inputs.constants, absent(before, graph)
        )
        if identity_of(place) not in known and place.key not in unread
    ]
    graph = run_passes(graph)
    skeleton = take_apart(graph, inputs.all)
    joined = next((code for code in how.codes if code.skeleton.fits(skeleton)), None)
    number = None if joined is None else joined.digests.number
    digests, is_joined = compare_program(graph, call.name, how.ranks, number)
    if joined is not None and is_joined:
        code = joined
        code.join(skeleton)
    else:
        code = ProgramCode(call.name, graph, inputs.all, digests, skeleton)
    constants += memory_of_dtensors(after)
    constants += layouts_of_others(graph, before)
    way = [*inputs.way, *way_to(graph, before, after)]
    guards = recorder.book.guards_once()
    held = ProgramConditions(inputs.all, way, constants, guards)
    record = StepRecord(call.name, graph, tree, held, code, skeleton.constants)
    return record, not is_joined


def _refuse_changed_containers(call: StepCall, structure: Any) -> None:
    """Refuse a step that changes a list or dict among the arguments."""
    leaves, now = flatten((call.args, call.kwargs))
    if now != structure or not all(map(operator.is_, leaves, call.leaves)):
        raise CaptureError(
            f"the step {call.name} changes a list or dict among its arguments: a program would not "
            f"do this again, since the step's Python does not run. Change and return a copy "
            f"(dict(x), list(x)); a list of tensors that a later call reads may be an attribute or "
            f"a variable of the step instead"
        )


def _refuse_unknown(outputs: Sequence[Any], places: StatePlaces) -> None:
    """Refuse results that the step has made, other than tensors and constants."""
    for leaf in outputs:
        known = isinstance(leaf, Tensor | torch.dtype | torch.device | torch.Size | None)
        if not known and not places.holds(leaf):
            raise CaptureError(
                f"the step makes and returns an object of class {type(leaf).__name__}: a program "
                f"would return the same object, with the tensors of this call, again and again. "
                f"Return tensors and numbers, or tuples, lists and dicts of them"
            )


def _undo(recorder: StepRecorder, unseen: Unseen) -> None:
    """Undo what a step that cannot become a program has written and changed. Local."""
    unseen.undo()
    for each in recorder.graph.inputs:
        memory = each.value.memory
        kept = None if memory is None else recorder.before.pop(memory, None)
        if kept is not None:
            storage_bytes_of(each.tensor).copy_(kept)
    places = recorder.places
    for place, then in (*places.things, *places.constants, *places.slots):
        place.put_back(then)
    for container, items in places.containers:
        if len(container) != len(items) or not all(map(operator.is_, container, items)):
            container.clear()
            fill = container.extend if isinstance(container, list | deque) else container.update
            fill(items)
