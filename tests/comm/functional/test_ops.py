"""The c10d document's CompilerTest: collectives and their waits in traces, in today's terms.

There each collective is called in place on a wrapper that inserts waits while make_fx traces. Here
the functional collective of the same name is traced, and its wait is an operator of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked: it takes seconds
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilework.distributed import functional
from tilework.testing import run_ranks

N = 2


def listed(x: Tensor) -> list[Tensor]:
    """As an all_gather into a list: one tensor per rank."""
    return list(functional.all_gather_tensor(x).chunk(N))


def exchanged(x: Tensor) -> list[Tensor]:
    """As an all_to_all of lists, the same tensor for every rank."""
    return list(functional.all_to_all_single(torch.cat([x] * N)).chunk(N))


def scattered(x: Tensor) -> Tensor:
    return functional.scatter(torch.cat([x + i for i in range(N)]), 0, [x.shape[0]] * N)


def twice(x: Tensor) -> Tensor:
    """Two that follow each other, waited for explicitly between."""
    return functional.all_reduce(functional.wait_tensor(functional.all_reduce(x)))


CASES: dict[str, Callable[[Tensor], Tensor | list[Tensor]]] = {
    "allreduce": functional.all_reduce,
    "allgather": lambda x: sum(listed(x), torch.zeros_like(x)),
    "allgather_into_tensor": functional.all_gather_tensor,
    "reduce_scatter": lambda x: functional.reduce_scatter_tensor(
        torch.cat([x + i for i in range(N)])
    ),
    "reduce_scatter_tensor": functional.reduce_scatter_tensor,
    "broadcast": lambda x: functional.broadcast(x, 0),
    "alltoall": exchanged,
    "nested_comm_tensor_wrapping": lambda x: functional.all_reduce(functional.wait_tensor(x)),
    "consecutive_comm_work_wait": twice,
}


def check(rank: int, collective: Callable[[Tensor], Tensor | list[Tensor]]) -> None:
    def program(x: Tensor) -> Tensor | list[Tensor]:
        z = collective(x + x)
        return [each * 2 for each in z] if isinstance(z, list) else z * 2

    x = torch.ones(2, 2) * rank
    again = x.clone()
    traced = make_fx(program)(again)
    traced.graph.lint()
    traced.graph.eliminate_dead_code()
    products = [node for node in traced.graph.nodes if name_of(node) == "aten.mul.Tensor"]
    assert products
    assert all(comes_from_a_waited_collective(node) for node in products)

    # What was traced is no constant.
    x += 1
    again += 1
    expected, found = program(x), traced(again)
    assert equal(expected, found)
    again += 1
    assert not equal(expected, traced(again))


def name_of(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def comes_from_a_waited_collective(product: torch.fx.Node) -> bool:
    """Whether every way back from ``product`` to a collective leads over a wait."""
    todo, found = list(product.all_input_nodes), False
    while todo:
        node = todo.pop()
        name = name_of(node)
        if name == "tilework.wait.default":
            (ticket,) = node.all_input_nodes
            found |= name_of(ticket).startswith("tilework.")
        elif name.startswith("tilework."):
            return False
        else:
            todo.extend(node.all_input_nodes)
    return found


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(torch.equal, a, b))
    return torch.equal(a, b)


@pytest.mark.parametrize("name", [*CASES, "scatter"])
def test_work_wait(name: str) -> None:
    def body(rank: int) -> None:
        check(rank, scattered_from_root(rank) if name == "scatter" else CASES[name])

    # In processes: torch traces with make_fx on one thread of a process at a time.
    run_ranks(N, body, kind="processes")


def scattered_from_root(rank: int) -> Callable[[Tensor], Tensor]:
    """Ranks that are not the root pass no rows, and get theirs from it."""
    return scattered if rank == 0 else lambda x: functional.scatter(x[:0], 0, [x.shape[0]] * N)
