"""The c10d document's ReduceOpTest."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import tilework.distributed as dist

NAMES = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
named = pytest.mark.parametrize("name", NAMES)
scaled = pytest.mark.parametrize("scale", [torch.tensor(1.0), 2.0], ids=["tensor", "number"])


@named
def test_names_are_reduce_ops(name: str) -> None:
    assert isinstance(getattr(dist.ReduceOp, name), dist.ReduceOp)
    assert isinstance(dist.ReduceOp(getattr(dist.ReduceOp, name)), dist.ReduceOp)


@scaled
def test_premultiplied_sums_are_reduce_ops(scale: float | torch.Tensor) -> None:
    op = dist.make_premul_sum(scale)
    assert isinstance(op, dist.ReduceOp)
    assert copy.copy(op) == op
    assert copy.deepcopy(op) == op
    assert pickle.loads(pickle.dumps(op)) == op


def test_premultiplied_sums_differ_by_their_factor() -> None:
    assert dist.make_premul_sum(2.0) == dist.make_premul_sum(torch.tensor(2.0))
    assert dist.make_premul_sum(2.0) != dist.make_premul_sum(3.0)


@named
def test_copies_are_equal(name: str) -> None:
    op = getattr(dist.ReduceOp, name)
    for original in (op, dist.ReduceOp(op)):
        assert copy.copy(original) == op
        assert copy.deepcopy(original) == op


@named
def test_pickles_are_equal(name: str) -> None:
    op = getattr(dist.ReduceOp, name)
    assert pickle.loads(pickle.dumps(op)) == op
    wrapped = dist.ReduceOp(op)
    assert pickle.loads(pickle.dumps(wrapped)) == wrapped


@named
def test_equality_goes_one_way_only(name: str) -> None:
    op = getattr(dist.ReduceOp, name)
    wrapped = dist.ReduceOp(op)
    assert wrapped == wrapped
    assert wrapped == op
    # The other way round a bare name equals nothing but itself, as users of torch know it.
    assert op != wrapped
    for thing in (op, wrapped):
        assert thing != "abc"
        assert "abc" != thing  # noqa: SIM300 (the string's __ne__ is asked first)
    assert None not in (op, wrapped)
    assert "abc" not in (op, wrapped)


@named
def test_names_are_told_apart(name: str) -> None:
    op = getattr(dist.ReduceOp, name)
    others = [getattr(dist.ReduceOp, other) for other in NAMES if other != name]
    assert op not in others
    assert dist.ReduceOp(op) not in others
    assert len({op, *others}) == len(NAMES)


def test_nonsense_is_refused() -> None:
    with pytest.raises(TypeError, match="SUM"):
        dist.ReduceOp("sum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one number"):
        dist.make_premul_sum(torch.ones(2))
