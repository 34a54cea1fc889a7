"""The table of collectives, beside the methods of groups that it describes."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

import tilework.distributed as dist
from tests.tables import each
from tilework.comm.contract import CompletedWork, ProcessGroup, Work
from tilework.comm.flight import history
from tilework.comm.forms import FORMS, Form, Operation, Parts
from tilework.comm.operations import collectives

ALL = list(FORMS.values())


def tensors_of(form: Form) -> Operation:
    """A call on the root of a group of two ranks."""
    one, both = torch.ones(2), torch.ones(4)
    given: dict[str, Parts] = {"none": (), "one": one, "each": [one, one], "whole": both}
    inputs, outputs = given[form.inputs.parts], given[form.outputs.parts]
    return Operation(form.kind, inputs, outputs, title=form.name)


@each("form", ALL)
def test_a_methods_arguments_stand_for_the_call(form: Form) -> None:
    call = tensors_of(form)
    (same,) = form.operations(form.arguments(call))
    assert same == call


def test_the_histories_of_flights_know_the_table() -> None:
    others = {form.name: form.kind for form in ALL if form.name != form.kind}
    assert others.items() <= history.ALIASES.items()
    assert tuple(form.kind for form in ALL if form.in_place) == history.ELEMENTWISE


@each("form", ALL)
def test_each_form_is_a_function_and_a_method(form: Form) -> None:
    assert hasattr(collectives, form.name)
    method = getattr(ProcessGroup, form.method)
    assert (method.__name__, bool(method.__doc__)) == (form.method, True)


class OneMethod(ProcessGroup):
    """A backend that has one operation, in the way of torch's backends."""

    seen: ClassVar[list[object]] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: dist.Options | None = None) -> Work:
        self.seen.append((tensors, opts))
        return CompletedWork(tensors)


def test_a_backend_may_override_methods_as_torchs_backends_do() -> None:
    group, x = OneMethod(0, 1), torch.ones(1)
    opts = dist.Options(dist.ReduceOp.MAX)
    group.allreduce([x], opts)
    assert group.start(Operation("all_reduce", x, x, dist.ReduceOp.MAX)).result() == [x]
    assert group.seen == [([x], opts)] * 2
    with pytest.raises(NotImplementedError, match="does not implement barrier"):
        group.barrier()
