"""Experts on several ranks against the dense mixture of a single process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor
from tilework.errors import CollectiveMismatchError, DistError
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    DistributedDataParallel,
    ExpertParallel,
    balance_loss,
    expert_report,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks

ROWS, FEATURES = 10, 4


class Experts(nn.Module):
    """A stack of experts, each two linear layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, 6, FEATURES))
        self.down = nn.Parameter(torch.randn(experts, FEATURES, 6))

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for expert in range(self.num_experts):
            row, place = torch.where(experts == expert)
            if len(row):
                made = F.linear(F.relu(F.linear(rows[row], self.up[expert])), self.down[expert])
                result = result.index_add(0, row, made * weights[row, place, None])
        return result


class Mixture(nn.Module):
    def __init__(self, experts: int, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = nn.Linear(FEATURES, experts, bias=False)
        self.experts = Experts(experts)

    def forward(self, rows: Tensor) -> Tensor:
        weights, ids = self.router(rows).softmax(-1).topk(self.top, dim=-1)
        made: Tensor = self.experts(rows, ids, weights)
        return made


def mixture(experts: int, top: int) -> tuple[Mixture, Tensor]:
    torch.manual_seed(experts)
    return Mixture(experts, top), torch.randn(ROWS, FEATURES)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
        for name, each in model.named_parameters()
        if each.grad is not None
    }


def dense(model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    model, rows = copy.deepcopy(model), rows.clone().requires_grad_()
    out = model(rows)
    out.square().sum().backward()
    assert rows.grad is not None
    return out, rows.grad, gradients(model)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("experts", "top"), [(3, 1), (7, 2), (8, 4), (2, 2)])
def test_replicated_rows_give_the_dense_mixture(ranks: int, experts: int, top: int) -> None:
    model, rows = mixture(experts, top)
    expected = dense(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh, {"experts": ExpertParallel("replicate")})
        torch.testing.assert_close(dense(mine, rows), expected)

    run_ranks(ranks, program)


def test_an_activation_checkpoint_recomputes_the_mixture() -> None:
    model, rows = mixture(5, 2)
    expected = dense(model, rows)

    def program(rank: int) -> None:
        mine = copy.deepcopy(model)
        styles = {"experts": ExpertParallel("replicate")}
        parallelize_module(mine, init_device_mesh("cpu", (2,)), styles)
        again = partial(checkpoint, mine.forward, use_reentrant=False)
        mine.forward = again  # type: ignore[method-assign]
        for _ in range(3):  # trials of the module are made in some forwards
            mine.zero_grad()
            given = rows.clone().requires_grad_()
            out = mine(given)
            out.square().sum().backward()
            torch.testing.assert_close((out, given.grad, gradients(mine)), expected)

    run_ranks(2, program)


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_of_ranks_give_the_mean_over_ranks(ranks: int) -> None:
    model, rows = mixture(5, 2)
    sizes = [4] * ranks
    rows = torch.randn(sum(sizes), FEATURES)
    expected, _, grads = dense(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (ranks,))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh, {"experts": ExpertParallel()})
        fully_shard(mine, mesh=mesh, ignored_params=set(mine.experts.parameters()))
        for _ in range(2):
            mine.zero_grad()
            out = mine(torch.split(rows, sizes)[rank])
            torch.testing.assert_close(out, torch.split(expected, sizes)[rank])
            out.square().sum().backward()
            means = {name: grad / ranks for name, grad in grads.items()}
            torch.testing.assert_close(gradients(mine), means)

    run_ranks(ranks, program)


def test_a_rank_without_rows_and_a_rank_without_experts_take_part() -> None:
    model, rows = mixture(2, 1)
    expected, _, grads = dense(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        mine = copy.deepcopy(model.experts)
        parallelize_module(mine, mesh, ExpertParallel())
        part = rows[: ROWS * (rank == 2)]
        weights, ids = model.router(part).softmax(-1).topk(1, dim=-1)
        out = mine(part, ids, weights)
        torch.testing.assert_close(out, expected[: len(part)])
        out.square().sum().backward()
        for name, grad in gradients(mine).items():
            torch.testing.assert_close(grad, grads[f"experts.{name}"] / 3)

    run_ranks(3, program)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_dtensors_are_taken_in_any_layout(placement: Any) -> None:
    model, rows = mixture(7, 2)
    expected = dense(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh, {"experts": ExpertParallel()}, axis="ep")
        given = distribute_tensor(rows, mesh, [Shard(0), placement]).requires_grad_()
        out = mine(given)
        out.square().sum().backward()
        assert given.grad is not None
        made = out.full_tensor(), given.grad.full_tensor(), gradients(mine)
        torch.testing.assert_close(made, expected)

    run_ranks(4, program)


def test_the_bits_do_not_depend_on_the_number_of_ranks() -> None:
    model, rows = mixture(8, 3)

    def program(rank: int, ranks: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh, {"experts": ExpertParallel("replicate")})
        return dense(mine, rows)

    one = run_ranks(1, program, 1)[0]
    for ranks in (2, 3, 4):
        made = run_ranks(ranks, program, ranks)[0]
        torch.testing.assert_close(made, one, rtol=0, atol=0)


def test_rows_beyond_the_capacity_are_dropped_in_the_order_of_places() -> None:
    experts, rows = Experts(2), torch.randn(6, FEATURES)
    ids = torch.tensor([[0], [0], [1], [0], [0], [0]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = copy.deepcopy(experts)
        parallelize_module(mine, mesh, ExpertParallel(capacity=1))  # three of the five
        part = torch.split(rows, 3)[rank].clone().requires_grad_()
        out = mine(part, torch.split(ids, 3)[rank], torch.ones(3, 1))
        kept = torch.tensor([[1, 1, 1], [1, 0, 0]][rank])[:, None]
        full = torch.split(experts(rows, ids, torch.ones(6, 1)), 3)[rank]
        torch.testing.assert_close(out, full * kept)
        out.sum().backward()
        assert part.grad is not None
        assert not part.grad[kept.flatten() == 0].any()
        load = expert_report(mine).layers[0]
        assert (load.rows, load.ranks, load.dropped) == ((3, 1), (3, 1), 2)

    run_ranks(2, program)


def test_forward_and_backward_exchange_rows_twice() -> None:
    model, rows = mixture(4, 2)

    def program(rank: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2,))
        mine = copy.deepcopy(model.experts)
        parallelize_module(mine, mesh, ExpertParallel())
        given = rows.clone().requires_grad_()
        weights, ids = model.router(rows).softmax(-1).topk(2, dim=-1)
        mine(given, ids, weights).sum().backward()
        calls = [each.what for each in mesh.get_group().flight_entries()]
        return [call.split()[0] for call in calls if "gather" in call or "all_to_all" in call]

    exchanges = ["all_to_all_single"] * 4
    assert run_ranks(2, program)[0][-5:] == ["all_gather_into_tensor", *exchanges]


def _expected_balance(model: Mixture, rows: Tensor) -> Tensor:
    weights, ids = model.router(rows).softmax(-1).topk(model.top, dim=-1)
    count = model.experts.num_experts
    share = torch.bincount(ids.flatten(), minlength=count) / ids.numel()
    weight = torch.zeros(count).index_add(0, ids.flatten(), weights.flatten()) / len(rows)
    made: Tensor = count * (share * weight).sum()
    return made


@pytest.mark.parametrize("dispatch", ["rows", "replicate"])
def test_the_balance_loss_of_microbatches_is_that_of_the_batch(dispatch: Any) -> None:
    model, rows = mixture(4, 2)
    expected = _expected_balance(model, rows)
    torch.autograd.backward(expected)
    assert model.router.weight.grad is not None
    wanted, model.router.weight.grad = model.router.weight.grad, None

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = copy.deepcopy(model)
        parallelize_module(mine, mesh, {"experts": ExpertParallel(dispatch)})
        parts = torch.split(*((torch.split(rows, 5)[rank], 2) if dispatch == "rows" else (rows, 3)))
        outputs = [mine(part) for part in parts]
        loss = balance_loss(mine)
        torch.testing.assert_close(loss, expected)
        (loss + 0 * sum(out.sum() for out in outputs)).backward()
        grad = mine.router.weight.grad
        assert grad is not None
        dist.all_reduce(grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(grad, wanted)
        with pytest.raises(ValueError, match="no forward"):
            balance_loss(mine)

    run_ranks(2, program)


def test_numbers_out_of_range_raise_on_all_ranks() -> None:
    def program(rank: int) -> None:
        experts = parallelize_module(Experts(4), init_device_mesh("cpu", (2,)), ExpertParallel())
        ids = torch.full((3, 1), 4 * rank)
        with pytest.raises(ValueError, match=r"outside 0 to 3 on ranks \[1\]"):
            experts(torch.ones(3, FEATURES), ids, torch.ones(3, 1))

    run_ranks(2, program)


def test_weights_that_are_nan_raise_on_all_ranks() -> None:
    def program(rank: int) -> None:
        experts = parallelize_module(Experts(4), init_device_mesh("cpu", (2,)), ExpertParallel())
        weights = torch.ones(3, 1) if rank else torch.full((3, 1), torch.nan)
        with pytest.raises(ValueError, match=r"NaN on ranks \[0\]"):
            experts(torch.ones(3, FEATURES), torch.zeros(3, 1, dtype=torch.long), weights)

    run_ranks(2, program)


def test_routers_that_differ_on_replicated_rows_raise() -> None:
    def program(rank: int) -> None:
        style = ExpertParallel("replicate")
        experts = parallelize_module(Experts(4), init_device_mesh("cpu", (2,)), style)
        with pytest.raises(DistError, match="differ"):
            experts(torch.ones(4, FEATURES), torch.full((4, 1), rank), torch.ones(4, 1))

    run_ranks(2, program)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [({"dispatch": "row"}, "dispatch must be"), ({"capacity": 0}, "capacity is a multiple")],
)
def test_wrong_arguments_raise(arguments: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ExpertParallel(**arguments)


def test_a_module_without_stacks_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="stacked weights"):
        ExpertParallel().parameter_layouts(nn.Sequential(nn.Linear(2, 2)))


class Marked(Experts):
    """Experts with a buffer."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.register_buffer("scale", torch.ones(experts))


def test_a_buffer_of_all_experts_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"\['scale'\] of Marked are buffers"):
        ExpertParallel().parameter_layouts(Marked(2))


def test_a_second_style_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        experts = parallelize_module(Experts(4), mesh, ExpertParallel(capacity=2))
        with pytest.raises(ValueError, match=r"a style already: ExpertParallel.*capacity=2"):
            parallelize_module(experts, mesh, ExpertParallel())

    run_ranks(2, program)


class Wrapped(Experts):
    """Experts whose forward passes on what it is given."""

    def forward(self, *given: Tensor) -> Tensor:
        return super().forward(*given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_numbers_of_any_integers_and_a_forward_of_any_arguments(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, rows, weights = Wrapped(3), torch.randn(3, FEATURES), torch.rand(3, 1)
    ids = torch.tensor([[0], [2], [1]], dtype=dtype)
    expected = experts(rows, ids, weights)

    def program(rank: int) -> None:
        style, mesh = ExpertParallel("replicate"), init_device_mesh("cpu", (2,))
        mine = parallelize_module(copy.deepcopy(experts), mesh, style)
        torch.testing.assert_close(mine(rows, ids, weights), expected)

    run_ranks(2, program)


@pytest.mark.parametrize(("dispatch", "axes"), [("replicate", ("dp",)), ("rows", ("dp", "ep"))])
def test_the_balance_loss_covers_further_axes(dispatch: Any, axes: tuple[str, ...]) -> None:
    model, rows = mixture(4, 2)
    expected = _expected_balance(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        mine = parallelize_module(
            copy.deepcopy(model), mesh["ep"], {"experts": ExpertParallel(dispatch)}
        )
        parts = torch.split(rows, [3, 3, 2, 2] if dispatch == "rows" else [6, 4])
        out = mine(parts[rank if dispatch == "rows" else rank // 2])
        torch.testing.assert_close(balance_loss(mine, mesh=mesh[axes]), expected)
        assert out.shape[1] == FEATURES

    run_ranks(4, program)


def test_a_mesh_whose_ranks_have_the_same_rows_is_refused() -> None:
    model, rows = mixture(4, 2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = parallelize_module(
            copy.deepcopy(model), mesh, {"experts": ExpertParallel("replicate")}
        )
        out = mine(rows)
        with pytest.raises(ValueError, match="counted already"):
            balance_loss(mine, mesh=mesh)
        assert out.shape == rows.shape

    run_ranks(2, program)


def test_ddp_over_the_axis_of_experts_leaves_them_out() -> None:
    model, rows = mixture(5, 2)
    _, _, grads = dense(model, rows)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine = parallelize_module(copy.deepcopy(model), mesh, {"experts": ExpertParallel()})
        names = [name for name, _ in mine.named_parameters() if name.startswith("experts.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(mine, names)
        wrapped = DistributedDataParallel(mine, device_mesh=mesh)
        wrapped(rows.chunk(2)[rank]).square().sum().backward()
        torch.testing.assert_close(gradients(mine), {k: grad / 2 for k, grad in grads.items()})

    run_ranks(2, program)


@pytest.mark.parametrize("sizes", [[10], [3, 7]])
def test_logits_of_microbatches_of_any_length_are_taken(sizes: list[int]) -> None:
    model, rows = mixture(4, 1)

    def program(rank: int) -> Tensor:
        mine, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
        parallelize_module(mine, mesh, {"experts": ExpertParallel("replicate")})
        outputs = [mine(part) for part in torch.split(rows, sizes)]
        assert len(outputs) == len(sizes)
        return balance_loss(mine, [mine.router(rows)]).detach()

    ids = model.router(rows).argmax(-1)
    mean = model.router(rows).softmax(-1).mean(0)
    expected = 4 * (torch.bincount(ids, minlength=4) / ROWS * mean).sum()
    torch.testing.assert_close(run_ranks(2, program)[0], expected.detach())


@pytest.mark.parametrize("dispatch", ["rows", "replicate"])
def test_logits_of_other_rows_raise_on_all_ranks(dispatch: Any) -> None:
    model, rows = mixture(4, 1)

    def program(rank: int) -> None:
        mine, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2,))
        parallelize_module(mine, mesh, {"experts": ExpertParallel(dispatch)})
        out = mine(rows)
        with pytest.raises(ValueError, match="are not those of all rows"):
            balance_loss(mine, [mine.router(rows[1:])])
        assert len(out) == ROWS

    run_ranks(2, program)


class Bent(nn.Module):
    """Experts whose result is not the sum of weight times each result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.weight = how, nn.Parameter(torch.arange(-3.0, 13).view(4, -1))

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if self.how == "normalized":
            weights = weights / weights.sum(1, keepdim=True)
        made = self.weight[experts] * weights[..., None] * rows[:, None]
        made = {"tanh": made.tanh(), "one more": made + 1, "relu": made.relu()}.get(self.how, made)
        whole = {"mean": made.mean(1), "greatest": made.amax(1), "relu of all": made.sum(1).relu()}
        return whole.get(self.how, made.sum(1))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "how",
    ["tanh", "one more", "normalized", "relu", "mean", "greatest", "relu of all", "linear"],
)
def test_a_module_that_does_not_add_up_raises_on_all_ranks(how: str, ranks: int) -> None:
    def program(rank: int) -> None:
        experts = parallelize_module(Bent(how), init_device_mesh("cpu", (ranks,)), ExpertParallel())
        torch.manual_seed(0)
        rows = torch.randn(3 * rank, FEATURES)  # a rank without rows raises, too
        ids, weights = torch.full((3 * rank, 2), 1), torch.randn(3 * rank, 2)
        weights = weights.abs() if how == "relu of all" else weights
        if how == "linear":
            torch.testing.assert_close(experts(rows, ids, weights), Bent(how)(rows, ids, weights))
            return
        with pytest.raises(ValueError, match=r"does not return, for a row, the sum .*\(on ranks"):
            experts(rows, ids, weights)

    run_ranks(ranks, program)


@pytest.mark.parametrize("other", [{"capacity": 1.0}, {"dispatch": "replicate"}])
def test_other_arguments_on_ranks_raise_on_all(other: Any) -> None:
    def program(rank: int) -> None:
        style = ExpertParallel(**(other if rank else {}))
        with pytest.raises(CollectiveMismatchError, match="other styles for the module"):
            parallelize_module(Experts(4), init_device_mesh("cpu", (2,)), style)

    run_ranks(2, program)


def test_a_capacity_that_is_no_number_raises() -> None:
    with pytest.raises(TypeError, match="capacity is a number or None, got '1'"):
        ExpertParallel(capacity="1")  # type: ignore[arg-type]


def test_a_rank_tries_the_module_where_no_rows_come_from() -> None:
    def program(rank: int) -> None:  # rank 4 has all rows, and no expert
        experts = parallelize_module(Bent("tanh"), init_device_mesh("cpu", (5,)), ExpertParallel())
        given = torch.ones(rank // 4, FEATURES), torch.zeros(rank // 4, 1).long()
        with pytest.raises(ValueError, match=r"does not return.*ranks \[0, 1, 2, 3\] of the axis"):
            experts(*given, torch.ones(rank // 4, 1))

    run_ranks(5, program)
