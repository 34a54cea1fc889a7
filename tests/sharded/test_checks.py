"""What an operator that sharded tensors do not have says, and small checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.sharded.ranks_and_specs import chunks, errors_of, on
from tilework import sharded
from tilework.sharded import ShardingSpec, TensorProperties, checks


def message(func: Any, *args: Any, **kwargs: Any) -> str:
    return str(checks.unsupported(func, args, kwargs, kwargs.pop("hint", "")))


def test_the_message_names_the_operator_and_says_what_to_do() -> None:
    said = message(torch.linalg.qr, torch.ones(3, 3), mode="r")
    assert re.search(r".*not supported for ShardedTensor!$", said)
    assert said.startswith("linalg_qr cannot run on a ShardedTensor: use the local shards")
    assert "torch function 'linalg_qr', with args: (tensor(float32[3, 3]),)" in said
    assert "kwargs: {'mode': 'r'}" in said
    assert "use the local shards, or full_tensor() for a plain tensor" in said
    assert ": reshard it. " in str(checks.unsupported(torch.add, (), {}, "reshard it"))


def test_properties_are_named_too() -> None:
    setter: Any = torch.Tensor.requires_grad
    said = message(setter.__set__, 1, True)
    assert "torch function '__set__' of 'requires_grad'" in said


def test_arguments_are_told_in_short() -> None:
    big = torch.ones(1000, 1000)
    assert len(message(torch.add, [big, {"x": big}], big)) < 300


def test_operators_that_are_not_there() -> None:
    def program(rank: int) -> None:
        torch.add(sharded.empty(chunks(0, [0]), 10, 20), torch.empty(10, 20))

    for error in errors_of(2, program):  # rank 1 has no shard, and raises as well
        assert isinstance(error, RuntimeError)
        assert re.search(r".*not supported for ShardedTensor!$", str(error))


def test_requires_grad_cannot_be_assigned() -> None:
    def program(rank: int) -> None:
        tensor = sharded.empty(chunks(0, [0]), 4)
        with pytest.raises(RuntimeError, match="torch function '__set__'"):
            tensor.requires_grad = True
        assert not tensor.requires_grad

    on(1, program)


def test_around_the_interception_nothing_is_computed() -> None:
    def program(rank: int) -> None:
        tensor = sharded.ones(chunks(0, [0]), 4)
        with torch._C.DisableTorchFunctionSubclass():
            tensor + 1

    (error,) = errors_of(1, program)
    assert isinstance(error, RuntimeError)
    assert "A tilework ShardedTensor is used from inside torch's C++ by" in str(error)


def described(spec: ShardingSpec, size: int = 4, **properties: Any) -> str:
    return checks.describe(spec.build_metadata([size], TensorProperties(**properties)))


def test_descriptions_differ_wherever_metadata_do() -> None:
    spec = chunks(0, [0, 1])
    same = {described(spec), described(chunks(0, [0, 1]))}
    others = {
        described(spec, 5),
        described(spec, dtype=torch.int8),
        described(spec, requires_grad=True),
        described(chunks(0, [1, 0])),
        described(chunks(0, [0, 1], "meta")),
    }
    assert len(same) == 1
    assert len(same | others) == 6
