"""Plain operators on ranks' parts: those that need all of the cut dim are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.tables import each
from tilework.dtensor import Shard, init_device_mesh
from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tilework.testing import run_ranks

Act = Callable[[Any], Any]


def _heads(part: Any) -> Any:
    return part.view(*part.shape[:2], -1, 2)


def _attention(part: Any) -> Any:
    q = _heads(part).transpose(1, 2)
    weights = (q @ q.mT).softmax(-1)
    return (weights @ q).transpose(1, 2).reshape(*part.shape[:2], -1)


REFUSED: dict[str, Act] = {
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "softmax": lambda h: F.softmax(h, -1),
    "mean of all": lambda h: h - h.mean(),
    "rms_norm": lambda h: F.rms_norm(h, h.shape[-1:]),
    "topk": lambda h: h * h.topk(2).values[..., :1],
    "normalize": lambda h: F.normalize(h, dim=-1),
    "cosine": lambda h: h * F.cosine_similarity(h, 2 * h, dim=-1)[..., None],
    "product": lambda h: h @ h.mT @ h,
    "einsum": lambda h: h * torch.einsum("bsf,bsf->bs", h, h)[..., None],
    "over heads": lambda h: _heads(h).softmax(2).flatten(2),
    "rows of local width": lambda h: h.reshape(-1, h.shape[-1]).softmax(-1).view_as(h),
    "flat": lambda h: h.flatten(1).softmax(-1).view_as(h),
    "transposed": lambda h: h.mT.clone().cumsum(1).mT,
    "joined": lambda h: torch.cat([h, h], -1)[..., ::2],
    "after dropout": lambda h: F.dropout(h, 0.5).permute(2, 0, 1).std(0),
    "checkpointed": lambda h: checkpoint(lambda y: y.softmax(-1), h, use_reentrant=False),
    "all heads": lambda h: h.view(2, h.shape[1], 2, -1).softmax(-1).flatten(2),
    "chunks of a fused layer": lambda h: h.chunk(2, -1)[0].repeat_interleave(2, -1),
    "fused, by a view": lambda h: h.unflatten(-1, (2, -1)).unbind(2)[0].repeat_interleave(2, -1),
    "the first half": lambda h: h[..., : h.shape[-1] // 2].repeat_interleave(2, -1),
    "a feature": lambda h: h * h[..., :1],
    "a write to a feature": lambda h: h.clone().__setitem__((..., 0), 0),
    "an order of features": lambda h: h.index_select(-1, torch.arange(h.shape[-1]).flip(0)),
    "features by index": lambda h: h[..., torch.arange(h.shape[-1]).flip(0)],
    "moved features": lambda h: h.roll(1, -1),
    "groups": lambda h: F.group_norm(h.flatten(0, 1), 2).view_as(h),
    "without gradients": lambda h: h / torch.no_grad()(lambda: h.norm(dim=-1, keepdim=True))(),
    "plain weights": lambda h: F.linear(h, torch.ones(2, h.shape[-1])),
}
RIGHT: dict[str, Act] = {
    "norm of heads": lambda h: F.rms_norm(_heads(h), (2,)).flatten(2),
    "attention": _attention,
    "fused attention": lambda h: (
        F.scaled_dot_product_attention(*[_heads(h).transpose(1, 2)] * 3).transpose(1, 2).flatten(2)
    ),
    "sum of places": lambda h: h - h.sum(1, keepdim=True),
    "mean of rows": lambda h: h - h.mean(0, keepdim=True),
    "sizes of the part": lambda h: h.view(2, 3, h.shape[2] // 2, 2).softmax(-1).view(h.shape),
    "heads in batches": lambda h: (
        _heads(h).transpose(1, 2).reshape(-1, 3, 2).softmax(-1).view(2, -1, 3, 2).transpose(1, 2)
    ).flatten(2),
    "repeated heads": lambda h: (
        _heads(h)[:, :, :, None].expand(-1, -1, -1, 2, -1).softmax(-1)[:, :, :, 0].flatten(2)
    ),
    "halves of heads": lambda h: torch.cat(_heads(h).chunk(2, -1)[::-1], -1).flatten(2),
    "pairs of features": lambda h: (h[..., ::2] * h[..., 1::2]).repeat_interleave(2, -1),
    "the shape of the part": lambda h: (
        _heads(h).transpose(1, 2).reshape(2, h.shape[-1] // 2, 3, -1, 1).transpose(1, 2).flatten(2)
    ),
    "a question": lambda h: h * (not h.isnan().any()),
}


class _Model(nn.Module):
    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act, self.up, self.down = act, nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.act(self.up(x)))


def _loss(act: Act, ranks: int) -> Any:
    torch.manual_seed(0)
    model = _Model(act)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    if ranks > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@each("act", REFUSED)
@each("ranks", [2, 4])
def test_operators_that_need_the_cut_dim_are_refused(act: str, ranks: int) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=r"needs all of dim \d, and up \(ColwiseParallel\)"):
            _loss(REFUSED[act], ranks)

    run_ranks(ranks, program)


@each("act", RIGHT)
@each("ranks", [2, 4])
def test_operators_over_other_dims_are_right(act: str, ranks: int) -> None:
    losses = run_ranks(ranks, lambda rank: _loss(RIGHT[act], ranks))
    torch.testing.assert_close(losses[0], _loss(RIGHT[act], 1))


@each("act", ["norm", "all heads", "chunks of a fused layer"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_first_calls_of_each_shape_are_checked(act: str, mode: Any) -> None:
    def program(rank: int) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model = _Model(lambda h: REFUSED[act](h) if h.shape[1] > 3 else h)
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        with mode():
            for _ in range(5):
                model(torch.ones(2, 3, 4))
            with pytest.raises(ValueError, match=r"needs all of dim \d, and up"):
                model(torch.ones(2, 5, 4))

    run_ranks(2, program)


MIXED: dict[str, Act] = {
    "heads inside": lambda h: _heads(h).transpose(2, 3).flatten(2),
    "features before places": lambda h: h.mT,
}


@each("act", MIXED)
def test_a_part_that_is_cut_in_another_place_is_no_input(act: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=r"output of up \(Colwise.*, cut in dim \d of 3"):
            _loss(MIXED[act], 2)

    run_ranks(2, program)


def test_the_error_names_the_layer_among_several_and_the_way_out() -> None:
    def program(rank: int) -> None:
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Softmax(-1))
        with pytest.raises(ValueError, match=r"(?s)2 \(ColwiseParallel\).*use_local_output=False"):
            parallelize_module(layers, init_device_mesh("cpu", (2,)), plan)(torch.ones(2, 4))

    run_ranks(2, program)


MISTAKES: dict[str, tuple[Act, str]] = {
    "a layer that the plan forgets": (lambda h: nn.Linear(8, 8)(h), "linear got 4 of 8"),
    "heads counted in the model": (lambda h: h.view(2, 3, 4, 2).flatten(2), "view got 4 of 8"),
}


@each("mistake", MISTAKES)
def test_a_mistake_in_a_plan_names_the_layer_and_the_names_without_a_module(mistake: str) -> None:
    act, says = MISTAKES[mistake]

    def program(rank: int) -> None:
        plan = {"up": ColwiseParallel(), "dwon": RowwiseParallel()}
        model = parallelize_module(_Model(act), init_device_mesh("cpu", (2,)), plan)
        with pytest.raises(RuntimeError, match=rf"(?s){says}.*up \(Colwise.*No module fits 'dwon'"):
            model(torch.ones(2, 3, 4))

    with pytest.warns(UserWarning, match="dwon"):
        run_ranks(2, program)


def test_an_error_that_has_nothing_to_do_with_the_cut_stays() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match=r"^shape .* is invalid"):
            _loss(lambda h: h.view(-1, 7), 2)

    run_ranks(2, program)


def test_rows_of_each_rank_are_summed_as_a_share_of_the_loss() -> None:
    def program(rank: int) -> None:
        rows = parallelize_module(
            nn.Linear(4, 2),
            init_device_mesh("cpu", (2,)),
            RowwiseParallel(output_layouts=Shard(0)),
        )
        rows(torch.ones(4, 2)).square().mean().backward()

    run_ranks(2, program)
