"""Tensors that are given other data: ``x.data = y``."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from tests.fuzz.language import Run
from tests.fuzz.programs import compare
from tests.tables import each, pairs
from tilework.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


@each(
    "program",
    [
        "v0 = leaf('v0', (4, 6), 1, 'S0')\nv0.data = v0.data.t()\nv1 = v0 * 2",
        "v0 = leaf('v0', (4, 4), 1, 'S0')\nv1 = v0 * 2\nv0.data = v0.data * 3\nv2 = v0 * v0\n"
        "descend(v2)\nv3 = copied(v0)\nv4 = pickled(v0)\nv5 = gradient(v1 + v2, v0)",
        "v0 = data((4, 4), 1, 'S0')\nwith torch.inference_mode(): v0.data = v0.data.t()",
    ],
)
def test_data_are_taken_as_in_torch(program: str) -> None:
    compare(program)


@each("data", ["moved(v0.data, 'S1')", "data((4, 4), 3, 'R')", "data((4, 4), 3, 'PM')"])
def test_data_of_another_layout_are_refused_where_results_wait(data: str) -> None:
    def on_rank(rank: int) -> None:
        run = Run(init_device_mesh("cpu", (2,)))
        run.execute("v0 = leaf('v0', (4, 4), 1, 'S0')\nv1 = v0 * 2")
        with pytest.raises(RuntimeError, match="was used, and cannot be given data of another"):
            run.execute(f"v0.data = {data}")
        run.execute("v1.sum().backward()\ndel v1")
        run.execute(f"v0.data = {data}\nv2 = v0 * v0\nv2.sum().backward()")
        assert run.names["v0"].grad.placements == run.names["v0"]._spec.grad_spec.placements

    run_ranks(2, on_rank)


def test_data_of_what_is_not_in_use_leaves_an_ordinary_leaf() -> None:
    def on_rank(rank: int) -> tuple[list[int], bool, Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()
        torch.autograd.backward((x * 2).sum())
        x.grad = None
        w = distribute_tensor(torch.ones(6, 6), mesh, [Replicate()]).requires_grad_()
        torch.autograd.backward((x @ w).sum())
        x.grad = None
        w.data = w.data.redistribute(placements=[Shard(1)])
        assert w._local_tensor.is_leaf
        x.data = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        torch.autograd.backward((x * 3).sum())
        assert x.grad is not None
        assert x.grad.placements == x.placements
        return list(x.grad.shape), x._local_tensor.is_leaf, x.grad.full_tensor()

    for shape, is_leaf, grad in run_ranks(2, on_rank):
        assert (shape, is_leaf) == ([6, 2], True)
        assert grad.eq(3).all()


def test_data_that_a_tensor_had_before_do_not_stay_in_memory() -> None:
    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        w: Any = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]).requires_grad_()
        for _ in range(2):
            w.data = w.data * 2
            shown = w.to_local()
            torch.autograd.backward((w * 3).sum())
            with torch.no_grad():
                shown.add_(1)
        before = ref(w._local_tensor.untyped_storage())
        w.data = w.data * 2
        del shown
        w.data = w.data * 2
        assert w.full_tensor()[0, 0] == 28  # ((1 * 2 + 1) * 2 + 1) * 2 * 2
        return before() is None

    assert run_ranks(2, on_rank) == [True, True]


def test_swapped_data_are_shown_without_a_chain() -> None:
    def on_rank(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (2,))
        w: Any = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).requires_grad_()
        average: Any = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
        for number in range(6):
            before = w.data
            w.data, average = average, before
            with torch.no_grad():
                w.add_(1)
            assert w.full_tensor().eq(number // 2 + 1 + number % 2).all()
            assert average.full_tensor().eq(number // 2 + 1).all()
        return w._viewed is None

    assert run_ranks(2, on_rank) == [True, True]


def test_data_of_another_shape_are_refused_where_gradients_wait() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)]).requires_grad_()
        other = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)])
        y = (x * 2).sum()
        with pytest.raises(RuntimeError, match=r"was used, and cannot be given data of"):
            x.data = other
        torch.autograd.backward(y)
        del y
        with pytest.raises(RuntimeError, match=r"has a gradient, and cannot be given data of"):
            x.data = other
        assert x.full_tensor().eq(1).all()
        x.grad = None
        x.data = other
        torch.autograd.backward((x * 3).sum())
        assert x.grad is not None
        assert x.grad.full_tensor().eq(3).all()

    run_ranks(2, on_rank)


@pairs(
    data=[
        "v0.data = v0.data * 2",
        "v0.data = v0.data.clone()",
        "v0.data = v0.data.t()",
    ],
    views=[
        "v1 = v0.detach()[1:3]\nv2 = v1[0]",
        "v1 = v0.data\nv2 = v1[:, 1]",
    ],
    placement=["R", "S0", "S1"],
)
def test_views_made_before_show_the_memory_of_then(placement: str, views: str, data: str) -> None:
    compare(
        f"v0 = leaf('v0', (4, 4), 22, '{placement}')\n{views}\n{data}\nv1.detach().mul_(0.25)\n"
        "with torch.no_grad(): v0.mul_(3)\nv8 = v1 * 3\nv9 = v0 * 3",
        refused=placement != "R",
    )


_BEYOND = "given other data|given data|of another layout|has other data"


@each(
    ("layout", "make", "text"),
    [
        # A view; and what was computed, in another layout.
        ("S0", "v1 = v0[0]", "v1.data = v1.data * 2"),
        ("S1", "v1 = v0.flatten()", "with torch.no_grad(): v1.set_(v1.detach() * 2)"),
        ("S0", "v1 = v0 * 2", "v1.data = v1.data.t()"),
        # A use of a view, a copied one or not, whose tensor was then written to.
        ("S1", "v2 = v0 * 2\nv1 = v2.flatten()\nv2.data = v2.data * 2\nv2.mul_(3)", "v1 * 3"),
        # A recorded write to one.
        ("S0", "v2 = v0 * 2\nv1 = v2[0]\nv2.data = v2.data * 2", "v1.mul_(3)"),
    ],
)
def test_data_beyond_the_limit_are_refused_on_all_ranks(layout: str, make: str, text: str) -> None:
    def on_rank(rank: int) -> None:
        run = Run(init_device_mesh("cpu", (2,)))
        run.execute(f"v0 = leaf('v0', (4, 4), 1, '{layout}')")
        for line in make.splitlines():
            run.execute(line)
        with pytest.raises(RuntimeError, match=_BEYOND):
            run.execute(text)
        del run.names["v1"]
        run.backward()

    run_ranks(2, on_rank)


@each("data", ["v0.data * 2", "v0.data.clone()"])
@each("view", ["v0[1]", "v0.flatten()"])
def test_views_of_a_leaf_go_on_after_steps_on_new_data(view: str, data: str) -> None:
    compare(
        f"v0 = leaf('v0', (4, 4), 1, 'S1')\nv1 = {view}\nv0.data = {data}\nv2 = v1 * 2\n"
        "with torch.no_grad(): v0.mul_(3)\nv3 = v1 * 3",
        refused=view == "v0.flatten()",
    )


def test_a_view_that_is_given_its_own_data_has_an_owner() -> None:
    compare(
        "v0 = data((4, 3), 1, 'S0')\nv1 = v0.detach()\nv1.set_(v1)\nv1.t_()\nv2 = v1[0]\n"
        "v1.data = v1.data.t()\nv1.t_()\nv1.mul_(2)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_data_of_another_dtype_and_layout_leave_the_gradient(dtype: torch.dtype) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        whole: Any = distribute_tensor(torch.ones(2, 3).double(), mesh, [Replicate()])
        for placement in (Partial(), Partial("avg"), Shard(0)):
            leaf = whole.redistribute(placements=[placement]).detach().requires_grad_()
            (leaf * leaf).sum().backward()
            leaf.data = leaf.data.to(dtype).redistribute(placements=[Replicate()])
            assert leaf.dtype == dtype
            assert leaf.grad.dtype == torch.float64
            (leaf * leaf).sum().backward()
            assert leaf.grad.full_tensor().eq(4).all()

    run_ranks(2, program)
