"""The effects of a recorded step on state, and the conditions that follow from the state."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Parameter

from tilework.capture.program.graph import Graph
from tilework.capture.program.place import StatePlace, memory_layout_of, plain
from tilework.capture.recording.places import StatePlaces, is_of_library
from tilework.capture.recording.recorder import StepRecorder
from tilework.dtensor import DTensor
from tilework.dtensor.internal import given_digest, layout_of, local_tensor_of
from tilework.errors import CaptureError


def leaf_of(leaf: Any, recorder: StepRecorder) -> Any:
    """The stand-in in the program for a leaf of the result: a value, a Number, or the leaf."""
    if leaf.__class__ is DTensor:
        value = recorder.value_of(local_tensor_of(leaf))
        return "dtensor", value, layout_of(leaf), given_digest(leaf)
    if isinstance(leaf, Tensor):
        value, kind = recorder.value_of(leaf), type(leaf)
        if kind in (Tensor, Parameter) or kind.__module__.startswith("tilework."):
            return value
        if vars(leaf) or "__torch_dispatch__" in vars(kind):
            raise CaptureError(
                f"the step makes a {kind.__name__} with further attributes: a program makes "
                f"tensors alone. Return the tensor, as x.as_subclass(torch.Tensor)"
            )
        return "as", value, kind
    return recorder.book.find(leaf) if type(leaf) is float else leaf


def changes(
    before: StatePlaces, after: StatePlaces, recorder: StepRecorder
) -> Iterator[tuple[StatePlace, Any]]:
    """The places that hold other tensors after the step, with sources; others are refused."""
    then = {identity_of(place): tensor for place, tensor in before.slots}
    read = {identity_of(x.path) for x in recorder.graph.inputs if isinstance(x.path, StatePlace)}
    for place, tensor in after.slots:
        key = identity_of(place)
        if tensor is then.get(key):
            continue
        if after.is_users(place):
            _refuse_put(place, key not in then)
        elif isinstance(place.owner, tuple) or key not in read:
            continue
        yield place, (tensor if tensor is None else leaf_of(tensor, recorder))
    for place, tensor in before.slots:
        if place.how == "grad" and tensor is not None and place.get() is None:
            yield place, None


def _refuse_put(place: StatePlace, is_new: bool) -> None:
    """Refuse a tensor in a place that a program cannot fill: a new list item, a tuple item."""
    if is_new and isinstance(place.owner, list | deque):
        raise CaptureError(
            f"the step puts a tensor into the list {place.text}: a program would do so to one "
            f"place again and again. Return the tensor, and append it after the call"
        )
    if isinstance(place.owner, tuple):
        raise CaptureError(
            f"the step makes a tuple with the tensor {place.text}: a program reads and writes "
            f"tensors alone. Keep each tensor in a separate attribute or variable, or pass and "
            f"return them"
        )


def identity_of(place: StatePlace) -> tuple[int, str, Any]:
    """A key that is equal for equal places."""
    key = place.key if isinstance(place.key, str | int | type(None)) else id(place.key)
    return id(place.owner), place.how, key


def constants_of(
    before: StatePlaces, after: StatePlaces, graph: Graph
) -> list[tuple[StatePlace, Any]]:
    """The numbers, texts and flags at places, with the values that later calls must find there.

    Where the step has changed an integer, text or flag, the program does so, too: a later call that
    finds the value of before the recorded call leaves the value of after it. Changed floats, and
    containers of another length or content, are refused.
    """
    now = {identity_of(place): value for place, value in after.constants}
    tensors = {identity_of(place) for place, tensor in after.slots if tensor is not None}
    kept = []
    for place, value in before.constants:
        is_now = now.get(identity_of(place), identity_of)
        if _may_stay(place, value, is_now) or (value is None and identity_of(place) in tensors):
            kept.append((place, value))
        elif before.kind_of(place).__module__.startswith("tilework."):
            continue  # a count that the library keeps
        elif isinstance(is_now, int | str | None) and place.how in ("item", "attribute", "cell"):
            graph.places.append((place, is_now))
            kept.append((place, value))
        else:
            _refuse_changed(place, value, is_now)
    return kept


def _may_stay(place: StatePlace, value: Any, now: Any) -> bool:
    """True if a value is as before, or is the length of a dict, into which a program may put."""
    is_length = place.how in ("length", "keys") and not isinstance(place.owner, list | deque)
    return is_length or now is value or (type(now) is type(value) and now == value)


def _refuse_changed(place: StatePlace, value: Any, now: Any) -> NoReturn:
    """Refuse a change in Python that a program would not repeat."""
    to = "another object" if now is identity_of else repr(now)
    if place.how == "length":
        raise CaptureError(
            f"the step changes {place.text} from {value} to {to}: a program would not do "
            f"this again. Return what is appended, and do it after the call"
        )
    is_checksum = place.how == "content" and isinstance(value, int)
    values = "" if is_checksum else f", from {value!r} to {to}"
    raise CaptureError(
        f"the step changes {place.text} in Python{values}: a program "
        f"would not do this again, since its Python does not run. Do it outside of the step, "
        f"or keep the number in a tensor"
    )


def absent(before: StatePlaces, graph: Graph) -> Iterator[tuple[StatePlace, Any]]:
    """Conditions that what was absent in the recorded call, and the step makes, is absent again."""
    then = {identity_of(place) for place, _ in (*before.slots, *before.constants)}
    yield from ((place, None) for place, tensor in before.slots if tensor is None)
    for place, _ in graph.places:
        if isinstance(place.owner, dict) and identity_of(place) not in then:
            yield StatePlace(place.owner, "presence", place.key, place.text), False


def way_to(graph: Graph, places: StatePlaces, after: StatePlaces) -> list[tuple[StatePlace, Any]]:
    """The objects on the way to a program's inputs; refuses a step that replaced them."""
    now = {identity_of(place): thing for place, thing in after.things}
    found: dict[Any, tuple[StatePlace, Any]] = {}
    for place, thing in places.things:
        if now.get(identity_of(place), identity_of) is thing:
            found[identity_of(place)] = place, thing
        else:
            _refuse_replaced(place, thing, places)
    for each in graph.inputs:
        if isinstance(each.path, StatePlace):
            tensor = each.path.owner if each.is_local else each.tensor
            others = places.others_of(tensor, each.path)
            if each.may_change:
                each.others = others
            found.update(
                {identity_of(place): (place, tensor) for place in others if not each.may_change}
            )
            for place, thing in places.way_to(each.path):
                if now.get(identity_of(place), thing) is not thing:
                    if type(thing).__module__.startswith("tilework."):
                        raise MadeOnce
                    raise CaptureError(
                        f"the step reads {each.path.text} and replaces {place.text}, a "
                        f"{type(thing).__name__}: a program reads and writes tensors alone. Keep "
                        f"each tensor in an attribute or variable, or pass and return them"
                    )
                found.setdefault(identity_of(place), (place, thing))
    return list(found.values())


def _refuse_replaced(place: StatePlace, thing: Any, places: StatePlaces) -> None:
    """Refuse an old object or a plain value that the step has put in a place of state."""
    try:
        now = place.get()
    except LookupError:
        now = None
    if is_of_library(thing):  # a hook
        return
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


class MadeOnce(Exception):
    """The library has made an object in this call that later calls will reuse: do not record it."""


class HasGraphError(CaptureError):
    """The step leaves a tensor from which a backward pass could continue."""


def refuse_graphs(outputs: Sequence[Any], places: StatePlaces, recorder: StepRecorder) -> None:
    """Refuse results and states from which a backward pass could continue after the step.

    A program has no graph. One through which the step has gone backward is no loss: torch freed it.
    """
    kept = [(place.text, tensor) for place, tensor in set_by(places)]
    results = [("a result", each) for each in outputs]
    for name, tensor in (*results, *kept):
        node = plain(tensor).grad_fn if isinstance(tensor, Tensor) else None
        if node is not None and _is_alive(node, recorder.passed):
            raise HasGraphError(
                f"{name} of shape {list(tensor.shape)} has a graph after the step, and a program "
                f"has none: from the third call on nothing would go backward into the step. Put "
                f"the loss and backward() into the step; or, for a result that needs no gradient, "
                f"run the step under torch.no_grad() or return detach()"
            )


def set_by(places: StatePlaces) -> Iterator[tuple[StatePlace, Tensor]]:
    """The tensors that the step has put into places of the user's program."""
    for place, before in places.slots:
        if place.how == "grad" or not places.is_users(place):
            continue
        try:
            now = place.get()
        except LookupError:
            continue
        if isinstance(now, Tensor) and now is not before:
            yield place, now


def _is_alive(node: Any, passed: set[Any]) -> bool:
    """True if a backward pass from a node of autograd's graph could run. Local."""
    todo, seen, has_saved = [node], {node}, False
    while todo:
        each = todo.pop()
        kind: Any = type(each)
        for name in _saved_names(kind):
            try:
                saved = getattr(each, name)
            except RuntimeError:  # it was freed
                return False
            has_saved = has_saved or isinstance(saved, Tensor)
        for following, _ in each.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return has_saved or node not in passed


@cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else tuple(names)


def layouts_of_others(graph: Graph, places: StatePlaces) -> Iterator[tuple[StatePlace, Any]]:
    """Conditions that tensors which no operator reads keep their shapes and dtypes."""
    inputs = {id(each.tensor) for each in graph.inputs}
    written = {identity_of(place) for place, _ in graph.places}
    for place, tensor in places.slots:
        if tensor is None or place.how == "grad" or not places.is_users(place):
            continue
        if id(plain(tensor)) not in inputs and identity_of(place) not in written:
            layout = StatePlace(place, "layout", None, f"the layout of {place.text}")
            yield layout, memory_layout_of(plain(tensor))


def refuse_snapshots(graph: Graph, leaves: Sequence[Any]) -> None:
    """Refuse outside DTensors whose elements had to move: programs would read the old copy."""
    owners = [each.path.owner for each in graph.inputs if each.is_local]
    for owner in (*leaves, *owners):
        if isinstance(owner, DTensor) and owner.is_snapshot:
            raise CaptureError(
                f"the step reads {owner!r}, a view from outside the step whose elements had to "
                f"move between ranks: a program could not see later writes to the base. Make the "
                f"view in the step, or pass a clone() of it"
            )


def memory_of_dtensors(after: StatePlaces) -> Iterator[tuple[StatePlace, Any]]:
    """Conditions that DTensors to which the step refers keep their memory.

    Units of ``fully_shard`` read separate memory, and check in each call of the step that the
    parameters still use it.
    """
    for place, tensor in after.slots:
        if tensor.__class__ is DTensor and place.how != "grad" and after.is_users(place):
            address = StatePlace(tensor, "address", None, f"the memory of {place.text}")
            yield address, address.get()
