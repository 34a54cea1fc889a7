"""torch.equal and torch.allclose: one answer for all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs

import tilework.distributed as dist
from tests.sharded.ops.op_checks import CUTS, RANKS, SIZE, shards_of, values
from tests.sharded.ranks_and_specs import check_all_raise, chunks, examples, on, specs
from tilework.sharded import ones


@examples(30)
@given(hs.data())
def test_any_two_cuts(data: hs.DataObject) -> None:
    """Also an element that differs on one rank only is seen by all."""
    one, two = (data.draw(specs((4, 3), (0, 1, 2))) for _ in range(2))
    whole, other = values(4, 3), values(4, 3)
    changed = data.draw(hs.booleans())
    if changed:
        other[data.draw(hs.integers(0, 3)), data.draw(hs.integers(0, 2))] += 0.5

    def program(rank: int) -> list[bool]:
        a, b = shards_of(whole, one, rank), shards_of(other, two, rank)
        tolerant = torch.allclose(a, b, atol=1)
        return [torch.equal(a, b), a.equal(b), torch.allclose(a, b), a.allclose(b), not tolerant]

    assert on(RANKS, program) == [[not changed] * 4 + [False]] * RANKS


def test_nothing_is_changed_by_comparing() -> None:
    def program(rank: int) -> None:
        a, b = (ones(CUTS[name], *SIZE, requires_grad=True) for name in ("rows", "grid"))
        tiles = b.local_tiles()
        assert torch.equal(a, b)
        assert b.sharding_spec() == CUTS["grid"]
        assert all(x is y for x, y in zip(tiles, b.local_tiles(), strict=True))

    on(RANKS, program)


def test_as_plain_tensors_compare() -> None:
    spec = chunks(0, [0])

    def program(rank: int) -> None:
        pairs: list[tuple[Any, Any]] = [
            (torch.ones(4), torch.ones(4, dtype=torch.int32)),
            (torch.ones(4), torch.ones(4, dtype=torch.float64)),
            (torch.ones(4), torch.ones(3)),
            (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])),
        ]
        for a, b in pairs:
            one, two = shards_of(a, spec, rank), shards_of(b, spec, rank)
            assert torch.equal(one, two) == torch.equal(a, b)
        assert torch.allclose(one, two, equal_nan=True)
        assert not torch.allclose(one, two)

    on(2, program)


@pytest.mark.parametrize("compare", [torch.equal, torch.allclose])
def test_plain_and_sharded_raise(compare: Any) -> None:
    for flip in (False, True):

        def program(rank: int, flip: bool = flip) -> None:
            pair = [ones(chunks(0, [0]), 4), torch.ones(4)]
            compare(*(reversed(pair) if flip else pair))

        check_all_raise(2, program, RuntimeError, "not supported for ShardedTensor!$")


def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    def program(rank: int) -> None:
        spec = chunks(0, [0])
        torch.allclose(ones(spec, 4), ones(spec, 4, dtype=torch.int32))

    check_all_raise(2, program, RuntimeError, "did not match")


def test_different_shapes_of_allclose_raise() -> None:
    def program(rank: int) -> None:
        torch.allclose(ones(chunks(0, [0]), 4), ones(chunks(0, [0]), 3))

    check_all_raise(2, program, RuntimeError, "one shape.*not supported for ShardedTensor!$")


def test_ranks_outside_the_group_answer_by_what_they_know() -> None:
    def program(rank: int) -> list[bool]:
        group = dist.new_group([1, 2])
        a = ones(chunks(0, [1, 2]), 4, process_group=group)
        b = ones(chunks(0, [1, 2]), 3, process_group=group)
        return [torch.equal(a, a * 1), torch.allclose(a, a + 0), torch.equal(a, b)]

    assert on(RANKS, program) == [[True, True, False]] * RANKS
