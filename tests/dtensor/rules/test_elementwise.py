"""Operators that treat each element on its own, casts, activations, and what is linear."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import Layouts, check_op, count_op, partial_tensor
from tests.dtensor.sharded_values import full, same
from tests.tables import each
from tilework.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks
from tilework.tiled.rules.elementwise import pointwise_names

A = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROW = torch.tensor([0.5, -1.5, 2.0], dtype=torch.float64)
COLUMN = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)[:, None]

#: Against the plain operator, on some layouts; nothing may be gathered.
check = partial(check_op, meshes=((3,), (2, 2)), most=3, gathers=False)


def together(*functions: Callable[..., Any]) -> Callable[..., list[Any]]:
    """All of these, in one call."""
    return lambda *args: [function(*args) for function in functions]


def test_torchs_own_list_of_them() -> None:
    assert {"add", "where", "erfinv", "nan_to_num", "lerp"} <= pointwise_names()
    assert not {"sum", "matmul", "softmax"} & pointwise_names()


def test_one_tensor() -> None:
    check(
        together(
            *(torch.exp, torch.sin, torch.abs, torch.neg, torch.sgn, torch.erf, torch.frac),
            *(torch.isnan, torch.signbit, torch.logical_not, torch.square, torch.special.i0e),
            *(lambda x: x**2, lambda x: 2.0**x, lambda x: 2 - x, lambda x: 2 / x),
            *(lambda x: 7 // x, lambda x: 7 % x, lambda x: -x, lambda x: ~(x > 0)),
            *(lambda x: x.clamp(-1, 1), lambda x: x.clamp(min=0.1), torch.nan_to_num),
            *(lambda x: x.round(decimals=1), lambda x: torch.polygamma(1, x.abs() + 1)),
        ),
        A,
    )


def test_several_tensors() -> None:
    check(
        together(
            *(torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.fmin),
            *(torch.atan2, torch.hypot, torch.logaddexp, torch.copysign, torch.eq, torch.lt),
            *(lambda x, y: torch.add(x, y, alpha=3), lambda x, y: torch.rsub(x, y, alpha=2)),
            *(lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: x // y),
            *(lambda x, y: x.where(y > 0, 1.0), lambda x, y: torch.where(y > 0, 2.0, x)),
            *(lambda x, y: torch.where(x > 0, x, y), lambda x, y: x.masked_fill(y > 0, 0.5)),
            *(lambda x, y: torch.lerp(x, y, 0.3), lambda x, y: x.clamp(max=y)),
            *(torch.max, torch.min, torch.isclose),
        ),
        *(A, ROW),
    )
    check(
        together(
            *(torch.addcmul, torch.addcdiv, torch.lerp),
            lambda x, y, z: torch.addcmul(x, y, z, value=0.5),
        ),
        *(A, ROW, COLUMN),
    )


def test_integers_and_bools() -> None:
    numbers = torch.arange(12).reshape(4, 3)
    check(
        together(
            *(torch.bitwise_and, torch.bitwise_xor, torch.gcd, torch.remainder),
            *(lambda x, y: x << y, lambda x, y: x >> y, lambda x, y: x | y, lambda x, y: x / y),
            *(lambda x, y: x.bool() & y.bool(), lambda x, y: torch.logical_xor(x, y)),
        ),
        *(numbers, torch.tensor([1, 2, 3])),
    )


def test_complex() -> None:
    pairs = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    check(
        together(
            lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)),
            lambda x: torch.complex(x, x + 1).conj().imag,
            lambda x: torch.polar(x.abs(), x).real,
            lambda x: torch.angle(torch.complex(x, -x)).resolve_conj(),
        ),
        pairs,
    )


def test_casts() -> None:
    check(
        together(
            *(Tensor.float, Tensor.half, Tensor.double, Tensor.to, lambda x: x.cdouble()),
            *(lambda x: x.to(torch.float32), lambda x: x.to("cpu", torch.bfloat16)),
            *(lambda x: x.to(torch.zeros(2)), lambda x: x.type_as(torch.zeros(2))),
            *(lambda x: x.type(torch.float32), lambda x: x.type(), lambda x: x.cpu()),
            *(lambda x: (x * 2).long(), lambda x: (x > 0).int(), lambda x: x.bool()),
        ),
        A,
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize("inplace", [False, True])
def test_activations(inplace: bool) -> None:
    functions = [
        *(F.relu, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.hardswish, F.silu, F.mish),
        *(F.hardsigmoid, F.hardtanh, lambda x, inplace: F.threshold(x, 0.1, 2.0, inplace)),
        lambda x, inplace: F.rrelu(x, inplace=inplace),
    ]

    def call(x: Tensor, function: Any) -> tuple[Tensor, Tensor]:
        y = x * 1
        return function(y, inplace=inplace), y

    check(lambda x: [call(x, function) for function in functions], A)


def test_other_activations() -> None:
    check(
        together(
            *(F.gelu, F.softplus, F.logsigmoid, F.softsign, F.tanhshrink, F.hardshrink),
            *(F.softshrink, lambda x: F.gelu(x, approximate="tanh")),
        ),
        A,
    )
    check(F.prelu, A, ROW)
    check(F.prelu, A, ROW[:1])
    check(together(F.glu, lambda x: F.glu(x, 0)), torch.randn(4, 6))


def test_writing() -> None:
    def write(x: Tensor, y: Tensor) -> list[Tensor]:
        x.add_(y).mul_(2)
        x.clamp_(-1, 1).masked_fill_(y > 0, 0.25)
        x //= 2
        other = torch.empty_like(x).copy_(y)
        other.lerp_(x, 0.5)
        filled = torch.empty_like(x).fill_(3.0)
        number = torch.empty_like(y).copy_(2.5)  # type: ignore[arg-type]
        number[1:].copy_(True)  # type: ignore[arg-type]
        return [x, other, filled, number, torch.mul(x, y, out=filled), torch.zeros_like(x).zero_()]

    check(write, A, ROW, grads=False)


def test_writing_what_is_larger_raises_and_changes_nothing() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        small = distribute_tensor(torch.ones(1), mesh, [Replicate()])
        large = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"output with shape|doesn't match the broadcast"):
            small.add_(large)
        assert small.full_tensor() == 1
        with pytest.raises(RuntimeError, match="must match"):
            large + distribute_tensor(torch.ones(2), mesh, [Replicate()])

    run_ranks(4, program)


def test_what_is_linear_passes_sums_on() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        terms = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        other = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
        narrow = DTensor.from_local(torch.ones(3, dtype=torch.uint8), mesh, [Partial()])
        linear: list[Any] = [
            *(terms * 2, terms / other, -terms, terms - terms, other * terms, terms.double()),
            *(terms.clone(), torch.lerp(terms, terms, 0.5), torch.addcmul(terms, terms, other)),
            *(torch.where(other > 0, terms, terms), terms + other, terms.zero_()),
        ]
        for one in linear:
            assert one.placements == (Partial(),)
        others: list[Any] = [
            *(terms + 1, terms.half(), 1 / terms, terms.relu(), narrow / 2),
            torch.div(terms, 2, rounding_mode="floor"),
        ]
        for one in others:
            assert one.placements == (Replicate(),)

    run_ranks(2, program)


def test_nothing_is_sent() -> None:
    layouts: Layouts = [[Shard(0)], [Replicate()]]
    seen = count_op(lambda x, y: torch.add(x, y).relu().half(), A, ROW, layouts=layouts)
    assert seen.forward == []
    assert seen.backward == ["all_reduce"]
    assert seen.placements == [(Shard(0),)]


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


@each("op", ["sum", "avg", "max", "min", "product"])
def test_a_number_is_added_to_a_partial_value_once(op: str) -> None:
    """pytorch#163193: and not once on each rank; the other operators with a number likewise."""

    def numbers(x: Tensor) -> list[Tensor]:
        return [
            x + 1,
            1 - x,
            x - 2.5,
            x * 3,
            x / 2,
            x.add(1, alpha=2),
            x.pow(2),
            -x,
            torch.rsub(x, 1),
        ]

    check_op(numbers, GRID.abs() + 1, partial=(op,), meshes=((2,),), rtol=1e-5, atol=1e-5)


def test_a_number_is_added_in_place_once() -> None:
    """pytorch#163193, as people write it."""

    def program(rank: int) -> None:
        x = partial_tensor(GRID, init_device_mesh("cpu", (2,)))
        x += 1  # type: ignore[misc]
        same(x, GRID + 1)
        x.sub_(1).mul_(2)
        same(x, GRID * 2)

    run_ranks(2, program)


def test_nonlinear_operators_see_the_value_and_not_its_terms() -> None:
    """pytorch#165962, pytorch#159856: extrema, norms and bounds of a partial value."""

    def nonlinear(x: Tensor) -> list[Tensor]:
        largest, where = x.max(dim=1)
        return [
            *(x.max(), x.min(), x.amax(0), x.amin(1), largest, where, x.argmax(), x.argmin(0)),
            *(x.norm(), x.norm(p=1, dim=0), torch.linalg.vector_norm(x, 3), x.std(), x.var(0)),
            *(x.clip(-0.5, 0.5), x.clamp(min=0), x.clamp_max(0.1), x.relu(), x.abs(), x.exp()),
            *(x.softmax(1), x.sign(), x.round(), x > 0, x.topk(2).values, x.sort(0).values),
            *(x * x, x.prod(), x.logsumexp(0), x.cumsum(0), x.median(), x.count_nonzero()),
        ]

    check_op(nonlinear, GRID, grads=False, partial=("sum", "max"), most=6, rtol=1e-5, atol=1e-5)


def test_a_partial_value_passes_a_cast() -> None:
    """pytorch#183363: it may be cast to more precision in terms; to less only its sum may be."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = partial_tensor(GRID.bfloat16(), mesh)
        assert torch.equal(full(x.float()), full(x).float()) or torch.allclose(
            full(x.float()), full(x).float(), rtol=1e-2
        )
        exact = partial_tensor(GRID, mesh)
        assert torch.equal(full(exact.bfloat16()), full(exact).bfloat16())
        assert torch.equal(full(exact.double().float()), full(exact))
        assert torch.equal(full(exact.int()), full(exact).int())

    run_ranks(2, program)


#: What gives a tensor of real numbers back, as torch does.
IDENTITIES = (
    *("real", "conj", "conj_physical", "resolve_conj", "resolve_neg", "positive", "contiguous"),
    *("double", "cpu"),
)


@each("name", IDENTITIES)
def test_a_tensor_of_real_numbers_is_returned_itself_however_it_lies(name: str) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        operator = getattr(torch.Tensor, name)
        for reduce_op in ("sum", "avg", "product", "max", "min"):
            for leaf in (False, True):
                part = torch.full((3,), rank + 1.0).double()
                x: Any = DTensor.from_local(part, mesh, [Partial(reduce_op)])
                if leaf and reduce_op != "product":
                    x.requires_grad_()
                same = operator(x) if callable(operator) else x.real
                assert same is x, (reduce_op, leaf)

    run_ranks(2, program)
