"""Reductions over all elements, and over dims that are not cut."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor
from torch.nn import functional as F

import tilework.distributed as dist
from tests.sharded.ops.op_checks import (
    CUTS,
    RANKS,
    SIZE,
    WHOLE_DIMS,
    check_cuts,
    check_same,
    close,
    shards_of,
    values,
)
from tests.sharded.ranks_and_specs import boxes, check_all_raise, chunks, examples, grid, on, specs
from tests.tables import each
from tilework import sharded
from tilework.sharded import ShardedTensor, empty, ones

_ALL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of all dims, kept": lambda x: torch.sum(x, (0, 1), keepdim=True),
    "sum in another dtype": lambda x: x.sum(dtype=torch.float32),
    "nansum": lambda x: torch.nansum(torch.where(x > 2, math.nan, x)),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "amax": lambda x: x.amax(),
    "amin over dims": lambda x: torch.amin(x, (0, -1)),
    "max of nan": lambda x: torch.where(x > 2, math.nan, x).max(),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: torch.all(x > -1e9),
    "isnan": lambda x: x.isnan().any(),
    "any of bytes": lambda x: x.abs().byte().any(),
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1),
    "norm 3": lambda x: x.norm(3),
    "norm -2": lambda x: torch.linalg.vector_norm(x, -2),
    "norm inf": lambda x: torch.norm(x, math.inf),
    "norm -inf": lambda x: torch.linalg.vector_norm(x, -math.inf),
    "norm 0": lambda x: x.detach().norm(0),
    "norm of zeros": lambda x: (x * 0).norm(),
    "var": lambda x: x.var(),
    "var, biased": lambda x: x.var(False),
    "var, corrected by 3": lambda x: torch.var(x, correction=3),
    "std": lambda x: x.std(),
    "std of equal elements": lambda x: (x * 0 + 1).std(),
    "logsumexp": lambda x: x.logsumexp((0, 1)),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: torch.argmin(x),
    "argmax of nan": lambda x: torch.where(x > 2, math.nan, x).argmax(),
    "sum of integers": lambda x: x.int().sum(),
    "mean of halves": lambda x: x.detach().bfloat16().mean(),
    "sum of a product": lambda x: (x * x.exp()).sum(),
    "two uses": lambda x: x.sum() * x.max(),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "l1_loss": lambda x: F.l1_loss(x, x * 0, reduction="sum"),
    "no loss reduction": lambda x: F.smooth_l1_loss(x, x * 2, reduction="none"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
}


@each("compute", _ALL.values())
def test_over_all_elements(compute: Callable[[Any], Any]) -> None:
    check_cuts(compute, [values(*SIZE).requires_grad_()])


@each("compute", _ALL.values())
@each("size", [(0, 3), (1, 1)])
def test_of_no_elements_and_of_one(size: tuple[int, int], compute: Callable[[Any], Any]) -> None:
    """Also the errors are the same: of no elements there is no maximum."""
    whole = values(*size)

    def program(rank: int) -> None:
        tensor = shards_of(whole, chunks(0, [1, 2]), rank)
        try:
            expected = compute(whole)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                compute(tensor)
            return
        found = compute(tensor)
        if not isinstance(found, ShardedTensor):
            close(found, expected)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, on degrees of freedom
        on(RANKS, program)


def test_one_dim_gives_the_value_and_its_place() -> None:
    whole = values(9)
    spec = chunks(0, [0, 2, 0])

    def program(rank: int) -> None:
        for compute in (lambda x: x.max(0), lambda x: x.min(dim=0, keepdim=True),
            lambda x: x.argmax(0), lambda x: x.sum(0)):  # fmt: skip
            found = check_same(rank, compute, [whole], spec)
            assert not isinstance(found, ShardedTensor)

    on(RANKS, program)


def test_one_of_equal_elements_gets_the_gradient() -> None:
    whole = torch.tensor([1.0, 3.0, -2.0, 3.0, -2.0, 3.0], dtype=torch.float64).requires_grad_()

    def program(rank: int) -> None:
        for spec in (chunks(0, [0, 2, 0]), chunks(0, [1])):
            check_same(rank, lambda x: x.max(0).values, [whole], spec)
            check_same(rank, lambda x: x.min(dim=0, keepdim=True).values, [whole], spec)
            check_same(rank, lambda x: x.max(), [whole], spec)

    on(RANKS, program)


_ALONG: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, dim: x.sum(dim),
    "mean, kept": lambda x, dim: torch.mean(x, dim, keepdim=True),
    "max": lambda x, dim: x.max(dim),
    "amin": lambda x, dim: x.amin(dim=dim),
    "argmax": lambda x, dim: x.argmax(dim),
    "var": lambda x, dim: x.var(dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "median": lambda x, dim: x.detach().median(dim),
    "softmax": lambda x, dim: F.softmax(x, dim),
    "softmax in another dtype": lambda x, dim: torch.softmax(x, dim, dtype=torch.float32),
    "log_softmax": lambda x, dim: x.log_softmax(dim - 2),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "sort": lambda x, dim: torch.sort(x, dim=dim, descending=True),
    "topk": lambda x, dim: x.topk(2, dim),
    "flip": lambda x, dim: x.flip(dim),
    "normalize": lambda x, dim: F.normalize(x, dim=dim),
    "any": lambda x, dim: (x > 0).any(dim),
}


@each("dim", [0, 1])
@each("compute", _ALONG.values())
def test_along_a_dim_that_is_not_cut(compute: Callable[[Any, int], Any], dim: int) -> None:
    whole = values(*SIZE).requires_grad_()
    whole.data.add_(torch.arange(20.0).view(SIZE) / 100)  # sorting has one answer

    def program(rank: int) -> None:
        for name, spec in CUTS.items():
            if dim in WHOLE_DIMS[name]:
                found = check_same(rank, lambda x: compute(x, dim), [whole], spec)
                first = found if isinstance(found, Tensor) else found[0]
                assert isinstance(first, ShardedTensor)
                assert first.owners == shards_of(whole, spec, rank).owners

    on(RANKS, program)


@each("compute", _ALONG.values())
def test_along_a_cut_dim_raises_and_says_what_to_do(compute: Callable[[Any, int], Any]) -> None:
    whole = values(*SIZE)
    for name, spec in CUTS.items():
        for dim in {0, 1} - WHOLE_DIMS[name]:
            for message in check_all_raise(
                RANKS,
                lambda rank, spec=spec, dim=dim: compute(shards_of(whole, spec, rank), dim),  # type: ignore[misc]
                RuntimeError,
                "not supported for ShardedTensor!$",
            ):
                assert "reshard" in message


@examples(30)
@given(hs.data())
def test_any_cut(data: hs.DataObject) -> None:
    size = data.draw(hs.sampled_from([(6,), (5, 3), (2, 3, 4)]))
    spec = data.draw(specs(size, (0, 1, 2)))
    whole = values(*size).requires_grad_()

    def program(rank: int) -> None:
        compute = lambda x: (x.sum(), x.max(), x.norm(), x.var(), x.argmax(), x.prod())  # noqa: E731
        check_same(rank, compute, [whole], spec)

    on(RANKS, program)


def test_the_same_bits_on_every_rank() -> None:
    whole = values(999, 7, dtype=torch.float32)

    def program(rank: int) -> list[float]:
        tensor = shards_of(whole, chunks(0, [0, 1, 2, 1]), rank)
        return [
            f(tensor).item() for f in (torch.sum, torch.prod, torch.mean, torch.var, torch.norm)
        ]

    first, *others = on(RANKS, program)
    assert others == [first] * 2


def test_16_bit_floats_are_accumulated_in_32() -> None:
    whole = torch.ones(4096, dtype=torch.bfloat16)
    assert on(2, lambda rank: shards_of(whole, chunks(0, [0, 1]), rank).sum().item()) == [4096] * 2


def test_complex_numbers() -> None:
    whole = torch.complex(values(*SIZE), values(*SIZE, seed=1)).requires_grad_()
    check_cuts(lambda x: x.norm(), [whole])
    check_cuts(lambda x: x.sum().abs(), [whole])
    check_cuts(lambda x: x.mean().real, [whole])


def test_one_small_collective() -> None:
    def program(rank: int) -> list[int]:
        tensor: Any = shards_of(values(*SIZE).requires_grad_(), CUTS["grid"], rank)
        tensor.sum()  # once, the ranks also compare how it is cut
        count = tensor.process_group.get_sequence_number_for_group
        steps = [count()]
        for compute in (torch.sum, torch.var, torch.norm, torch.any, torch.max, torch.argmax):
            result = compute(tensor)
            steps.append(count())
            if result.requires_grad:
                result.backward()
            assert count() == steps[-1]
        return [after - before for before, after in pairwise(steps)]

    assert on(2, program) == [[1, 1, 1, 1, 2, 2]] * 2


def test_a_scalar_tensor_has_one_element() -> None:
    whole = values(3)[1].requires_grad_()
    on(2, lambda rank: check_same(rank, lambda x: (x.sum(), x.max(), x.argmax()), [whole],
        boxes(((), (), 1))))  # fmt: skip


def test_meta_tensors_tell_shape_and_dtype() -> None:
    def program(rank: int) -> Any:
        result = empty(chunks(0, [0, 1], "meta"), 4, 4, dtype=torch.int32).sum()
        return result.is_meta, result.shape, result.dtype

    assert on(2, program) == [(True, (), torch.int64)] * 2


def test_ranks_outside_the_group_cannot_know_the_value() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([0])
        tensor = ones(chunks(0, [0]), 4, process_group=group)
        if rank == 0:
            return tensor.sum().item()
        with pytest.raises(ValueError, match="is not in the tensor's group"):
            tensor.sum()
        return None

    assert on(2, program) == [4, None]


@each(
    "compute", [lambda x: x.median(), torch.std_mean, torch.aminmax, lambda x: torch.norm(x, "nuc")]
)
def test_other_reductions_raise(compute: Callable[[Any], Any]) -> None:
    check_all_raise(
        2,
        lambda rank: compute(shards_of(values(*SIZE), grid([5], [4], [0]), rank)),
        RuntimeError,
        "not supported for ShardedTensor!$",
    )


def test_dims_that_are_not_there() -> None:
    check_all_raise(2, lambda rank: shards_of(values(*SIZE), chunks(0, [0]), rank).sum(2),
        IndexError, "Dimension out of range")  # fmt: skip


def test_tensors_that_ranks_made_differently() -> None:
    def program(rank: int) -> None:
        st = sharded.ones(chunks(0, range(2)), 4 + rank)
        with pytest.raises(ValueError, match=r"layout=size \(4,.* does not match with layout=size"):
            st.sum()

    on(2, program)
