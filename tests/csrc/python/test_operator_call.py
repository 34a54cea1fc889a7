"""The core's fast path of operators on DTensors does what the path in Python does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from tests.dtensor.op_db.calls import operators, samples_of
from tests.dtensor.sharded_values import cut
from tilework.dtensor import DTensor, Replicate, Shard, init_device_mesh
from tilework.dtensor.base import HANDLERS
from tilework.dtensor.dispatch import call
from tilework.dtensor.dispatch.call import Operator
from tilework.dtensor.propagation.dtensor_call import DTensorCall, tensors_in
from tilework.dtensor.propagation.op_sharding import Composed, OpSharding
from tilework.dtensor.provenance.digests import digest_of
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks
from tilework.tiled.op_table import canonical_name, find

pytest.importorskip("tilework._core")

X = torch.arange(24.0).view(4, 6)


def calls(mesh: DeviceMesh) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, y = cut(X, mesh, [Shard(0)]), cut(X + 1, mesh, [Shard(0)])
    rows, whole = cut(X, mesh, [Shard(1)]), cut(X, mesh, [Replicate()])
    view, leaf = rows.view(24), cut(X, mesh, [Replicate()]).requires_grad_()
    return [
        (torch.add, (x, y), {}),
        (torch.add, (x, y), {"alpha": 2}),
        (torch.add, (x, rows), {}),
        (torch.add, (x, torch.ones(6)), {}),
        (torch.mul, (x, -1), {}),
        (torch.mul, (x, -0.0), {}),
        (torch.mul, (x, float("nan")), {}),
        (torch.mul, (x, True), {}),
        (torch.sum, (x,), {}),
        (torch.sum, (x, 0), {}),
        (torch.sum, (x,), {"dim": 1}),
        (torch.sum, (x,), {"dim": (0, 1), "keepdim": True}),
        (torch.softmax, (x, -1), {"dtype": torch.float64}),
        (torch.cat, ([x, y], 1), {}),
        (torch.cat, ((x, rows),), {}),
        (Tensor.view, (x, (2, 2, 6)), {}),
        (Tensor.view, (x, 24), {}),
        (torch.split, (x, [2, 2]), {}),
        (Tensor.__getitem__, (x, (slice(0, 2), None)), {}),
        (Tensor.__getitem__, (x, torch.tensor([1, 0])), {}),
        (Tensor.add_, (y, 1), {}),
        (F.linear, (x, leaf, None), {}),
        (F.gelu, (leaf,), {"approximate": "tanh"}),
        (torch.relu, (view,), {}),
        (torch.pow, (whole, 2 + 0j), {}),
        (torch.add, (x, y), {"out": cut(X * 0, mesh, [Shard(0)])}),
    ]


def with_digest(tensor: Tensor, number: int) -> None:
    """Let a tensor be known, as those that collectives made are."""
    if isinstance(tensor, DTensor) and tensor._viewed is None:
        tensor._digest = number


def facts(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [facts(item) for item in result]
    assert isinstance(result, DTensor)
    return digest_of(result), result.placements, str(result.to_local()), result.requires_grad


@pytest.mark.parametrize("gradients", [True, False])
def test_it_does_what_the_path_in_python_does(gradients: bool) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with torch.set_grad_enabled(gradients):
            for one, other in zip(calls(mesh), calls(mesh), strict=True):
                (func, args, kwargs), (_, again, named) = one, other
                for number, tensor in enumerate(tensors_in([*args, *kwargs.values()])):
                    with_digest(tensor, number)
                for number, tensor in enumerate(tensors_in([*again, *named.values()])):
                    with_digest(tensor, number)
                operator = Operator(*find(func))
                for _ in range(2):  # the sharding is propagated, and then cached
                    fast = facts(operator.handler()(func, args, kwargs))
                    assert fast == facts(operator(func, again, named)), canonical_name(func)

    run_ranks(2, program)


class _Reader(Operator):
    """An operator that gives no result, but the digest and the tensors of its calls."""

    def __init__(self, func: Any) -> None:
        super().__init__(*find(func))
        self.keys: list[Sequence[Any]] = []

    def _propagate(self, key: Sequence[Any], call: DTensorCall) -> OpSharding:
        self.keys.append(key)
        sharding = OpSharding(Composed(lambda: None), specs=call.specs)
        if key:
            call.mesh.op_shardings[tuple(key)] = sharding
        return sharding

    def _from_sharding(self, sharding: OpSharding, *call: Any) -> Any:
        read = DTensorCall(*call)
        return read.digest, [id(tensor) for tensor in read.tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_it_has_the_keys_and_digests_of_python(dtype: torch.dtype) -> None:
    """Over torch's database of operators: it finds what the path in Python has put in the cache."""

    def program(rank: int) -> int:
        mesh, count = init_device_mesh("cpu", (1,)), 0

        def spread(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.layout is not torch.strided:
                return x
            return cut(x.detach(), mesh, [Shard(0) if x.dim() else Replicate()])

        for info in operators():
            supported = dtype in info.supported_dtypes("cpu")
            for sample in samples_of(info, dtype, 4) if supported else ():
                args = tree_map(spread, (sample.input, *sample.args))
                kwargs = tree_map(spread, dict(sample.kwargs))
                if not any(isinstance(x, DTensor) for x in tree_flatten((args, kwargs))[0]):
                    continue
                for number, tensor in enumerate(tensors_in([*args, *kwargs.values()])):
                    with_digest(tensor, number)
                reader = _Reader(info.op)
                func: Any = partial(_nothing, info)  # each has a key of its own
                want = reader(func, args, kwargs)
                found = reader.handler()(func, args, kwargs)
                if reader.keys and reader.keys[0]:  # else an argument has no hash
                    assert found == want, info.name
                    assert len(reader.keys) == 1, info.name
                    count += 1
        return count

    assert run_ranks(1, program, timeout=timedelta(minutes=5))[0] > 500


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What an operator is called with whose arguments are not in their normal form."""


def test_operators_take_it_by_themselves() -> None:
    def program(rank: int) -> Any:
        x = cut(X, init_device_mesh("cpu", (1,)), [Shard(0)])
        torch.hypot(x, x)
        return type(HANDLERS[torch.hypot]).__name__

    assert run_ranks(1, program) == ["builtin_function_or_method"]


def test_errors_are_those_of_the_operator() -> None:
    def program(rank: int) -> None:
        mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
        x = cut(X, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="size"):
            torch.add(x, torch.ones(5))
        with pytest.raises(TypeError):
            torch.add(x, object())  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            torch.sum(x, {1: {2}})  # type: ignore[call-overload]
        del other
        x + 1
        with pytest.raises(TypeError, match="3 arguments"):
            HANDLERS[Tensor.add](torch.add, (x,))  # type: ignore[call-arg]

    run_ranks(2, program)


def test_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_core", None)
    operator = Operator(*find(torch.add))
    assert operator.handler() is operator
