"""explain() and strict(): what each operator communicates, and what gathers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tilework.dtensor import (
    GatherWarning,
    Replicate,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
    strict,
)
from tilework.testing import run_ranks


def test_each_collective_has_its_cause() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0), Replicate()])
        w = distribute_tensor(torch.randn(5, 6, requires_grad=True), mesh)
        v = distribute_tensor(torch.randn(5, requires_grad=True), mesh)
        with explain() as log:
            y: Any = torch.nn.functional.linear(x, w, v)
            assert len(log) == 0
            y.redistribute(placements=[Shard(1), Replicate()]).sum().backward()
        assert len(log) == 3
        forth, back, together = log.events
        assert (forth.operator, forth.collective, forth.axes) == (
            "redistribute",
            "all_to_all",
            ("dp",),
        )
        assert (forth.tensor, forth.target) == ("f32[8@dp, 5]", "f32[8, 5@dp]")
        assert not forth.gradient
        assert f"{__file__}:" in forth.site
        assert forth.site.endswith("in program")
        assert (back.operator, back.gradient) == ("redistribute", True)
        assert (back.tensor, back.target) == ("f32[8, 5@dp]", "f32[8@dp, 5]")
        assert (together.operator, together.collective) == ("2 parameters", "all_reduce")
        assert together.axes == ("dp",)
        assert together.nbytes == (5 * 6 + 5) * 4
        assert log.nbytes == sum(event.nbytes for event in log.events)
        assert "3 collectives" in str(log)
        assert ">3 collectives, " in log._repr_html_()
        assert "f32[8@dp, 5] " in log._repr_html_()
        assert "f32[8@dp, 5]" in str(log)

    run_ranks(4, program)


def test_logs_nest_and_end() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with explain() as outer:
            with explain() as first:  # equal to the outer log, as both are empty
                pass
            x.full_tensor()
            with explain() as inner:
                x.full_tensor()
            assert len(inner) == 1
        x.full_tensor()
        with explain() as none:
            pass
        assert [len(log) for log in (outer, first, inner, none)] == [2, 0, 1, 0]
        assert "no collectives" in str(none)

    run_ranks(2, program)


def test_what_several_operators_compute_has_a_cause() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(4, 4, 3), mesh, [Shard(0)])
        weight = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with explain() as log:
            torch.nn.functional.batch_norm(x, None, None, weight, training=True)
        assert {event.operator for event in log.events} == {"batch_norm"}

    run_ranks(2, program)


def test_results_that_move_have_their_operator_as_cause() -> None:
    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        leaf = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
        out = distribute_tensor(torch.zeros(4, 4), mesh)
        with explain() as log:
            x.full_tensor()
            leaf.prod(0)
            torch.add(x, 1, out=out)
        return [event.operator for event in log.events]

    assert run_ranks(2, program)[0][-2:] == ["prod", "add"]


@torch.library.custom_op("tests::reversed_rows", mutates_args=())
def reversed_rows(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0)


def reverse(x: Any) -> Any:
    return torch.ops.tests.reversed_rows(x)


def test_what_gathers_is_told_once() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                assert reverse(x).full_tensor().tolist() == [3, 2, 1, 0]
            reverse(x.redistribute(placements=[Replicate()]))  # nothing moves
            # Of other sizes, as a cache that grows has from step to step.
            reverse(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
            reverse(distribute_tensor(torch.arange(6.0), mesh, [Shard(0, sizes=(2, 4))]))
        assert [one.category for one in told] == [GatherWarning] * (rank == 0)  # once a job
        for one in told:
            assert "f32[4@dp] whole, 16 bytes" in str(one.message)
            assert one.filename == __file__
        with explain() as log:
            reverse(x)
        assert [event.gathered for event in log.gathered] == [True]
        assert "1 of them to gather for lack of a rule" in str(log)

    run_ranks(2, program, kind="processes")


def test_strict_raises_what_gathers_also_later() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        with strict(), pytest.raises(NotImplementedError, match="no rule for this call"):
            reverse(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reverse(x)
        with strict(), pytest.raises(NotImplementedError, match="no rule for this call"):
            reverse(x)
        with strict():
            more: Any = x + 1
            assert more.placements == (Shard(0),)
            reverse(x.redistribute(placements=[Replicate()]))

    run_ranks(2, program, kind="processes")
