"""Results: with ``out=`` of another shape, and of operators that are composed of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuzz.programs import compare
from tests.tables import each, pairs
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


def test_out_has_the_dtype_of_the_result_and_the_shape_or_no_elements() -> None:
    compare("v0 = data((0,), 84, 'R')\ntorch.add(data((4,), 1, 'S0'), 1.0, out=v0)")

    def on_rank(rank: int) -> None:
        x: Any = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        for out in (x[3:3], x.clone()[:2], torch.stack([x, x]), x.double(), torch.zeros(4).int()):
            with pytest.raises(RuntimeError, match="for a result of shape"):
                torch.add(x, 1, out=out)
        assert x.full_tensor().tolist() == [0, 1, 2, 3]

    run_ranks(2, on_rank)


@pytest.mark.parametrize(
    "program",
    [
        # A view had to be copied on one rank only.
        "v0 = leaf('v0', (6, 1), 99, 'S1')\nv1 = torch.kron(v0.clone(), (v0 * 2).clone())",
        # Views of a result are written to, and then it gets a hook.
        "v0 = leaf('v0', (4, 4), 76, 'R')\nv1 = v0.roll(3)\nv2 = v1.narrow(1, 2, 2)\n"
        "v2.mul_(0.25)\nv1.register_hook(lambda grad: grad * 2)",
    ],
)
def test_composed_results_are_no_views_of_what_only_they_know(program: str) -> None:
    compare(program)


@pairs(
    call=[
        "functional.dropout(v1, 0.5, training=False)",
        "functional.alpha_dropout(v1, 0.5, training=False)",
        "v1.contiguous()",
        "v1.to(torch.float64)",
        "v1.expand_as(v1)",
        "v1.flatten()",
        "v1.positive()",
        "v1.conj_physical()",
    ],
    made=["torch.einsum('ij,ij->i', v0, v0)", "(v0 * 2).view(-1)", "torch.mm(v0, v0.t())[0]"],
    lies=["S0", "S1", "P"],
)
def test_what_gives_its_input_without_gradients_leaves_that_in_the_graph(
    call: str, made: str, lies: str
) -> None:
    compare(
        f"v0 = leaf('v0', (3, 4), 37, '{lies}')\nv1 = {made}\n"
        f"with torch.no_grad(): v2 = {call}\nv3 = v1 * 3"
    )


def test_a_result_without_elements_counts_no_writes_to_what_it_was_computed_of() -> None:
    """Else that rank alone would compute views of the result anew."""
    compare(
        "v0 = data((1, 6), 88, 'S0 R')\nv1 = v0.quantile(0.5, -1)\nv2 = v1[0]\n"
        "v1.mul_(2.0)\nv0[v0 > 0.3] = v2",
        mesh=(2, 2),
        refused=True,
    )


def test_out_of_which_one_is_refused_writes_none() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor([3.0, 1.0, 2.0]), mesh, [Shard(0)])
        values = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
        places = distribute_tensor(torch.zeros(3), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"result of shape \[3\] and torch.int64"):
            torch.sort(x, out=(values, places))
        with pytest.raises(RuntimeError, match=r"result of shape \[3\] and torch.int64"):
            torch.full((3,), 1, out=values, dtype=torch.int64)
        assert values.full_tensor().tolist() == [0, 0, 0]

    run_ranks(2, on_rank)


@each("placement", ["R", "S0", "S1", "P"])
@each(
    "write",
    [
        *("v1[v3] = v2.sum()", "v1[0] = v2[0]", "v1[:, 1] = v2.sum()", "v1[1:] = v2.sum()"),
        *("v1.copy_(v2)", "v1.copy_(v2.t())", "v1.fill_(v2.sum())", "v1[1:].fill_(v2.sum())"),
        *("v1.masked_fill_(v3, v2.sum())", "v1.index_fill_(0, index([1], 'R'), v2.sum())"),
        *("torch._foreach_copy_([v1], [v2])", "v3[v3] = v2.sum()", "v3.copy_(v2)"),
    ],
)
def test_integers_take_values_that_require_gradients(placement: str, write: str) -> None:
    compare(
        f"v0 = leaf('v0', (4, 4), 1, '{placement}')\n"
        f"v1 = (data((4, 4), 2, '{placement}') * 9).long()\n"
        f"v2 = v0 * 2\nv3 = data((4, 4), 3, '{placement}') > 0.2\n{write}"
    )
