"""What users have complained of around sharded tensors: layouts, meshes, mixing, costs, errors."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dtensor.op_checks import (
    Layout,
    check_op,
    distributed,
    noting_gatherings,
)
from tests.dtensor.sharded_values import collectives, cut, full, same
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    manual_seed,
    plan_redistribution,
    register_rule,
)
from tilework.layout import redistribution_steps, step_search
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
EVERY: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def terms(whole: Tensor, mesh: DeviceMesh, op: str = "sum") -> DTensor:
    """A copy of a tensor in terms along all axes of a mesh."""
    return distributed(whole, mesh, Layout((Partial(op),) * mesh.ndim))


# -- random numbers --------------------------------------------------------------------------


def test_random_numbers_depend_on_neither_ranks_nor_layouts() -> None:
    """pt#168058, pt#138329: also on a mesh of CPUs, in dropout and in initialisation."""

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


# -- training as people write it -------------------------------------------------------------


def test_scaled_gradients_are_unscaled_in_every_layout() -> None:
    """By ``GradScaler``: once, and one rank's overflow makes all ranks skip the step."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY, repeat=2):
            weight = nn.Parameter(cut(GRID, mesh, placements))
            optimizer = torch.optim.SGD([weight], 0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            factor = cut(GRID, mesh, placements[::-1])
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            same(weight.grad, GRID)
            scaler.step(optimizer)
            scaler.update()
            same(weight, GRID / 2)
            assert weight.grad is not None
            weight.grad[3, 5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            same(weight, GRID / 2)
            assert scaler.get_scale() == 4

    run_ranks(4, program)


def test_plain_running_statistics_are_those_of_the_whole_batch() -> None:
    """A plain ``BatchNorm`` module in training, with an input whose rows are cut."""
    plain = nn.BatchNorm1d(6)
    plain(GRID)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            module = nn.BatchNorm1d(6)
            module(cut(GRID, mesh, [placement]))
            torch.testing.assert_close(module.running_mean, plain.running_mean)
            torch.testing.assert_close(module.running_var, plain.running_var)

    run_ranks(2, program)


# -- uneven and arbitrary parts --------------------------------------------------------------


def test_parts_may_be_of_any_size() -> None:
    """pt#144109, pt#161368, pt#168134, pt#169320: uneven, explicit, empty, on two axes."""

    def layers(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w).relu() + 1, (7,)).cumsum(0)[1:].t()

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        both = (Shard(0), Shard(0))
        xs = [
            Layout((Shard(0, (0, 5)), Replicate())),
            Layout((Shard(0, (4, 1)), Shard(1, (3, 0)))),
            Layout(both),
            Layout(both, (1, 0)),
            Layout((Shard(1), Shard(0)), None),
        ]
        ws = [Layout((Replicate(), Shard(0, (6, 1)))), Layout(both, (1, 0)), Layout(both)]
        return [[x, w] for x in xs for w in ws]

    x, w = torch.randn(5, 3), torch.randn(7, 3)
    check_op(layers, x, w, meshes=((2, 2),), layouts=layouts, rtol=1e-4, atol=1e-5)


def test_offsets_of_parts_are_where_the_elements_are() -> None:
    """pt#161368, pt#168134: for each element of each rank, in both orders of axes."""
    whole = torch.arange(35).view(5, 7)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY, repeat=2):
            for order in (None, (1, 0)):
                x = distributed(whole, mesh, Layout(placements, order))
                box = x._spec.local_box
                assert torch.equal(x.to_local(), whole[box.slices])
                assert torch.equal(full(x), whole)

    run_ranks(4, program)


# -- redistribution --------------------------------------------------------------------------


def kinds(x: DTensor, placements: Sequence[Placement], dtype: torch.dtype | None = None) -> Any:
    """The steps of a redistribution, with those that communicate nothing left out."""
    steps = plan_redistribution(x, placements, dtype=dtype).steps
    return [step.kind for step in steps if step.kind not in ("slice", "fill")]


def test_redistribution_takes_no_needless_way() -> None:
    """autoparallel#462, pt#132751, pt#167106, pt#171913: what is planned is what is run."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(512.0 * 256).view(512, 256)
        tried: list[tuple[list[Placement], list[Placement], list[str] | None]] = [
            # From shard to shard: not through replicate.
            ([Replicate(), Shard(0)], [Replicate(), Shard(1)], ["all_to_all"]),
            ([Shard(0), Replicate()], [Shard(1), Replicate()], ["all_to_all"]),
            ([Shard(0), Shard(0)], [Shard(1), Shard(1)], ["all_to_all"]),
            ([Shard(0), Shard(1)], [Shard(1), Shard(0)], ["plan"]),
            # Reductions that follow each other are one.
            ([Partial(), Partial()], [Replicate(), Replicate()], ["all_reduce"]),
            ([Partial(), Partial()], [Shard(0), Shard(0)], ["reduce_scatter"]),
            # What is to be cut anyway is cut first.
            ([Shard(0), Replicate()], [Replicate(), Shard(1)], None),
            ([Replicate(), Replicate()], [Shard(0), Shard(1)], []),
        ]
        for source, target, wanted in tried:
            x = distributed(whole, mesh, Layout(tuple(source)))
            found = kinds(x, target)
            assert wanted is None or found == wanted, (source, target, found)
            assert "all_gather" not in found or len(found) == 1, (source, target, found)
            x.redistribute(placements=target)  # agreed on
            with collectives() as called:
                same(x.redistribute(placements=target), whole)
            moved = [name for name in called if name != "all_gather_object"]
            assert len(moved) >= len(found)

    run_ranks(4, program)


def test_planning_on_four_axes_looks_at_few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """pt#166747: it does not grow exponentially."""
    seen: list[Any] = []
    edges = step_search.Space.edges

    def counting(self: step_search.Space, at: Any) -> Iterator[step_search.Edge]:
        seen.append(at)
        return edges(self, at)

    monkeypatch.setattr(step_search.Space, "edges", counting)
    shape, lengths = (64, 64, 64, 64), (2, 2, 2, 2)
    every = (Shard(0), Shard(1), Shard(2), Shard(3))
    for source, target in (
        (every, every[::-1]),
        (every, (every[1], every[2], every[3], every[0])),
        ((Shard(0),) * 4, (Shard(1),) * 4),
        ((Partial(),) * 4, every),
        ((Partial(), Shard(0), Partial(), Shard(1)), (Shard(1), Shard(0), Shard(0), Replicate())),
    ):
        seen.clear()
        redistribution_steps(shape, lengths, source, target)
        assert 0 < len(seen) < 2000, (source, target, len(seen))


def test_a_partial_value_passes_a_cast() -> None:
    """pt#183363: it may be cast to more precision in terms; to less only its sum may be."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = terms(GRID.bfloat16(), mesh)
        assert torch.equal(full(x.float()), full(x).float()) or torch.allclose(
            full(x.float()), full(x).float(), rtol=1e-2
        )
        exact = terms(GRID, mesh)
        assert torch.equal(full(exact.bfloat16()), full(exact).bfloat16())
        assert torch.equal(full(exact.double().float()), full(exact))
        assert torch.equal(full(exact.int()), full(exact).int())

    run_ranks(2, program)


# -- collective or not -----------------------------------------------------------------------


def test_full_tensor_on_one_rank_raises_in_time() -> None:
    """AReaL#187: what all ranks have to do, done by one, is an error and not a hang."""

    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(torch.arange(4.0), mesh, [Shard(0)])
        x.full_tensor()  # the group is made
        if rank == 0:
            with pytest.raises(RuntimeError) as raised:
                x.full_tensor()
            return str(raised.value)
        return ""

    found = run_ranks(2, program, timeout=timedelta(seconds=2), return_exceptions=True)
    assert "all_gather" in str(found[0]), found


def test_distributing_what_all_ranks_have_moves_nothing() -> None:
    """pt#143883: with ``src_data_rank=None`` nothing is sent, not even a word."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        with collectives() as called:
            for placements in itertools.product(EVERY, repeat=2):
                distribute_tensor(GRID, mesh, placements, src_data_rank=None)
        assert called == []

    run_ranks(4, program)


# -- meshes ----------------------------------------------------------------------------------


def test_meshes_are_sliced_in_any_order_and_flattened() -> None:
    """pt#133193, pt#169381: and tensors on what comes of it are right."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
        turned = mesh["tp", "pp"]
        assert turned.mesh_dim_names == ("tp", "pp")
        assert turned.mesh.tolist() == [[0, 2], [1, 3]]
        flat = mesh["pp", "tp"].flatten("all")
        assert mesh["all"] is flat
        assert flat.mesh.tolist() == [0, 1, 2, 3]
        same(cut(GRID, turned, [Shard(0), Shard(1)]) * 2, GRID * 2)
        same(cut(GRID, flat, [Shard(0)]).sum(0), GRID.sum(0))
        same(cut(GRID, mesh["tp"], [Shard(1)]).sum(), GRID.sum())

    run_ranks(4, program)


# -- plain tensors, plain modules, operators of one's own ------------------------------------


def test_plain_tensors_meet_dtensors() -> None:
    """The most copied error, "Got mixed torch.Tensor and DTensor", is none here."""

    def mixed(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + y, y - x, torch.cat([x, y]), x @ y.t(), torch.where(x > 0, y, x), x.lerp(y, 2)]

    def layouts(shape: tuple[int, ...]) -> list[list[Any]]:
        every = [(Shard(0),), (Shard(1),), (Replicate(),), (Partial(),)]
        return [pair for one in every for pair in ([one, None], [None, one])]

    check_op(mixed, GRID, GRID.flip(0).contiguous(), meshes=((2,),), layouts=layouts)


def test_modules_with_plain_weights_take_dtensors() -> None:
    """physicsnemo#1682: as they are; their gradients are those of one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)
    )
    tokens = torch.randint(11, (4, 5))
    model(tokens).square().mean().backward()
    wanted = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = nn.Sequential(
            nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8)
        )
        mine.load_state_dict(state)
        mine(cut(tokens, mesh, [Shard(0)])).square().mean().backward()
        for param, grad in zip(mine.parameters(), wanted, strict=True):
            assert param.grad is not None
            assert type(param.grad) is Tensor
            torch.testing.assert_close(param.grad, grad)

    run_ranks(2, program)


torch.library.define("complaints::scaled", "(Tensor x, *, Tensor scale, int times=1) -> Tensor")


@torch.library.impl("complaints::scaled", "default")
def _scaled(x: Tensor, *, scale: Tensor, times: int = 1) -> Tensor:
    return x * scale * times


@torch.library.custom_op("complaints::noted", mutates_args=())
def _noted(x: Tensor, what: str) -> None:
    _notes.append((tuple(x.shape), what))


@torch.library.custom_op("complaints::doubled_", mutates_args={"x"})
def _doubled_(x: Tensor) -> None:
    x.mul_(2)


_notes: list[tuple[tuple[int, ...], str]] = []


def test_operators_of_ones_own_take_dtensors() -> None:
    """pt#167977, pt#167219: with tensors by keyword, without results, written in place."""
    register_rule(torch.ops.complaints.scaled, "a b, a b -> a b")

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(GRID, mesh, [Shard(0)])
        for scale in (cut(GRID, mesh, [Shard(1)]), cut(GRID, mesh, [Shard(0)]), GRID.clone()):
            same(torch.ops.complaints.scaled(x, scale=scale, times=3), GRID * GRID * 3)
        assert torch.ops.complaints.noted(x, "seen") is None
        torch.ops.complaints.doubled_(x)
        same(x, GRID * 2)

    _notes.clear()
    with noting_gatherings():
        run_ranks(2, program)
    assert _notes == [((4, 6), "seen")] * 2


# -- what is kept ----------------------------------------------------------------------------


def test_decisions_do_not_grow_while_a_program_repeats_itself() -> None:
    """pt#168255, pt#2888: operators on lists, numbers that change, losses that are asked for."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(6, 4)
        for name, param in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(cut(param, mesh, [Shard(0)])))
        optimizers = [
            torch.optim.AdamW(model.parameters(), foreach=True),
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
        ]
        x = cut(GRID, mesh, [Shard(0)])

        def step(i: int) -> None:
            scale = 1 + i / 7
            loss = model(x * scale + i).clamp(max=scale).square().mean() / (i + 1)
            loss.backward()
            torch.stack([loss.detach() * scale] * 3).sum().item()
            nn.utils.clip_grad_norm_(model.parameters(), scale)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
                optimizer.step()
            model.zero_grad()
            torch._foreach_mul_([x, x], scale)

        for i in range(3):
            step(i)
        known, specs = len(mesh.decisions), len(mesh.specs)
        for i in range(3, 23):
            step(i)
        assert (len(mesh.decisions), len(mesh.specs)) == (known, specs)

    run_ranks(2, program)


def test_nothing_is_left_of_what_a_step_made() -> None:
    """pt#168255: tensors, graphs and works of a step are freed with it."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        weight = cut(GRID, mesh, [Shard(0)]).requires_grad_()

        def step() -> None:
            ((weight * 2).sum(1).relu().mean() + weight[1].norm()).backward()
            weight.grad = None

        def living() -> int:
            gc.collect()
            return sum(type(one) is DTensor for one in gc.get_objects())

        step()
        before = living()
        for _ in range(5):
            step()
        assert living() <= before

    run_ranks(1, program)


# -- operators that were missing, errors that came late --------------------------------------


def test_operators_that_users_missed() -> None:
    """pt#147724, pt#147578, pt#152249, pt#167917, pt#130671, and some of pt#119930."""

    def floats(x: Tensor) -> list[Tensor]:
        filled = x.clone().masked_fill_(x > 0, 9)
        return [
            *(x.select(0, 1), x.select(1, -1), x.amax(1), x.amin(), x.aminmax().max, filled),
            *(x.flip(1), x.roll(1, 0), x.tril(), x.diagonal(), x.unfold(1, 2, 2), x.repeat(2, 1)),
            *(x.unique(), x.histc(4), torch.outer(x[0], x[1]), x.kthvalue(2).values),  # type: ignore[no-untyped-call]
            *(
                x.scatter_add(1, x.argsort(1), x),
                x.gather(1, x.argsort(1)),
                x.index_select(0, ones),
            ),
        ]

    def integers(x: Tensor) -> list[Tensor]:
        bits = [x << 1, x >> 1, x & 3, x | 4, x ^ 1, ~x, x.bitwise_left_shift(2), 1 << (x % 5)]
        return [*bits, x.bincount() if x.dim() == 1 else x.view(-1).bincount(), x // 3, x % 4]

    ones = torch.ones(3, dtype=torch.int64)
    with noting_gatherings():
        check_op(floats, GRID, grads=False, meshes=((2,),), rtol=1e-4, atol=1e-5)
        check_op(integers, torch.arange(24).view(4, 6), partial=(), meshes=((3,),), most=4)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(GRID, mesh, [Shard(0)]).requires_grad_() * 2
        x.detach_()
        assert x.is_leaf
        assert not x.requires_grad
        assert int(cut(torch.tensor([7]), mesh, [Replicate()])) == 7

    run_ranks(2, program)


def test_errors_come_at_once_and_are_torchs() -> None:
    """pt#124990: what is wrong with a call on plain tensors is wrong in the same way here."""
    wrong: list[Callable[[Tensor], object]] = [
        lambda x: x @ x,
        lambda x: x + torch.ones(5),
        lambda x: x.view(5, 5),
        lambda x: x[9],
        lambda x: x.sum(7),
        lambda x: x.transpose(0, 5),
        lambda x: torch.cat([x, x.t()]),
        lambda x: x.softmax(3),
        lambda x: F.linear(x, torch.ones(3, 4)),
        lambda x: F.cross_entropy(x, torch.zeros(3, dtype=torch.int64)),
        lambda x: F.layer_norm(x, (5,)),
        lambda x: x.gather(2, torch.zeros(1, dtype=torch.int64)),
        lambda x: x.expand(3, 6),
        lambda x: x.reshape(-1, 7),
        lambda x: x.split([1, 1]),  # type: ignore[no-untyped-call]
        lambda x: x & x,
        lambda x: x.item(),
        lambda x: bool(x),
        lambda x: x.backward(),  # type: ignore[no-untyped-call]
        lambda x: x.add_(torch.ones(3, 4, 6)),
        lambda x: x.index_select(0, torch.tensor([9])),
        lambda x: x[torch.tensor([7])],
        lambda x: torch.stack([x, x[0]]),
        lambda x: x.no_such_method(),  # type: ignore[attr-defined]
        lambda x: x.add("text"),  # type: ignore[arg-type]
        lambda x: x.squeeze(0).unsqueeze(9),
        lambda x: len(x.sum()),
        lambda x: torch.dot(x[0], x[:, 0]),
        lambda x: x.permute(0, 0),
        lambda x: x.chunk(0),
        lambda x: x.masked_fill_(torch.ones(3, 3, dtype=torch.bool), 0),
        lambda x: F.dropout(x, 2.0),
        lambda x: F.embedding(torch.tensor([9]), x),
        lambda x: x.requires_grad_().zero_(),
    ]

    def kind_of(call: Callable[[Tensor], object], x: Tensor) -> type[Exception] | None:
        try:
            call(x)
        except Exception as error:
            return type(error)
        return None

    expected = [kind_of(call, GRID.clone()) for call in wrong]
    assert None not in expected

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for call, kind in zip(wrong, expected, strict=True):
            for placement in (Shard(0), Shard(1), Replicate()):
                x = cut(GRID, mesh, [placement])
                found = kind_of(call, x)
                line = call.__code__.co_firstlineno
                assert found is not None, (line, placement)
                assert kind is not None
                assert issubclass(found, kind) or issubclass(kind, found), (line, found, kind)
        same(cut(GRID, mesh, [Shard(0)]) + 1, GRID + 1)  # and everything goes on

    with noting_gatherings():
        run_ranks(2, program)
