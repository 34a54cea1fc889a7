"""Operators that change a tensor's dims in place: it becomes a view of what it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fuzz.language import Run
from tests.fuzz.programs import compare
from tests.tables import each
from tilework.dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks


@each(
    "program",
    [
        # Written to afterwards, though a Function has made it where no gradients are recorded.
        "v0 = leaf('v0', (4, 4), 62, 'P')\nv1 = recomputed(lambda a: a.sin() + a, v0, "
        "reentrant=True)\nv1.squeeze_()\nv1.addcdiv_(v0, v0.abs() + 1)",
        "v0 = leaf('v0', (3, 3), 32, 'S0')\nv1 = recomputed(lambda a: a.sin() + a, v0, "
        "reentrant=True)\nv1.t_()\nv1.pow_(2)",
        # Written to in the graph, which it was not in.
        "v0 = leaf('v0', (), 6, 'P')\nv1 = data((4, 4), 20, 'R')\nv1.t_()\n"
        "torch._foreach_div_([v1], [v0.abs() + 1])",
        # Cut off the graph afterwards.
        "v0 = leaf('v0', (3, 1), 75, 'S0')\nv1 = v0 * 2\nv1.t_()\nv1.detach_()\nv2 = v1 * 2",
    ],
)
def test_tensors_whose_dims_changed_are_no_views_of_others(program: str) -> None:
    compare(program)


@each("change", ["t_()", "swapaxes_(0, 0)", "unsqueeze_(0).squeeze_(0).t_()"])
@each(
    "ask",
    [
        "v3 = gradient(v2 * v2, v1)",
        "v3 = gradient(gradient(v2 ** 3 + v1[0, 0], v1, create_graph=True), v1)",
        "(v2 * v2).sum().backward(inputs=[v1])\nv3 = moved(v1.grad, 'R')",
        "v1.retain_grad()\ndescend(v2 * v2, v1)\nv1.grad.mul_(2)\nv3 = moved(v1.grad, 'R')",
        "v1.retain_grad()\ndescend(v2, v1)\nv1.grad = None\ndescend(v2)\nv3 = moved(v1.grad, 'R')",
        "v1.retain_grad()\nv1.grad = v1.detach() * 2\ndescend(v2, v1)\nv3 = moved(v1.grad, 'R')",
    ],
)
def test_gradients_have_those_of_views_made_before(change: str, ask: str) -> None:
    compare(
        f"v0 = leaf('v0', (2, 3), 62, 'S0')\nv1 = v0 * 2\nv2 = v1[1]\nv1.{change}\n{ask}",
    )


def test_a_leaf_whose_dims_changed_before_it_became_one_has_hooks() -> None:
    compare(
        "v0 = data((2, 3), 62, 'S0')\nv0.t_()\nv0.requires_grad_()\n"
        "v0.register_hook(lambda grad: grad * 2)\nv1 = gradient(v0.sin(), v0)"
    )
    compare(
        "v0 = leaf('v0', (2, 3), 62, 'S0')\nv1 = v0 * 2\nv1.t_()\nv1.detach_()\n"
        "v1.requires_grad_()\nv1.register_hook(lambda grad: grad * 2)\nv2 = gradient(v1.sin(), v1)"
    )


@each("placement", [Replicate(), Shard(0), Shard(1), Partial()])
def test_elements_that_resizing_adds_are_the_same_on_all_ranks(placement: Placement) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(5):
            x: Any = distribute_tensor(torch.arange(4.0).view(2, 2).t(), mesh, [placement])
            before = [torch.full((6,), rank + 1.0) for _ in range(50)]
            del before  # which the elements would be made of
            x.resize_(3, 2)
            assert x.full_tensor().tolist() == [[0, 1], [2, 3], [0, 0]]
            x.zero_()
            assert not x.full_tensor().any()

    run_ranks(2, program)


def test_a_leaf_that_has_views_is_copied_and_saved() -> None:
    compare("v0 = leaf('v0', (4, 4), 62, 'S0')\nv1 = v0[1]\nv2 = copied(v0)\nv3 = pickled(v0)")


@each(
    ("make", "change"),
    [
        ("v1 = v0", "with torch.no_grad(): v1.t_()"),
        ("v1 = v0 * 2", "with torch.inference_mode(): v1.unsqueeze_(0)"),
        ("v1 = v0 * 2\nv1.retain_grad()", "v1.t_()"),
        ("v1 = v0", "with torch.inference_mode(): v1.resize_([2])"),
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
        with pytest.raises(RuntimeError, match=r"dims of|resize"):
            run.execute(change)
        assert run.names["v1"].shape == (4, 4)
        run.execute("v2 = v1 * v1")
        run.backward()

    run_ranks(2, on_rank)


def test_a_view_of_another_dtype_is_not_resized() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 2, dtype=torch.complex64), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"shows a memory of torch\.complex64: clone\(\)"):
            x.real.resize_(2, 2)
        assert x.full_tensor().eq(1).all()

    run_ranks(2, program)


@each(
    "make",
    [
        "v0 = data((4, 4), 1, 'S0')\nv2 = v0[1]\nv0.as_strided_((4, 2), (1, 4))\nv0.mul_(v1)",
        "v0 = v1 * data((4, 4), 1, 'S0')\nv0.as_strided_((4, 2), (1, 4))",
        "v2 = v1 * data((4, 4), 1, 'S1')\nv0 = v2.flatten()\nv0.unsqueeze_(0)",
        "v0 = v1 * data((1, 4), 1, 'S0')\nv2 = v0[:1]\nv0.t_()",
    ],
)
def test_a_gradient_that_would_lack_those_of_views_is_refused(make: str) -> None:
    def on_rank(rank: int) -> None:
        run = Run(init_device_mesh("cpu", (2,)))
        for line in ("v1 = leaf('v1', (), 2, 'R')", *make.splitlines()):
            run.execute(line)
        for ask in ("gradient(v0 * v0, v0)", "watch(v0, 'v0')", "v0.retain_grad()"):
            with pytest.raises(RuntimeError, match=r"would lack the gradients of views"):
                run.execute(ask)
        run.execute("v3 = v0 * v0")
        run.backward()

    run_ranks(2, on_rank)
