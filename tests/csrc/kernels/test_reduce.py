"""Every dtype and reduction against plain arithmetic in rank order, bit for bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.csrc.core_ranks import Rank, run_threads
from tests.rounding import assert_close
from tests.tables import each

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
INTEGER_OPS: dict[str, Callable[..., int]] = {
    "sum": operator.add,
    "product": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}
#: Elements: none, one, a vector's tail, one slot, several rounds with an uneven end.
COUNTS = [0, 1, 13, 512, 5003]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def wide(tensor: Tensor) -> Tensor:
    """What the core accumulates in."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def in_rank_order(op: Callable[[Tensor, Tensor], Tensor], tensors: list[Tensor]) -> Tensor:
    return functools.reduce(op, [wide(t) for t in tensors]).to(tensors[0].dtype)


def reduced(inputs: list[Tensor], op: str, factors: list[float] | None = None) -> list[Tensor]:
    """all_reduce of ``inputs``, out of place; the result of each rank."""

    def program(rank: Rank) -> Tensor:
        output = torch.empty_like(inputs[rank.rank])
        factor = factors[rank.rank] if factors else 1.0
        rank.run("all_reduce", [inputs[rank.rank]], [output], op=op, factor=factor)
        return output

    return run_threads(len(inputs), program)


def draw(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool or dtype in INTEGERS:
        raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator)
        return raw.to(torch.uint8).view(dtype) if dtype is not torch.bool else raw % 2 == 1
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) * 3


def assert_same_bits(results: list[Tensor], expected: Tensor) -> None:
    for result in results:
        assert torch.equal(bits(result), bits(expected))


@each("size", [1, 2, 3, 5])
@each("dtype", FLOATS)
def test_sum_of_floats_has_the_bits_of_the_sum_in_rank_order(dtype: torch.dtype, size: int) -> None:
    for count in COUNTS:
        inputs = [draw(dtype, count, seed) for seed in range(size)]
        assert_same_bits(reduced(inputs, "sum"), in_rank_order(operator.add, inputs))


@each("op", ["product", "min", "max"])
@each("dtype", FLOATS)
def test_other_reductions_of_floats(dtype: torch.dtype, op: str) -> None:
    plain = {"product": operator.mul, "min": torch.minimum, "max": torch.maximum}[op]
    inputs = [draw(dtype, 3001, seed) for seed in range(3)]
    assert_same_bits(reduced(inputs, op), in_rank_order(plain, inputs))


@each("dtype", FLOATS + COMPLEX)
def test_average_divides_the_sum_by_the_ranks(dtype: torch.dtype) -> None:
    inputs = [draw(dtype, 3001, seed) for seed in range(3)]
    total = functools.reduce(operator.add, [wide(t) for t in inputs])
    if dtype.is_complex:
        expected = torch.view_as_complex(torch.view_as_real(total) / 3)
    else:
        expected = (total / 3).to(dtype)
    assert_same_bits(reduced(inputs, "avg"), expected)


@each("dtype", FLOATS + COMPLEX)
@each("size", [2, 3])
def test_each_rank_has_its_own_premultiplier(dtype: torch.dtype, size: int) -> None:
    factors = [0.5, -2.0, 3.0][:size]
    inputs = [draw(dtype, 2000, seed) for seed in range(size)]
    scaled = [wide(t) * factor for t, factor in zip(inputs, factors, strict=True)]
    expected = functools.reduce(operator.add, scaled).to(dtype)
    assert_same_bits(reduced(inputs, "premul_sum", factors), expected)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_minimum_and_maximum_propagate_nan(dtype: torch.dtype, op: str, size: int) -> None:
    inputs = [torch.zeros(size + 1, dtype=dtype) for _ in range(size)]
    for rank in range(size):
        inputs[rank][rank] = torch.nan
    for result in reduced(inputs, op):
        assert result.isnan().tolist() == [True] * size + [False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_float_is_read_and_written_as_torch_does(dtype: torch.dtype) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
    expected = patterns.clone()
    for result in reduced([patterns, torch.zeros_like(patterns)], "max"):
        assert_close(result, expected.clamp_min(0), equal_nan=True, rtol=0, atol=0)
    for result in reduced([patterns, torch.full_like(patterns, 0.333)], "sum"):
        plain = (patterns.float() + torch.full_like(patterns, 0.333).float()).to(dtype)
        assert_close(result, plain, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_floats_are_rounded_once(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    inputs = [torch.tensor([value], dtype=dtype) for value in (1.0, step / 2, step / 2)]
    assert reduced(inputs, "sum")[0].item() == 1.0 + step


@each("dtype", COMPLEX)
@each("op", ["sum", "product"])
def test_complex_numbers(dtype: torch.dtype, op: str) -> None:
    plain = {"sum": operator.add, "product": operator.mul}[op]
    inputs = [draw(dtype, 700, seed) * (1 + seed * 1j) for seed in range(3)]
    results = reduced(inputs, op)
    assert_close(results[0], functools.reduce(plain, inputs))
    assert_same_bits(results, results[0])


@each("op", INTEGER_OPS)
@each("dtype", INTEGERS)
def test_integers_wrap(dtype: torch.dtype, op: str) -> None:
    inputs = [draw(dtype, 700, seed) for seed in range(3)]
    columns = zip(*(t.tolist() for t in inputs), strict=True)
    expected = [functools.reduce(INTEGER_OPS[op], column) for column in columns]
    span = 1 << 8 * dtype.itemsize
    for result in reduced(inputs, op):
        assert [got % span for got in result.tolist()] == [want % span for want in expected]


@each(
    ("op", "plain"),
    [
        *[(op, operator.or_) for op in ("sum", "max", "bor")],
        *[(op, operator.and_) for op in ("product", "min", "band")],
        ("bxor", operator.xor),
    ],
)
def test_bools(op: str, plain: Callable[[Tensor, Tensor], Tensor]) -> None:
    inputs = [draw(torch.bool, 5000, seed) for seed in range(3)]
    assert_same_bits(reduced(inputs, op), functools.reduce(plain, inputs))


@each(
    ("dtype", "op"),
    [
        *[(torch.int32, op) for op in ("avg", "premul_sum", "none")],
        *[(torch.float32, op) for op in ("band", "bor", "bxor", "none")],
        *[(torch.complex64, op) for op in ("min", "max", "band")],
        (torch.bool, "avg"),
    ],
)
def test_nonsense_is_refused(dtype: torch.dtype, op: str) -> None:
    with pytest.raises(ValueError, match="cannot reduce"):
        reduced([torch.zeros(3).to(dtype)], op)


@pytest.mark.parametrize("size", [2, 3])
def test_whole_and_in_parts_give_the_same_bits(size: int) -> None:
    inputs = [draw(torch.float32, 900, seed) for seed in range(size)]  # fits a slot
    padded = [torch.cat([t, t, t, t]) for t in inputs]  # takes several rounds
    assert_same_bits(reduced(padded, "sum"), torch.cat([reduced(inputs, "sum")[0]] * 4))


@each("count", COUNTS)
@each("size", [1, 2, 4])
def test_in_place(size: int, count: int) -> None:
    def program(rank: Rank) -> Tensor:
        tensor = torch.full((count,), float(rank.rank))
        rank.run("all_reduce", [tensor], [tensor], op="sum")
        return tensor

    expected = torch.full((count,), float(sum(range(size))))
    assert_same_bits(run_threads(size, program), expected)


@each("count", COUNTS)
@each("size", [1, 2, 3, 5])
def test_reduce_fills_the_root_and_leaves_the_others_alone(size: int, count: int) -> None:
    inputs = [draw(torch.float32, count, seed) for seed in range(size)]
    before = [t.clone() for t in inputs]
    root = size - 1

    def program(rank: Rank) -> Tensor:
        mine = inputs[rank.rank]
        rank.run("reduce", [mine], [mine] if rank.rank == root else [], op="sum", root=root)
        return mine

    results = run_threads(size, program)
    for rank in range(root):
        assert torch.equal(results[rank], before[rank])
    assert_same_bits([results[root]], in_rank_order(operator.add, before))


@each("counts", [[7, 7, 7], [0, 2000, 3], [1, 0, 0]])
def test_reduce_scatter_takes_uneven_parts(counts: list[int]) -> None:
    size = len(counts)
    inputs = [[draw(torch.bfloat16, n, 10 * r + i) for i, n in enumerate(counts)] for r in range(3)]

    def program(rank: Rank) -> Tensor:
        output = torch.empty(counts[rank.rank], dtype=torch.bfloat16)
        rank.run("reduce_scatter", inputs[rank.rank], [output], op="sum")
        return output

    for rank, result in enumerate(run_threads(size, program)):
        expected = in_rank_order(operator.add, [inputs[r][rank] for r in range(size)])
        assert_same_bits([result], expected)


def test_reduce_scatter_into_its_own_input() -> None:
    def program(rank: Rank) -> Tensor:
        flat = torch.arange(6000, dtype=torch.float32).reshape(3, -1) * (rank.rank + 1)
        rank.run("reduce_scatter", list(flat), [flat[rank.rank]], op="sum")
        return flat[rank.rank]

    results = run_threads(3, program)
    assert_same_bits([torch.cat(results)], torch.arange(6000, dtype=torch.float32) * 6)
