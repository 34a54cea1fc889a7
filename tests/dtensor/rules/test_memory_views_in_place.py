"""Operators that change a tensor's dims in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuzz.language import Run
from tests.fuzz.programs import compare
from tests.tables import each
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


@each(
    "program",
    [
        # Written to in the graph, which it was not in.
        "v0 = leaf('v0', (), 6, 'P')\nv1 = data((4, 4), 20, 'R')\nv1.t_()\n"
        "torch._foreach_div_([v1], [v0.abs() + 1])",
        "v0 = data((4, 6), 41, 'S1')\nv1 = v0[0]\nv2 = v0.detach()[1:]\nv0.unsqueeze_(0)\n"
        "v0.mul_(2)",
    ],
)
def test_tensors_whose_dims_changed_share_memory_as_before(program: str) -> None:
    compare(program)


def test_a_leaf_whose_dims_changed_before_it_became_one_has_hooks() -> None:
    compare(
        "v0 = data((2, 3), 62, 'S0')\nv0.t_()\nv0.requires_grad_()\n"
        "v0.register_hook(lambda grad: grad * 2)\nv1 = gradient(v0.sin(), v0)"
    )


def test_a_leaf_that_has_views_is_copied_and_saved() -> None:
    compare("v0 = leaf('v0', (4, 4), 62, 'S0')\nv1 = v0[1]\nv2 = copied(v0)\nv3 = pickled(v0)")


@each(
    ("make", "change"),
    [
        ("v1 = v0", "with torch.no_grad(): v1.t_()"),
        ("v1 = v0 * 2", "with torch.inference_mode(): v1.unsqueeze_(0)"),
        ("v1 = v0 * 2\nv1.retain_grad()", "v1.t_()"),
        ("v1 = v0 * 2", "v1.transpose_(0, 1)"),
        ("v1 = v0 * 2", "with torch.no_grad(): torch.sum(v0, 0, out=v1)"),
    ],
)
@each("placement", ["R", "S0", "P"])
def test_dims_that_the_graph_would_not_follow_are_not_changed(
    make: str, change: str, placement: str
) -> None:
    def on_rank(rank: int) -> None:
        run = Run(init_device_mesh("cpu", (2,)))
        run.execute(f"v0 = leaf('v0', (4, 4), 1, '{placement}')")
        for line in make.splitlines():
            run.execute(line)
        with pytest.raises(RuntimeError, match=r"dims of|for a result of shape"):
            run.execute(change)
        assert run.names["v1"].shape == (4, 4)
        run.execute("v2 = v1 * v1")
        run.backward()

    run_ranks(2, on_rank)


def test_dims_are_not_changed_where_elements_had_to_move() -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(4, 1), init_device_mesh("cpu", (2,)), [Shard(0)])
        x = x.t()[:, None]
        with pytest.raises(RuntimeError, match="would have to move elements"):
            x[:, :, :1].squeeze_()
        assert x.shape == (1, 1, 4)

    run_ranks(2, program)
