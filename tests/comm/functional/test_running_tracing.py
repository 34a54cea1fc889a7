"""Functional collectives in traces: make_fx, torch.compile, torch.export.

Ranks are processes: torch traces on one thread of a process at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilework.distributed as dist
from tests.comm.functional.test_api import EVERY, plain
from tests.rounding import assert_close
from tilework.comm.functional.running import KINDS
from tilework.comm.reduce_op import ReduceOp
from tilework.distributed import functional
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=170)
#: torch's own compiler warns of what torch itself does.
pytestmark = [
    pytest.mark.usefixtures("compilers"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def ranks(n: int, body: Callable[[int], Any]) -> list[Any]:
    return run_ranks(n, body, kind="processes", timeout=LIMIT)


def operators(graph: Any) -> list[str]:
    """The names of tilework's operators, in the order of the graph."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in names if name.startswith("tilework.")]


def every(rank: int) -> list[Callable[[Tensor], Any]]:
    """Every collective on two ranks; asking which rank this is would end a compiler's graph."""
    rows = 2 if rank == 0 else 0
    scatter = lambda x: functional.scatter(x[:rows], 0, [1, 1])  # noqa: E731
    left_out = ("scatter", "coalesced")  # the latter is the others, one after the other
    return [*(call for name, call in EVERY.items() if not name.endswith(left_out)), scatter]


def few() -> list[Callable[[Tensor], Any]]:
    """Those whose results differ in shape, for what takes long."""
    names = ("all_reduce", "all_gather_tensor along 1", "reduce_scatter_tensor along 1", "gather")
    return [EVERY[name] for name in names]


def together(calls: list[Callable[[Tensor], Any]]) -> Callable[[Tensor], list[Tensor]]:
    """All of them, one after the other."""
    return lambda x: [y * 2 for call in calls for y in plain(call(x))]


def operand(rank: int) -> Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + 10 * rank


# -- make_fx -----------------------------------------------------------------------------------


def check_trace(mode: Any, calls: list[Callable[[Tensor], Any]], rank: int) -> list[str]:
    """Trace all of them; return the names of the operators that communicate."""
    x, program = operand(rank), together(calls)
    expected = [y.clone() for y in program(x)]
    traced = make_fx(program, tracing_mode=mode)(x)
    traced.graph.lint()
    traced.graph.eliminate_dead_code()
    for _ in range(2):
        assert all(map(torch.equal, traced(x), expected))
    assert not torch.equal(traced(x + 1)[0], expected[0])
    local = {kind.name for kind in KINDS.values() if kind.local}
    found = operators(traced.graph)
    started = [name for name in found if name != "wait" and name not in local]
    assert len(started) == found.count("wait")
    return started


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_records_each_operator_and_its_wait(mode: str) -> None:
    def body(rank: int) -> None:
        started = check_trace(mode, every(rank), rank)
        assert set(started) == {kind.name for kind in KINDS.values() if not kind.local}

    ranks(2, body)


def test_make_fx_with_symbolic_shapes() -> None:
    ranks(2, lambda rank: check_trace("symbolic", few(), rank))


def test_collectives_without_a_use_stay() -> None:
    def unused(x: Tensor) -> Tensor:
        functional.all_reduce(x)
        functional.broadcast(x, 0)
        return x + 1

    def body(rank: int) -> None:
        traced = make_fx(unused, tracing_mode="fake")(torch.ones(2))
        traced.graph.eliminate_dead_code()
        assert [name for name in operators(traced.graph) if name != "wait"] == [
            "all_reduce",
            "broadcast",
        ]

    ranks(1, body)


def test_gradients_are_traced() -> None:
    def slope(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(functional.all_gather_tensor(x).square().sum(), x)
        return grad

    def body(rank: int) -> None:
        x = operand(rank)
        traced = make_fx(slope)(x)
        assert operators(traced.graph)[-2:] == ["reduce_scatter_tensor", "wait"]
        assert torch.equal(traced(x), 4 * x)

    ranks(2, body)


# -- torch.compile -----------------------------------------------------------------------------


def loss(calls: list[Callable[[Tensor], Any]]) -> Callable[[Tensor], Tensor]:
    """A sum over all of them and over kinds of reduction."""

    def total(x: Tensor) -> Tensor:
        results = [y for call in calls for y in plain(call(x.sin()))]
        results += [functional.all_reduce(x, op) for op in ("max", "product")]
        return torch.stack([y.square().sum() for y in results]).sum()

    return total


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_forward_and_backward_equal_eager(dynamic: bool) -> None:
    def body(rank: int) -> None:
        program = loss(few() if dynamic else every(rank))
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for columns in (2, 4) if dynamic else (2,):
            x = torch.arange(2.0 * columns).reshape(2, columns) + rank
            eager, traced = (x.clone().requires_grad_() for _ in range(2))
            wanted, found = program(eager), compiled(traced)
            assert_close(found, wanted)
            torch.autograd.backward(wanted)
            torch.autograd.backward(found)
            assert_close(traced.grad, eager.grad)

    ranks(2, body)


def test_compiled_with_any_group_and_reduction() -> None:
    def body(rank: int) -> None:
        pair, other = dist.new_group([0, 1]), dist.new_group([1])

        def program(x: Tensor, group: Any, op: Any) -> Tensor:
            return functional.all_reduce(x, op, group) + 1

        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        x = torch.tensor([1.0 + rank])
        assert compiled(x, None, "sum").item() == 4.0
        assert compiled(x, pair, ReduceOp.MAX).item() == 3.0
        assert isinstance(pair, dist.ProcessGroup)
        assert compiled(x, pair.group_name, ReduceOp.AVG).item() == 2.5
        assert compiled(x, pair, dist.make_premul_sum(0.5)).item() == 2.5
        if rank == 1:
            assert compiled(x, other, "sum").item() == 3.0

    ranks(2, body)


def test_inductor_keeps_collectives_that_nobody_uses() -> None:
    """One graph through torch's default compiler, which takes a C++ compiler and a while."""

    def program(x: Tensor) -> Tensor:
        used = functional.all_reduce(x.sin())
        functional.all_reduce(x.cos(), "max")
        rows = functional.all_gather_tensor(x * 2, 1)
        return used * 2 + functional.reduce_scatter_tensor(rows, "avg", 1)

    def body(rank: int) -> None:
        x = operand(rank)
        eager, traced = (x.clone().requires_grad_() for _ in range(2))
        group = dist.get_default_group()
        before = group.get_sequence_number_for_group()
        wanted = program(eager)
        torch.autograd.backward(wanted.sum())
        steps = group.get_sequence_number_for_group() - before
        compiled = torch.compile(program, fullgraph=True)
        found = compiled(traced)
        torch.autograd.backward(found.sum())
        assert group.get_sequence_number_for_group() - before == 2 * steps
        assert_close(found, wanted)
        assert_close(traced.grad, eager.grad)

    run_ranks(2, body, timeout=LIMIT)


def test_a_waiting_result_enters_a_compiled_function() -> None:
    def body(rank: int) -> None:
        x = torch.ones(100_000, requires_grad=True)
        y = functional.all_reduce(x)
        assert isinstance(y, functional.AsyncTensor)
        compiled = torch.compile(lambda y: y * 3, backend="aot_eager")
        torch.autograd.backward(compiled(y).sum())
        torch.autograd.backward(compiled(functional.wait_tensor(functional.all_reduce(x))).sum())
        assert x.grad is not None
        assert x.grad[:2].tolist() == [12.0, 12.0]

    ranks(2, body)


def test_collectives_that_write_in_place_end_the_graph_and_are_right() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        dist.all_reduce(x)
        out = torch.zeros(4)
        work = dist.all_gather_into_tensor(out, x + 1, async_op=True)
        assert work is not None
        y = x * 3
        work.wait()
        return y + 1, out * 2

    def body(rank: int) -> None:
        x = torch.ones(2) + rank
        compiled = torch.compile(program, backend="aot_eager")
        for _ in range(2):
            y, out = compiled(x)
            assert y.tolist() == [19.0, 19.0]
            assert out.tolist() == [14.0] * 4

    ranks(2, body)


def test_collectives_that_write_in_place_say_why_they_are_not_traced() -> None:
    def program(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def body(rank: int) -> None:
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=r"tilework\.distributed\.functional"):
            compiled(torch.ones(2))

    ranks(1, body)


# -- torch.export ------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Some collectives."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.program = together(few())

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.program(x)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_the_operators(strict: bool) -> None:
    def body(rank: int) -> None:
        x = operand(rank)
        model = Model(rank)
        expected = model(x)
        program = torch.export.export(model, (x,), strict=strict)
        assert operators(program.graph).count("wait") == 4
        assert all(map(torch.equal, program.module()(x), expected))
        lowered = program.run_decompositions()
        assert all(map(torch.equal, lowered.module()(x), expected))

    ranks(2, body)


# -- groups of traces ----------------------------------------------------------------------------


def test_a_trace_outlives_its_group_but_does_not_run_without() -> None:
    def program(x: Tensor) -> Tensor:
        return functional.all_gather_tensor(x, group="pair")

    def body(rank: int) -> None:
        dist.destroy_process_group()

        def join(n: int, me: int) -> None:
            dist.init_process_group(
                "threads", store=dist.HashStore(), rank=me, world_size=n, group_name="pair"
            )

        join(1, 0)
        traced = make_fx(program, tracing_mode="fake")(torch.ones(1))
        assert traced(torch.ones(1)).tolist() == [1.0]
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="no group named 'pair'"):
            traced(torch.ones(1))
        join(1, 0)
        assert traced(torch.ones(1)).tolist() == [1.0]
        dist.destroy_process_group()

    ranks(1, body)


def test_a_trace_does_not_run_on_a_group_of_another_size() -> None:
    def body(rank: int) -> None:
        traced = make_fx(lambda x: functional.all_gather_tensor(x))(torch.ones(1))
        smaller = dist.new_group([rank], use_local_synchronization=True)
        assert isinstance(smaller, dist.ProcessGroup)
        for node in traced.graph.nodes:
            node.args = tuple(smaller.group_name if a == "default" else a for a in node.args)
        traced.recompile()
        with pytest.raises(ValueError, match="size that it was traced with"):
            traced(torch.ones(1))

    ranks(2, body)


def test_tickets_are_waited_for_once_and_only_tickets() -> None:
    def body(rank: int) -> None:
        ticket = torch.ops.tilework.all_reduce(torch.ones(2), "sum", "default")
        assert torch.ops.tilework.wait(ticket).tolist() == [1.0, 1.0]
        for tensor in (ticket, torch.ones(2)):
            with pytest.raises(RuntimeError, match="waited for already"):
                torch.ops.tilework.wait(tensor)

    ranks(1, body)


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "str op": ("sum",),
    "str op, int root": ("sum", 0),
    "str op, int dim, SymInt[] rows": ("sum", 1, [4]),
    "int dim, SymInt[] rows": (1, [4]),
    "SymInt[] received, SymInt[] sent": ([3], [3]),
    "int root": (0,),
    "str op, bool reverse": ("sum", True),
    "int root, int dim, SymInt[] rows": (0, 1, [4]),
    "int[] destinations": ([0],),
    "": (),
}


def test_operators_keep_torchs_rules() -> None:
    """Schema, fake results and gradients, as torch's own check of operators sees them."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")

    def body(rank: int) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        for kind in KINDS.values():
            start = getattr(torch.ops.tilework, kind.name).default
            arguments = (x, *ARGUMENTS[kind.schema], "default")
            found = torch.library.opcheck(start, arguments, test_utils=checks)
            assert set(found.values()) == {"SUCCESS"}, kind

    ranks(1, body)
