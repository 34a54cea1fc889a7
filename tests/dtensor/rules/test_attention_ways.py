"""Attention where the sequence is sharded: by gathering, in a ring, by heads."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.tables import each
from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    context_parallel,
    distribute_tensor,
    explain,
    init_device_mesh,
    manual_seed,
)
from tilework.dtensor.debug.causes import EventLog
from tilework.dtensor.rules.attention_ways import Way
from tilework.layout import Placement
from tilework.testing import run_ranks

CUT = (Shard(2),)
sdpa: Any = F.scaled_dot_product_attention


class Case(NamedTuple):
    """A call of attention, and how its tensors lie."""

    way: Any = "ring"
    ranks: tuple[int, ...] = (3,)
    placements: tuple[Placement, ...] = CUT
    length: int = 7
    heads: tuple[int, int] = (4, 4)
    mask: str = "causal"
    dtype: torch.dtype = torch.float64
    width: int = 8
    keeps_layout: bool = True

    def tensors(self) -> list[Tensor]:
        """Query, key, value, and the gradient of the result."""
        generator = torch.Generator().manual_seed(self.length)
        sizes = [(self.heads[h], w) for h, w in ((0, 8), (1, 8), (1, self.width), (0, self.width))]
        return [
            torch.randn(2, heads, self.length, width, generator=generator, dtype=torch.float64).to(
                self.dtype
            )
            for heads, width in sizes
        ]

    def options(self) -> dict[str, Any]:
        """The other arguments."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randn(self.length, self.length, generator=generator, dtype=torch.float64)
        allowed = drawn > -0.5
        allowed[0] = False  # this query attends to nothing
        masks = {"bool": allowed, "float": drawn.to(self.dtype).expand(2, 1, -1, -1)}
        return {
            "attn_mask": masks.get(self.mask),
            "is_causal": self.mask == "causal",
            "enable_gqa": self.heads[0] != self.heads[1],
        }


def run_case(case: Case, rank: int) -> tuple[list[Tensor], EventLog]:
    """The result and the gradients on DTensors, and what was sent."""
    *tensors, grad = case.tensors()
    mesh = init_device_mesh("cpu", case.ranks)
    q, k, v = (distribute_tensor(x, mesh, case.placements).requires_grad_() for x in tensors)
    with context_parallel(case.way), explain() as log:
        out = sdpa(q, k, v, **case.options())
    assert isinstance(out, DTensor)
    assert not case.keeps_layout or out.placements == case.placements
    torch.autograd.backward((out * grad).sum())
    grads = [x.grad.full_tensor() for x in (q, k, v) if isinstance(x.grad, DTensor)]
    return [out.full_tensor().detach(), *grads], log


def one_process(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """The same of plain tensors in a dtype, in float64."""
    options = case.options()
    if case.mask == "float":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    *tensors, grad = (x.to(dtype) for x in case.tensors())
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    out = sdpa(q, k, v, **options)
    torch.autograd.backward((out * grad).sum())
    return [x.detach().double() for x in (out, q.grad, k.grad, v.grad) if x is not None]


def check(case: Case) -> EventLog:
    """Compare with one process: errors from float64 at most doubled."""
    ranks = 1
    for length in case.ranks:
        ranks *= length
    found, log = run_ranks(ranks, lambda rank: run_case(case, rank))[0]
    exact, own = one_process(case, torch.float64), one_process(case, case.dtype)
    for value, want, other in zip(found, exact, own, strict=True):
        room = 1e-5 if case.dtype is torch.float32 else 1e-12
        assert (value - want).abs().max() <= 2 * (other - want).abs().max() + room, case
    return log


@each("way", ["gather", "ring", "heads"])
@each("mask", ["none", "causal", "bool", "float"])
def test_each_way_computes_what_one_process_computes(way: str, mask: str) -> None:
    check(Case(way, mask=mask))


@each("way", ["ring", "heads"])
@each("heads", [(6, 2), (8, 1)])
def test_heads_share_keys(way: str, heads: tuple[int, int]) -> None:
    check(Case(way, ranks=(4,), heads=heads))


def test_a_ring_of_values_wider_than_keys() -> None:
    check(Case(width=5, mask="bool"))


def test_ranks_without_a_token() -> None:
    check(Case(ranks=(4,), length=3))


@each("way", ["ring", "heads", "auto"])
@each("first", [Shard(0), Shard(1), Shard(2), Shard(3), Replicate()])
def test_another_axis_shards_something_else(way: str, first: Placement) -> None:
    case = Case(way, ranks=(2, 2), placements=(first, Shard(2)))
    if (way, first) != ("heads", Shard(2)):
        check(case)
        return
    with pytest.raises(ValueError, match="2 axes of the mesh shard the sequence"):
        run_ranks(4, lambda rank: run_case(case, rank))


@each("way", ["gather", "ring", "heads"])
@each("heads", [(4, 4), (8, 1)])
def test_bfloat16_is_no_worse_than_one_process(way: str, heads: tuple[int, int]) -> None:
    check(Case(way, ranks=(4,), length=40, heads=heads, dtype=torch.bfloat16))


@given(
    case=st.builds(
        Case,
        way=st.sampled_from(["auto", "gather", "ring", "heads"]),
        ranks=st.sampled_from([(1,), (2,), (3,), (4,)]),
        placements=st.sampled_from([CUT, (Shard(2, turns=2),)]),
        keeps_layout=st.just(False),
        length=st.integers(1, 40),
        heads=st.sampled_from([(4, 4), (4, 2), (8, 2), (6, 1), (5, 5)]),
        mask=st.sampled_from(["none", "causal", "bool", "float"]),
        dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
        width=st.sampled_from([8, 5]),
    )
)
@settings(max_examples=15, deadline=None)
def test_any_program(case: Case) -> None:
    check(case)


# -- bytes -----------------------------------------------------------------------------------


@each("ranks", [2, 4])
def test_bytes_of_a_ring(ranks: int) -> None:
    log = check(Case(ranks=(ranks,), length=16, mask="none"))
    keys = 2 * 4 * 16 * 8 * 8
    assert [event.collective for event in log.events] == ["message"] * (ranks - 1)
    assert log.nbytes == 2 * keys * (ranks - 1) // ranks


@each("heads", [(4, 4), (8, 4)])
def test_bytes_of_heads(heads: tuple[int, int]) -> None:
    log = check(Case("heads", ranks=(4,), length=16, heads=heads))
    keys, sharing = 2 * heads[1] * 16 * 8 * 8, heads[0] // heads[1]
    assert [event.collective for event in log.events] == ["all_to_all"] * 4
    assert log.nbytes == (2 * sharing + 2) * keys // 4 * 3 // 4


def test_the_cheapest_way() -> None:
    def program(tokens: int, heads: tuple[int, int], **how: Any) -> set[str]:
        mesh, turns = init_device_mesh("cpu", (4,)), how.pop("turns", 1)
        q, k = (
            distribute_tensor(torch.ones(1, n, tokens, 8), mesh, [Shard(2, turns=turns)])
            for n in heads
        )
        with explain() as log:
            sdpa(q, k, k, enable_gqa=True, **how)
        return {event.collective for event in log.events}

    for tokens, heads, how, want in (
        (8, (4, 4), {"is_causal": True}, "all_gather"),
        (8192, (4, 4), {"is_causal": True}, "all_to_all"),
        (8192, (2, 2), {"is_causal": True}, "message"),
        (8192, (16, 4), {}, "message"),  # heads would move more bytes
        (8192, (16, 4), {"is_causal": True}, "all_to_all"),  # the last rank would compute longest
        (8192, (16, 4), {"is_causal": True, "turns": 2}, "message"),
    ):
        found = run_ranks(4, lambda rank, t=tokens, h=heads, how=how: program(t, h, **how))[0]
        assert found == {want}, (heads, how)


# -- what belongs to a call --------------------------------------------------------------------


def test_what_is_dropped_does_not_depend_on_the_way() -> None:
    tensors = Case(length=13, heads=(4, 2)).tensors()[:3]

    def program(rank: int) -> list[Tensor]:
        found = []
        mesh = init_device_mesh("cpu", (4,))
        for way, placement in (("gather", Replicate()), ("ring", CUT[0]), ("heads", CUT[0])):
            manual_seed(7, mesh)
            q, k, v = (distribute_tensor(x, mesh, [placement]).requires_grad_() for x in tensors)
            with context_parallel(way):  # type: ignore[arg-type]
                out = sdpa(q, k, v, dropout_p=0.4, enable_gqa=True)
            out.square().sum().backward()
            assert isinstance(k.grad, DTensor)
            found.append(torch.cat([x.full_tensor().flatten() for x in (out, k.grad)]))
        return found

    whole, *others = run_ranks(4, program)[0]
    for other in others:
        torch.testing.assert_close(other, whole)


def test_a_checkpointed_ring() -> None:
    tensors = Case(length=8).tensors()[:3]

    def program(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for again in (False, True):
            q, k, v = (distribute_tensor(x, mesh, CUT).requires_grad_() for x in tensors)
            attend = sdpa
            with context_parallel("ring"):
                out = checkpoint(attend, q, k, v, use_reentrant=False) if again else attend(q, k, v)
                out.sum().backward()
            assert isinstance(k.grad, DTensor)
            found.append(k.grad.full_tensor())
        return found

    first, again = run_ranks(2, program)[0]
    assert torch.equal(first, again)


def test_autocast_reaches_a_ring() -> None:
    tensors = Case(dtype=torch.float32).tensors()[:3]

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel("ring"), torch.autocast("cpu", torch.bfloat16):
            out = sdpa(*[distribute_tensor(x, mesh, CUT) for x in tensors])
        full: Tensor = out.full_tensor()
        return full

    with torch.autocast("cpu", torch.bfloat16):
        want = sdpa(*tensors)
    torch.testing.assert_close(run_ranks(2, program)[0], want, atol=2e-2, rtol=2e-2)


def test_a_rank_outside_the_mesh() -> None:
    def program(rank: int) -> tuple[int, ...]:
        x = distribute_tensor(torch.ones(1, 2, 8, 4), DeviceMesh("cpu", [0, 2]), CUT)
        shapes = set()
        for way in get_args(Way):
            with context_parallel(way):
                shapes.add(tuple(sdpa(x, x, x).shape))
        return shapes.pop()

    assert run_ranks(3, program) == [(1, 2, 8, 4)] * 3


# -- refused ---------------------------------------------------------------------------------


@each(
    "case, message",
    [
        (Case("heads", ranks=(3,), heads=(2, 1)), "2 heads of queries are fewer than the 3 ranks"),
        (Case("heads", ranks=(3,), heads=(2, 2)), "2 heads of queries are fewer than the 3 ranks"),
    ],
)
def test_heads_that_do_not_fit(case: Case, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_ranks(3, lambda rank: run_case(case, rank))


def test_a_ring_needs_as_many_queries_as_keys() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        q, k = (distribute_tensor(torch.ones(1, 2, n, 4), mesh, CUT) for n in (4, 6))
        with context_parallel("ring"):
            sdpa(q, k, k)

    with pytest.raises(ValueError, match="as many queries as keys, got 4 and 6"):
        run_ranks(2, program)


def test_a_ring_within_torch_func() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(1, 2, 4, 4), init_device_mesh("cpu", (2,)), CUT)
        with context_parallel("ring"):
            torch.func.grad(lambda x: sdpa(x, x, x).sum())(x)

    with pytest.raises(RuntimeError, match=re.escape("torch.func's transforms")):
        run_ranks(2, program)


def test_an_unknown_way() -> None:
    with pytest.raises(ValueError, match="way must be one of 'auto', 'gather', 'ring', 'heads'"):
        context_parallel("rings").__enter__()  # type: ignore[arg-type]


@each("way", get_args(Way))
@each("shape", [(12, 1), (1, 12), (6, 12), (12, 6), (3, 12, 12), (12,)])
def test_a_mask_is_broadcast_as_on_one_process_or_refused(way: Way, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(1, 4, 12, 8), torch.randn(shape)

    def program(rank: int) -> Tensor:
        mine = distribute_tensor(x, init_device_mesh("cpu", (2,)), CUT)
        with context_parallel(way):
            made: DTensor = sdpa(mine, mine, mine, attn_mask=mask)
        return made.full_tensor()

    if not set(shape) <= {1, 12} or len(shape) == 1:
        with pytest.raises((RuntimeError, IndexError), match=r"must match|out of range"):
            run_ranks(2, program)
    else:
        torch.testing.assert_close(run_ranks(2, program)[0], sdpa(x, x, x, attn_mask=mask))


@each("low", [torch.finfo(torch.float32).min, -1e9])
def test_a_ring_attends_to_all_keys_of_a_row_that_is_wholly_masked_by_numbers(low: float) -> None:
    torch.manual_seed(0)
    x, mask = torch.randn(2, 2, 13, 8), torch.zeros(13, 13)
    mask[3] = mask[12] = low
    x.requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernel has wrong gradients of such rows
        want = sdpa(x, x, x, mask)
        want.square().sum().backward()

    def program(rank: int) -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (3,))
        mine = distribute_tensor(x.detach(), mesh, CUT).requires_grad_()
        with context_parallel("ring"):
            made: Any = sdpa(mine, mine, mine, distribute_tensor(mask, mesh, [Replicate()]))
        made.square().sum().backward()
        assert isinstance(mine.grad, DTensor)
        return made.full_tensor().detach(), mine.grad.full_tensor()

    want_all = want.detach(), x.grad
    torch.testing.assert_close(run_ranks(3, program)[0], want_all, rtol=1e-4, atol=1e-4)
