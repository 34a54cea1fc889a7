"""The step itself as the judge of a record: both run from one state, and all is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tilework.capture.program.graph import Unexpected
from tilework.capture.program.number import value_of
from tilework.capture.program.place import plain
from tilework.capture.program.record import (
    StepRecord,
    bytes_by_storage,
    copies_of,
    generators_of_rank,
    key_of_storage,
)
from tilework.capture.recording.arguments import StepCall, is_size
from tilework.capture.recording.places import StatePlaces
from tilework.capture.recording.tensor_reads import uncompiled
from tilework.comm.operations.internal import uncoalesced
from tilework.dtensor import DTensor
from tilework.dtensor.internal import deferred_grad
from tilework.errors import CaptureError

#: A compiled program may differ from the step by this multiple of the step's own error.
MOST_ERRORS = 4.0
#: Besides, by as many units in the last place, which count sums that are exact by chance.
_LAST_PLACES = 16.0
_Generators = Sequence[tuple[torch.Generator, Tensor]]


def generators_with_states(places: StatePlaces) -> list[tuple[torch.Generator, Tensor]]:
    """The generators of random numbers of this rank and of a step, with the states now."""
    found = [*generators_of_rank(), *places.instances(torch.Generator)]
    return [(each, each.get_state()) for each in found]


def check_new(
    record: StepRecord, kept: Mapping[int, Tensor], generators: _Generators, result: Any
) -> None:
    """Run a new record on copies of the recorded call's inputs, and compare. Collective.

    ``kept`` has the bytes before, by storage that the call wrote to; the generators have their
    states before. Raises a CaptureError if the record gives something else than the step.
    """
    inputs = [each.tensor for each in record.graph.inputs]
    comparison = _Comparison(record, inputs, copies_of(inputs, kept), generators)
    wrong = comparison.first_difference(result)
    if wrong is None:
        return
    if comparison.is_compiled:
        raise CaptureError(
            f"Inductor's program gave another {wrong} than the step itself: use backend='python'"
        )
    raise CaptureError(
        f"a first run of the record gave another {wrong} than the step itself: the step "
        f"computes something that torch's dispatcher does not show, or draws random numbers in "
        f"a way that a record can't repeat. Leave that part out"
    )


def judged_call(record: StepRecord, call: StepCall, inputs: Sequence[Tensor], since: int) -> Any:
    """Run the step itself on the real state, and the record on copies, and compare. Collective.

    ``since`` is the number of the last call that was checked. If a rank's record gives something
    else, a CaptureError raises on all ranks of the record's groups, and the step's effects stay.
    """
    result, wrong = compared_call(record, call, inputs)
    if wrong is None and not record.state_holds(is_after=True):
        wrong = f"state ({record.what_changed()})"
    if all_have(wrong is None, record):
        return result
    where = "another rank's record" if wrong is None else "the record"
    raise CaptureError(
        f"{record.name} was checked against the step itself in call {record.code.calls}, and "
        f"{where} gives another {wrong or 'result'}: since the recording something changed that "
        f"the step reads and the record does not. No call since {since} was checked. The results "
        f"of this call are the step's. Pass what changes as an argument, or keep it in an "
        f"attribute, variable or tensor to which the step refers"
    )


def compared_call(
    record: StepRecord, call: StepCall, inputs: Sequence[Tensor]
) -> tuple[Any, str | None]:
    """Run the step itself on the real state, and the record on copies; return the step's result,
    and the name of a value in which this rank's record differs, or None. Collective.
    """
    kept = bytes_by_storage([inputs[i] for i in record.written])
    places = StatePlaces(call.step)
    untouched = [
        (tensor, tensor._version)
        for tensor in places.plain_tensors()
        if not tensor.is_inference()
        and places.is_users(places.tensors[id(tensor)])
        and key_of_storage(tensor) not in kept
    ]
    generators = generators_with_states(places)
    with uncoalesced(), uncompiled():  # as a program runs
        result = call.run()
    reduce_deferred(places)
    comparison = _Comparison(record, inputs, copies_of(inputs, kept), generators)
    try:
        wrong = comparison.first_difference(result)
    except Unexpected:  # a value takes another branch of the step
        wrong = None
    for tensor, version in untouched:
        if wrong is None and tensor._version != version:
            wrong = f"{places.tensors[id(tensor)].text}, which the record does not write"
    return result, wrong


def all_have(flag: bool, record: StepRecord) -> bool:
    """True if ``flag`` is true on all ranks of the groups of a record. Collective."""
    for group in record.code.groups:
        flag = group.agree(flag)  # collective; each group hears of the groups before
    return flag


def reduce_deferred(places: StatePlaces) -> None:
    """Reduce now the gradients of DTensors that would be reduced when they are read."""
    for place, _ in places.slots:
        if place.how == "grad" and place.owner.__class__ is DTensor:
            deferred = deferred_grad(place.owner)
            if deferred is not None:
                deferred()


class _Comparison:
    """A run of a record on copies of a call's inputs, compared with the step's results."""

    def __init__(
        self,
        record: StepRecord,
        inputs: Sequence[Tensor],
        before: Sequence[Tensor],
        generators: _Generators,
    ) -> None:
        self.record, self.inputs, self.before, self.generators = record, inputs, before, generators
        self.is_compiled = record.is_compiled
        #: Copies of the inputs for a run in float64, which compiled programs are judged by.
        with torch._C.DisableTorchFunctionSubclass():
            self._spare = [x.detach().clone() for x in before] if self.is_compiled else []

    def first_difference(self, result: Any) -> str | None:
        """The name of the first value in which record and step differ; None if there is none."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._first_difference(result)

    def _first_difference(self, result: Any) -> str | None:
        run = self.record.compute
        kept, draws_alike = self._run(lambda: run(self.before, self.record.options_now))
        wrong = None if draws_alike else "number of random draws"
        near: list[tuple[int, str, Tensor, Tensor]] = []
        theirs = map(_as_tensor, self._values(kept, self.before))
        graph = self.record.graph
        mine = [*tree_leaves(result, is_size), *[place.get() for place, _ in graph.places]]
        mine += [self.inputs[i] for i in self.record.written]
        names = ["result"] * len(graph.result) + [place.text for place, _ in graph.places]
        names += [getattr(graph.inputs[i].path, "text", "argument") for i in self.record.written]
        values = zip(names, map(_as_tensor, mine), theirs, strict=True)
        for number, (name, now, again) in enumerate(values):
            if _is_same(now, again):
                continue
            if not self.is_compiled or not _is_comparable(now, again):
                wrong = wrong or name
            elif _apart(now, again) > _floor(now):
                near.append((number, name, now, again))
        if self.is_compiled and not all_have(not near, self.record):
            by_errors = self._beyond_errors(near)
            wrong = wrong or by_errors
        return wrong

    def _run(self, compute: Callable[[], Any]) -> tuple[Any, bool]:
        """Run with the generators as before the step; True if they end as after the step."""
        ends = [(each, each.get_state()) for each, _ in self.generators]
        for generator, state in self.generators:
            generator.set_state(state)
        try:
            result = compute()
            return result, all(torch.equal(each.get_state(), end) for each, end in ends)
        finally:
            for generator, state in ends:
                generator.set_state(state)

    def _values(self, kept: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
        """The values of a run of the record: results, what it puts into places, what it writes."""
        graph = self.record.graph
        leaves = [*graph.result, *[leaf for _, leaf in graph.places]]
        built = [self.record.built(leaf, kept) for leaf in leaves]
        return built + [inputs[i] for i in self.record.written]

    def _beyond_errors(self, near: Sequence[tuple[int, str, Tensor, Tensor]]) -> str | None:
        """The name of the first value beyond errors of rounding. Collective."""
        # A sum may be exact by chance: so rounding of the inputs is followed, too.
        others = [self._in_double(), self._rounded()]
        for number, name, now, again in near:
            errors = [_apart(now, x[number]) for x in others if x and x[number] is not None]
            most = MOST_ERRORS * max(errors, default=_floor(now))
            if _apart(now, again) > most + _floor(now):
                return name
        return None

    def _in_double(self) -> list[Any]:
        """The step's values, computed in float64; empty if the step has no form in float64."""
        try:
            with _InDouble():  # type: ignore[no-untyped-call]
                return self._as_python(list(map(_doubled, self._spare)))
        except (RuntimeError, TypeError):
            return []

    def _rounded(self) -> list[Any]:
        """The step's values, computed from inputs of which each number is rounded otherwise."""
        signs = torch.Generator().manual_seed(0)
        return self._as_python([_shaken(each, signs) for each in self._spare])

    def _as_python(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The values that the program gives by torch's operators from other inputs."""
        run = self.record.compute_as_python
        kept, _ = self._run(lambda: run(inputs, self.record.options_now))
        values = [_as_tensor(value) for value in self._values(kept, inputs)]
        return [value if isinstance(value, Tensor) else None for value in values]


class _InDouble(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block, operators compute in float64 instead of other floats."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_dtype_in_double, (args, kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        # A generator's numbers depend on the dtype that is drawn.
        single = {id(x): x.float() for x in tree_leaves((args, kwargs)) if _is_double(x)}
        given = tree_map(lambda x: single.get(id(x), x), (args, kwargs))
        result = func(*given[0], **given[1])
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in single:
                leaf.copy_(single[id(leaf)])
        return tree_map(_doubled, result)


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _shaken(tensor: Tensor, signs: torch.Generator) -> Tensor:
    """A copy of a tensor of floats with each number a rounding away, up or down."""
    if not tensor.is_floating_point():
        return tensor.clone()
    by = torch.randint(0, 2, tensor.shape, generator=signs, device="cpu").to(tensor.device) * 2 - 1
    return tensor * (1 + by * torch.finfo(tensor.dtype).eps)


def _is_double(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float64


def _dtype_in_double(leaf: Any) -> Any:
    is_float = isinstance(leaf, torch.dtype) and leaf.is_floating_point
    return torch.float64 if is_float else leaf


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, int | float):
        return torch.tensor(value_of(leaf), dtype=torch.float64)
    return plain(leaf).detach() if isinstance(leaf, Tensor) else leaf


def _is_same(now: Any, again: Any) -> bool:
    if not (isinstance(now, Tensor) and isinstance(again, Tensor)):
        is_plain = isinstance(now, str | torch.Size)
        return type(now) is type(again) and (not is_plain or now == again)
    if (now.shape, now.dtype) != (again.shape, again.dtype):
        return False
    is_equal = torch.equal(now, again)
    return is_equal or bool(((now == again) | (now.isnan() & again.isnan())).all())


def _is_comparable(now: Any, again: Any) -> bool:
    """True for two tensors of floats that a compiled program may round in another way."""
    if not (isinstance(now, Tensor) and isinstance(again, Tensor)):
        return False
    return (now.shape, now.dtype) == (again.shape, again.dtype) and now.is_floating_point()


def _apart(now: Tensor, other: Tensor) -> float:
    return _norm(now.double() - other.double())


def _floor(now: Tensor) -> float:
    return _LAST_PLACES * torch.finfo(now.dtype).eps * _norm(now)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().nan_to_num().norm())
