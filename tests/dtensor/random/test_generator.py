"""Random numbers: the same global values on every mesh and in every layout, again where seeded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.dtensor.sharded_values import full
from tests.dtensor.test_from_local import raised_by_all
from tests.tables import each
from tilework.comm.agreement import agree
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    empty,
    init_device_mesh,
    manual_seed,
    rand,
    randn,
    zeros,
)
from tilework.dtensor.propagation.dtensor_call import content_hash
from tilework.dtensor.random.generator import next_key
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

#: Meshes, and what their axes do.
PLACES: list[tuple[tuple[int, ...], Sequence[Placement], Sequence[int] | None]] = [
    ((1,), [Replicate()], None),
    ((2,), [Shard(0)], None),
    ((2,), [Shard(1)], None),
    ((2,), [Partial()], None),
    ((3,), [Shard(0, sizes=(1, 0, 4))], None),
    ((2, 2), [Shard(1), Replicate()], None),
    ((2, 2), [Shard(0), Shard(0)], (1, 0)),
]
SHAPE = (5, 6)


def drawn(make: Callable[[Callable[..., DTensor]], Sequence[Tensor]]) -> list[list[Tensor]]:
    """What ``make`` gives on each mesh and in each layout; it gets what makes empty tensors."""
    found = []
    for shape, placements, order in PLACES:

        def program(rank: int, shape: Any = shape, place: Any = (placements, order)) -> Any:
            mesh = init_device_mesh("cpu", shape)
            torch.manual_seed(11)

            def new(**options: Any) -> DTensor:
                placements, order = place
                return empty(SHAPE, device_mesh=mesh, placements=placements, order=order, **options)

            return [one.full_tensor() for one in make(new)]  # type: ignore[attr-defined]

        found.extend(run_ranks(math.prod(shape), program))
    return found


def check_alike(make: Callable[[Callable[..., DTensor]], Sequence[Tensor]]) -> list[Tensor]:
    first, *others = drawn(make)
    for other in others:
        assert all(map(torch.equal, first, other))
    return first


FILLS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.uniform_(-1, 3),
    lambda x: x.normal_(2, 0.5),
    lambda x: x.exponential_(2.0),
    lambda x: x.log_normal_(),
    lambda x: x.cauchy_(1, 2),
    lambda x: x.geometric_(0.3),
    lambda x: x.bernoulli_(0.3),
    lambda x: x.random_(),
    lambda x: x.random_(7),
    lambda x: x.random_(-3, 4),
]
INITS: list[Callable[[Tensor], Tensor]] = [
    nn.init.uniform_,
    nn.init.normal_,
    nn.init.trunc_normal_,
    lambda x: nn.init.trunc_normal_(x, 0, 1, 1, 1.5),
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    nn.init.kaiming_uniform_,
    lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    nn.init.kaiming_normal_,
    nn.init.orthogonal_,
    nn.init.eye_,
    lambda x: nn.init.constant_(x, 3.0),
    nn.init.ones_,
    nn.init.zeros_,
]


def test_fills_do_not_depend_on_the_layout() -> None:
    found = check_alike(lambda new: [fill(new()) for fill in FILLS])
    uniform, normal, exponential, log_normal, _, geometric, chosen, integers, to, between = found
    assert uniform.min() >= -1
    assert uniform.max() < 3
    assert abs(normal.mean() - 2) < 0.5
    assert exponential.min() >= 0
    assert log_normal.min() > 0
    assert geometric.min() >= 1
    assert set(chosen.flatten().tolist()) == {0, 1}
    assert integers.max() > 1000
    assert set(to.flatten().tolist()) <= set(range(7))
    assert set(between.flatten().tolist()) <= set(range(-3, 4))


def test_initialisation_does_not_depend_on_the_layout() -> None:
    # orthogonal_ computes with all of it in the end: which kernels do so, and in which order they
    # sum, may differ.
    first, *others = drawn(lambda new: [init(new()) for init in INITS])
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.allclose(one, same, atol=1e-6)
    truncated = first[2]
    assert truncated.abs().max() <= 2
    assert 1 <= first[3].min() <= first[3].max() <= 1.5
    assert torch.allclose(first[9] @ first[9].T, torch.eye(5), atol=1e-5)
    assert torch.equal(first[10], torch.eye(5, 6))


def test_factories_and_likes_do_not_depend_on_the_layout() -> None:
    def make(new: Callable[..., DTensor]) -> list[Tensor]:
        like = new()
        mesh, placements = like.device_mesh, like.placements
        p = rand(SHAPE, device_mesh=mesh, placements=placements)
        return [
            p,
            randn(*SHAPE, device_mesh=mesh, placements=placements, dtype=torch.float64),
            torch.rand_like(like),
            torch.randn_like(like, dtype=torch.bfloat16),
            torch.randint_like(like, 5),
            torch.randint_like(like, 2, 9, dtype=torch.int32),
            torch.bernoulli(p),
            torch.bernoulli(like, 0.25),
            like.clone().bernoulli_(p),
            torch.normal(p, 2.0),
            torch.normal(p, p),
            torch.multinomial(p, 3),
            torch.poisson(p * 5),
        ]

    found = check_alike(make)
    assert not torch.equal(found[0], found[2])
    assert found[3].dtype == torch.bfloat16
    assert found[5].dtype == torch.int32
    assert found[5].min() >= 2


def test_every_dtype_is_filled() -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    check_alike(lambda new: [new(dtype=dtype).normal_() for dtype in dtypes])
    whole = [torch.int64, torch.int8, torch.uint8, torch.bool]
    check_alike(lambda new: [new(dtype=dtype).random_() for dtype in whole])


def test_ranks_that_drew_differently_still_agree() -> None:
    """The first rank's generator counts."""

    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(rank)
        return next_key(mesh).seed, rand(8, device_mesh=mesh).to_local().tolist()

    first, second = run_ranks(2, program)
    assert first == second


def test_the_state_of_torchs_generator_is_all_there_is() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))

        def next_one() -> list[float]:
            found: list[float] = rand(3, device_mesh=mesh).full_tensor().tolist()
            return found

        torch.manual_seed(5)
        assert torch.initial_seed() == 5
        first, second = next_one(), next_one()
        assert first != second
        torch.manual_seed(5)
        with torch.random.fork_rng(devices=[]):
            assert next_one() == first
        state = torch.get_rng_state()
        assert next_one() == first
        torch.set_rng_state(state)
        assert next_one() == first
        manual_seed(5, mesh)
        assert next_one() == first
        own = torch.Generator().manual_seed(5)
        torch.seed()
        x: Any = empty(3, device_mesh=mesh).uniform_(generator=own)
        assert x.full_tensor().tolist() == first

    run_ranks(2, program)
    run_ranks(2, program, kind="processes")


def test_manual_seed_wants_one_seed() -> None:
    def program(rank: int) -> None:
        manual_seed(rank, init_device_mesh("cpu", (2,)))

    assert "needs one seed" in raised_by_all(2, program, ValueError)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_draws_the_same(use_reentrant: bool) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(6, 4, requires_grad=True), mesh, [Shard(0)])
        masks = []

        def noisy(x: Tensor) -> Tensor:
            mask = torch.bernoulli(torch.full_like(x, 0.5))
            masks.append(mask.full_tensor())  # type: ignore[attr-defined]
            return (x * mask).sin() * x

        torch.manual_seed(rank)
        out: Any = checkpoint(noisy, x, use_reentrant=use_reentrant)
        out.sum().backward()
        assert len(masks) == 2
        assert torch.equal(*masks)

    run_ranks(2, program)


def test_autograd_sees_a_fill() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        leaf = distribute_tensor(torch.ones(4, requires_grad=True), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="leaf Variable"):
            leaf.uniform_()
        made: Any = leaf * 2
        made.uniform_()
        made.sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert leaf.grad.full_tensor().tolist() == [0, 0, 0, 0]
        with torch.no_grad():
            version = leaf.to_local()._version
            leaf.normal_()
            assert leaf.to_local()._version > version
        p = distribute_tensor(torch.full((4,), 0.5, requires_grad=True), mesh, [Shard(0)])
        found: Any = torch.bernoulli(p)
        found.sum().backward()
        assert isinstance(p.grad, DTensor)
        assert p.grad.full_tensor().tolist() == [0, 0, 0, 0]

    run_ranks(2, program)


def test_threads_that_are_ranks_have_generators_of_their_own() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state

    def program(rank: int) -> tuple[int, int]:
        begun = torch.initial_seed()
        torch.manual_seed(100 + rank)
        return begun, torch.initial_seed()

    assert run_ranks(3, program) == [(1, 100), (1, 101), (1, 102)]
    assert torch.random.get_rng_state is before
    assert torch.get_rng_state is before


def test_random_numbers_depend_on_neither_ranks_nor_layouts() -> None:
    """pytorch#168058, pytorch#138329: also on a mesh of CPUs, in dropout and in initialisation."""

    def drawn(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Tensor]:
        manual_seed(5, mesh)
        x = distribute_tensor(torch.zeros(5, 6), mesh, placements, src_data_rank=None)
        weight = nn.Parameter(x.clone())
        nn.init.kaiming_uniform_(weight)
        nn.init.trunc_normal_(x)
        made = [x, weight, F.dropout(x, 0.4), torch.rand_like(x), x.clone().uniform_()]
        return [full(one) for one in made]

    def program(rank: int, size: int) -> list[list[Tensor]]:
        mesh = init_device_mesh("cpu", (size,))
        every: list[Placement] = [Shard(0), Shard(1), Replicate()]
        found = [drawn(mesh, [one]) for one in every]
        if size == 4:
            grid = init_device_mesh("cpu", (2, 2))
            found += [drawn(grid, pair) for pair in itertools.product(every, repeat=2)]
        return found

    results = [one for size in (1, 2, 4) for one in run_ranks(size, program, size)[0]]
    for one in results[1:]:
        for got, want in zip(one, results[0], strict=True):
            assert torch.equal(got, want)


def test_ranks_that_are_threads_draw_alike_however_they_hurry() -> None:
    """A rank that is ahead draws its next key while others still draw by the last one."""

    def program(rank: int) -> None:
        x = distribute_tensor(torch.full((64,), 4.0), init_device_mesh("cpu", (4,)), [Shard(0)])
        group = x.device_mesh.axes_group((0,))
        for _ in range(60):
            drawn = [torch.poisson(x), torch.multinomial(x, 3), F.rrelu(-x, training=True)]
            for numbers in drawn:
                assert isinstance(numbers, DTensor)
                assert len(set(agree(lambda t=numbers: content_hash(t.full_tensor()), group))) == 1  # type: ignore[misc]

    run_ranks(4, program)


@each(
    "draw",
    [
        *(lambda x, bad=bad: x.exponential_(bad) for bad in (-1.0, math.nan)),
        lambda x: x.log_normal_(0.0, math.nan),
        lambda x: x.cauchy_(0.0, math.nan),
        lambda x: x.geometric_(math.nan),
        lambda x: x.long().exponential_(),
        lambda x: x.long().cauchy_(),
        lambda x: x.long().log_normal_(),
        lambda x: x.to(torch.complex64).exponential_(),
        lambda x: x.to(torch.complex64).bernoulli_(),
        lambda x: x.to(torch.complex64).geometric_(0.5),
        lambda x: x.bernoulli_(x),
        lambda x: x.bernoulli_(x * math.nan),
        lambda x: x.bernoulli_(torch.tensor(1.5)),
        torch.bernoulli,
        lambda x: torch.normal(x, -1.0),
        lambda x: torch.normal(x, -x),
        lambda x: torch.normal(0.0, -x),
        lambda x: torch.normal(x, x * math.nan),
    ],
)
def test_what_torch_does_not_draw_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    values = torch.tensor([2.0, 3.0, 4.0, 5.0])
    with pytest.raises((RuntimeError, NotImplementedError)):
        draw(values.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises((RuntimeError, NotImplementedError)):
            draw(x)

    run_ranks(2, program)


def test_plain_probabilities_are_drawn_from_alike_in_any_layout() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        drawn = []
        for placement in (Shard(0), Replicate()):
            x: Any = zeros(64, device_mesh=mesh, placements=[placement])
            torch.manual_seed(rank)  # the first rank's counts
            drawn.append(x.bernoulli_(torch.tensor(0.5)).full_tensor().tolist())
        assert drawn[0] == drawn[1]
        assert set(drawn[0]) == {0, 1}
        assert len(set(agree(lambda: content_hash(x.to_local())))) == 1

    run_ranks(2, program)
