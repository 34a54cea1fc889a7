"""Elementwise operators: each one that torch calls pointwise, against the plain one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor
from torch.nn import functional as F

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ops.op_checks import (
    CUTS,
    RANKS,
    SIZE,
    WHOLE_DIMS,
    check_cut,
    check_cuts,
    check_same,
    compare,
    shards_of,
    values,
)
from tests.sharded.ranks_and_specs import boxes, check_all_raise, chunks, examples, grid, on, specs
from tests.tables import each
from tilework.sharded import ShardedTensor, ones
from tilework.sharded.registry import find_handler
from tilework.tiled.op_table import canonical_name, entry_of

_SPACES: tuple[Any, ...] = (torch, Tensor, F, torch._C._nn, torch.special)
#: The names of functions that make a new tensor, of operators that are elementwise.
ELEMENTWISE = {
    name
    for space in _SPACES
    for name in dir(space)
    if callable(func := getattr(space, name))
    and not name.startswith("_")
    and not canonical_name(func)[1]
    and entry_of(canonical_name(func)[0]).is_elementwise
}
#: Operators that need other arguments than one, two or three tensors.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "clamp_max": (1,),
    "clamp_min": (-1,),
    "clamp": (-1, 1),
    "clip": (-1, 1),
    "hardtanh": (-1, 1),
    "threshold": (0.5, 20),
    "masked_fill": (0.5,),
    "mvlgamma": (2,),
    "multigammaln": (2,),
    "polygamma": (),
}


def _callables(name: str, dtype: torch.dtype) -> list[Callable[..., Any]]:
    """The functions of this name that make a new tensor; for floats in all spellings."""
    spaces = _SPACES if dtype == torch.float64 else _SPACES[:1]
    found = [getattr(space, name, None) for space in spaces]
    return [func for func in found if callable(func)]


def _attempt(func: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    try:
        return func(*args), None
    except Exception as error:
        return None, error


@cache
def _operands(large: bool, dtype: torch.dtype) -> list[Tensor]:
    """Three operands; one, two or all of them may suit an operator."""
    first, second, third = (values(*SIZE, seed=seed).abs() for seed in (1, 2, 3))
    if dtype.is_floating_point:
        return [x + 2 if large else x / 4 for x in (first, second, third)]
    return [x.to(dtype) for x in (first, second + 1, third)]


@each("dtype", [torch.float64, torch.int32, torch.bool])
def test_every_operator_gives_the_same_as_on_a_plain_tensor(dtype: torch.dtype) -> None:
    spec = CUTS["grid"]
    tried: set[str] = set()

    def program(rank: int) -> None:
        both = [
            [shards_of(x, spec, rank) for x in _operands(large, dtype)] for large in (False, True)
        ]
        for name in sorted(ELEMENTWISE):
            extra, large = _ARGUMENTS.get(name, ()), name in ("mvlgamma", "multigammaln")
            for func in _callables(name, dtype):
                for count in (1, 2, 3):
                    operands, sharded = _operands(large, dtype)[:count], both[large][:count]
                    expected, error = _attempt(func, *operands, *extra)
                    if isinstance(expected, int) or (error is None and expected is None):
                        continue
                    found, other = _attempt(func, *sharded, *extra)
                    if error is not None:
                        assert other is not None, (name, func, len(operands))
                        continue
                    if func is torch.where:
                        continue
                    assert other is None, (name, func, len(operands), other)
                    if "rrelu" not in name:
                        try:
                            compare(found, expected)
                        except AssertionError as failed:
                            raise AssertionError(f"{name}: {func}") from failed
                    tried.add(name)
        for large in (False, True):
            compare(both[large], _operands(large, dtype))  # nothing wrote to them

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, on deprecated spellings
        on(2, program)
    if dtype == torch.float64:
        # The others are for integers, or take an operand first that is a number.
        assert len(tried) > 0.8 * len(ELEMENTWISE)


def _augmented(x: Any, y: Any) -> Any:
    same = x
    x *= y
    x += 1
    assert x is same
    return x


_DIFFERENTIABLE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "add with alpha": lambda x, y: torch.add(x, y, alpha=3),
    "subtract a number": lambda x, y: 2 - x,
    "divide": lambda x, y: x / (y.abs() + 1),
    "divide a number": lambda x, y: 2 / (x.abs() + 1),
    "power": lambda x, y: (x.abs() + 1) ** y,
    "power of a number": lambda x, y: 2**x,
    "where": lambda x, y: torch.where(x > y, x, 0),
    "where of three": lambda x, y: torch.where(x > y, x, y * 2),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "clamp by a tensor": lambda x, y: torch.clamp(x, max=y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y.abs() + 1),
    "maximum": lambda x, y: torch.maximum(x, y),
    "max of two": lambda x, y: torch.max(x, y),
    "min of two": lambda x, y: x.min(y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 3.0),
    "comparison": lambda x, y: x >= y,
    "logical": lambda x, y: (x > 0) & ~(y > 1) | (x == y),
    "any over no dims": lambda x, y: (x > 0).any(()),
    "isnan": lambda x, y: (x / 0).isnan(),
    "isclose": lambda x, y: torch.isclose(x, y, atol=1.0),
    "round": lambda x, y: x.round(decimals=1),
    "floor_divide": lambda x, y: (x // 2).detach(),
    "remainder": lambda x, y: x % 2,
    "relu": lambda x, y: F.relu(x),
    "gelu": lambda x, y: F.gelu(x, approximate="tanh"),
    "silu": lambda x, y: F.silu(x),
    "softplus": lambda x, y: F.softplus(x, beta=2),
    "leaky_relu": lambda x, y: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x, y: F.hardtanh(x),
    "elu": lambda x, y: F.elu(x),
    "logsigmoid": lambda x, y: F.logsigmoid(x),
    "module": lambda x, y: torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh())(x),
    "frexp": lambda x, y: torch.frexp(x.detach()),
    "dim-less plain operand": lambda x, y: x * torch.tensor(3.0),
    "plain operand first": lambda x, y: torch.tensor(3) * x,
    "cast": lambda x, y: x.float().double(),
    "cast to integers": lambda x, y: x.long(),
    "other casts": lambda x, y: (x.half(), x.bfloat16(), x.int(), x.bool(), x.type(torch.int16)),
    "type_as": lambda x, y: x.type_as(y.int()),
    "clone": lambda x, y: x.clone(),
    "contiguous": lambda x, y: (x * 1).contiguous(),
    "detach": lambda x, y: x.detach(),
    "no_grad": lambda x, y: torch.no_grad()(lambda: x * y)(),
    "zeros_like": lambda x, y: torch.zeros_like(x, dtype=torch.int32),
    "full_like": lambda x, y: torch.full_like(x, 8.8),
    "ones_like with gradient": lambda x, y: torch.ones_like(x, requires_grad=True),
    "new_zeros": lambda x, y: x.new_zeros(5, 4),
    "new_full": lambda x, y: x.new_full((5, 4), 2, dtype=torch.float32),
    "new_ones": lambda x, y: x.new_ones(x.shape),
    "in place on a result": lambda x, y: (x * 1).mul_(y).add_(1).clamp_(-2, 2),
    "augmented": lambda x, y: _augmented(x * 1, y),
    "in place, then used": lambda x, y: torch.zeros_like(x).add_(x) * y,
    "fill": lambda x, y: (x * y).fill_(3),
    "zero": lambda x, y: (x * y).zero_(),
    "copy": lambda x, y: torch.zeros_like(x).copy_(y),
    "copy to another dtype": lambda x, y: torch.zeros_like(x, dtype=torch.float32).copy_(y),
    "out": lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty_like(x.detach())),
    "chain": lambda x, y: torch.sigmoid(x * y).log().mul(2).exp().sqrt() - x,
}


@each("compute", _DIFFERENTIABLE.values())
def test_values_and_gradients(compute: Callable[..., Any]) -> None:
    x, y = values(*SIZE).requires_grad_(), values(*SIZE, seed=1).requires_grad_()
    check_cuts(compute, [x, y])


@each(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.complex64,
        torch.uint8,
        torch.int64,
        torch.bool,
    ],
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = values(*SIZE).abs().to(dtype)
    check_cut(lambda x: (x * 2, x == x, x + x), [x], CUTS["rows"])


@each("size", [(), (0,), (3, 0)])
def test_tensors_of_one_element_and_of_none(size: tuple[int, ...]) -> None:
    spec = chunks(0, [1, 2]) if size else boxes(((), (), 1))
    x = values(*size).requires_grad_()
    check_cut(lambda x: (x * 2 + 1).exp(), [x], spec)


@examples(30)
@given(hs.data())
def test_any_cut(data: hs.DataObject) -> None:
    size = data.draw(hs.sampled_from([(6,), (5, 3), (2, 3, 4)]))
    spec = data.draw(specs(size, (0, 1, 2)))
    x, y = values(*size).requires_grad_(), values(*size, seed=1)
    check_cut(lambda x, y: (x * y + 1).sin(), [x, y], spec)


def test_a_plain_operand_gets_the_gradient_of_all_tiles() -> None:
    whole = values(*SIZE)

    def program(rank: int) -> None:
        for spec in CUTS.values():
            factor = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
            result = (shards_of(whole, spec, rank) * factor).square().sum()
            torch.autograd.backward(result)
            assert_close(factor.grad, 4 * whole.square().sum())

    on(RANKS, program)


def test_in_place_operators_write_the_shards_that_are_there() -> None:
    def program(rank: int) -> None:
        tensor = ones(CUTS["rows"], *SIZE)
        tile = tensor.local_tensor()
        assert tensor.add_(1) is tensor
        assert tensor.mul_(3) is tensor
        assert tensor.local_tensor() is tile
        assert tile.eq(6).all()

    on(RANKS, program)


def test_in_place_needs_a_gradient_from_then_on() -> None:
    def program(rank: int) -> None:
        scale = torch.tensor(2.0, requires_grad=True)
        tensor = ones(chunks(0, [0]), 4)
        tensor.mul_(scale)
        assert tensor.requires_grad
        assert tensor.metadata().tensor_properties.requires_grad
        assert not tensor.is_leaf
        tensor.detach_()
        assert not tensor.requires_grad
        assert tensor.is_leaf

    on(RANKS, program)


def test_a_leaf_that_needs_a_gradient_is_not_written_on_any_rank() -> None:
    def program(rank: int) -> None:
        ones(chunks(0, [0]), 4, requires_grad=True).add_(1)

    check_all_raise(RANKS, program, RuntimeError, "leaf Variable that requires grad")


def test_random_operators_run_on_each_tile() -> None:
    """As torch.rand on each rank with this seed; see the specification's test of ``*_like``."""

    def program(rank: int) -> None:
        tensor = ones(chunks(0, [0]), 4, 4, dtype=torch.float64)
        for like in (torch.rand_like, torch.randn_like):
            made: Any = like(tensor, dtype=torch.float64)
            assert made.sharding_spec() == tensor.sharding_spec()
            assert made.local_tensor().unique().numel() == 16
        assert 0 <= torch.randint_like(tensor, 5).min() <= torch.randint_like(tensor, 5).max() < 5
        kept: Any = F.dropout(tensor, 0.5)
        assert set(kept.full_tensor().unique().tolist()) <= {0.0, 2.0}
        assert torch.equal(F.dropout(tensor, 0.5, training=False), tensor)
        torch.manual_seed(7)
        found: Any = torch.rand_like(tensor)
        torch.manual_seed(7)
        assert torch.equal(found.local_tensor(), torch.rand(4, 4, dtype=torch.float64))
        tensor.uniform_(2, 3)
        assert 2 <= tensor.min() <= tensor.max() < 3

    on(1, program)


@each(
    "compute",
    [
        lambda x: torch.add(x, torch.ones(5, 4)),
        lambda x: torch.ones(5, 4) + x,
        lambda x: x.mul_(torch.ones(1)),
        lambda x: torch.where(x > 0),
        lambda x: x.apply_(abs),
        lambda x: torch.histc(x),
        lambda x: x.cross(x),
    ],
)
@each("ranks", [1, 3])
def test_what_is_not_elementwise_raises(compute: Callable[..., Any], ranks: int) -> None:
    check_all_raise(
        ranks,
        lambda rank: compute(ones(chunks(0, [0]), 5, 4)),
        RuntimeError,
        r"(?s)torch function '.*not supported for ShardedTensor!$",
    )


def test_different_cuts_raise_and_say_what_to_do() -> None:
    def program(rank: int) -> None:
        ones(chunks(0, [0, 1]), 4, 4) + ones(chunks(1, [0, 1]), 4, 4)

    messages = check_all_raise(2, program, RuntimeError, "not supported for ShardedTensor!$")
    assert all("reshard" in message for message in messages)


def test_equal_cuts_by_other_specs_are_the_same_cut() -> None:
    def program(rank: int) -> Any:
        one, two = ones(chunks(0, [0, 1]), 4, 4), ones(grid([2, 2], [4], [0, 1]), 4, 4)
        both: Any = one + two
        return both.full_tensor().tolist()

    assert on(2, program) == [[[2.0] * 4] * 4] * 2


@each("dim", [0, 1])
def test_operands_whose_tiles_fit_are_broadcast(dim: int) -> None:
    def program(rank: int) -> None:
        for name, spec in CUTS.items():
            if dim in WHOLE_DIMS[name]:
                whole = values(*SIZE).requires_grad_()
                check_same(rank, lambda x: x - x.mean(dim, keepdim=True), [whole], spec)
                check_same(rank, lambda x: torch.where(x > 0, x, x.amax(dim, True)), [whole], spec)
                check_same(rank, lambda x: x.int() // x.int().amax(dim, True), [whole + 9], spec)

    on(RANKS, program)


def test_writes_are_not_broadcast() -> None:
    def program(rank: int) -> None:
        tensor: Any = ones(chunks(0, [0]), 4, 2)
        tensor.sub_(tensor.mean(1, keepdim=True))

    check_all_raise(2, program, RuntimeError, "not supported for ShardedTensor!$")


def test_nothing_is_communicated() -> None:
    def program(rank: int) -> int:
        tensor: Any = ones(chunks(0, [0, 1]), 4, 4, requires_grad=True)
        group = tensor.process_group
        before: int = group.get_sequence_number_for_group()
        torch.relu(tensor * 2 + 1).clone().softmax(1)[1:3].transpose(0, 1).sum(0)
        after: int = group.get_sequence_number_for_group()
        return after - before

    assert on(2, program) == [0, 0]


def test_all_spellings_are_bound() -> None:
    for func in (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__,
        Tensor.__iadd__, torch.special.expit, F.relu, torch.relu_, Tensor.__and__):  # fmt: skip
        assert find_handler(func, CUTS["rows"]) is not None


def test_ranks_outside_the_group_compute_metadata_only() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([0, 2])
        tensor: Any = ones(chunks(0, [0, 2]), 4, process_group=group)
        result: ShardedTensor = (tensor * 2).double()
        assert result.dtype == torch.float64
        return [tile.tolist() for tile in result.local_tiles()]

    assert on(3, program) == [[[2.0, 2.0]], [], [[2.0, 2.0]]]
