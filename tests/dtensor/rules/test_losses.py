"""Each loss of torch.nn.functional on parts, with each reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dtensor.op_checks import check_op, count_op
from tests.tables import each
from tilework.dtensor import Replicate, Shard, distribute_tensor
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

F: Any = torch.nn.functional
REDUCTIONS = ["none", "sum", "mean"]
FEW: dict[str, Any] = {"meshes": [(2,), (2, 2)], "most": 3, "gathers": False}


def randn(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rand(*shape: int, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def classes(*shape: int, of: int = 5) -> Tensor:
    return torch.randint(0, of, shape, generator=torch.Generator().manual_seed(5))


def signs(*shape: int) -> Tensor:
    return rand(*shape, seed=2).round() * 2 - 1


POINTWISE: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "mse": (F.mse_loss, [randn(5, 3), randn(5, 3, seed=1)]),
    "mse_weight": (
        lambda x, t, w, **how: F.mse_loss(x, t, weight=w, **how),
        [randn(5, 3), randn(5, 3, seed=1), rand(5, 3)],
    ),
    "l1": (F.l1_loss, [randn(5, 3), randn(5, 3, seed=1)]),
    "smooth_l1": (
        lambda *a, **how: F.smooth_l1_loss(*a, beta=0.4, **how),
        [randn(5, 3), randn(5, 3, seed=1)],
    ),
    "huber": (
        lambda *a, **how: F.huber_loss(*a, delta=0.4, **how),
        [randn(5, 3), randn(5, 3, seed=1)],
    ),
    "bce": (F.binary_cross_entropy, [rand(5, 3), rand(5, 3, seed=1), rand(3)]),
    "bce_logits": (
        lambda x, t, w, p, **how: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p, **how),
        [randn(5, 3), rand(5, 3), rand(5, 1), rand(3) + 1],
    ),
    "kl_div": (
        lambda *a, **how: F.kl_div(*a, log_target=True, **how),
        [randn(5, 3), randn(5, 3, seed=1)],
    ),
    "poisson": (
        lambda *a, **how: F.poisson_nll_loss(*a, full=True, **how),
        [randn(5, 3), rand(5, 3) * 4],
    ),
    "gaussian": (F.gaussian_nll_loss, [randn(5, 3), randn(5, 3, seed=1), rand(5, 1) + 0.1]),
    "hinge": (F.hinge_embedding_loss, [randn(5, 3), signs(5, 3)]),
    "soft_margin": (F.soft_margin_loss, [randn(5, 3), signs(5, 3)]),
    "ranking": (F.margin_ranking_loss, [randn(5), randn(5, seed=1), signs(5)]),
    "cosine": (F.cosine_embedding_loss, [randn(5, 3), randn(5, 3, seed=1), signs(5)]),
    "triplet": (
        lambda *a, **how: F.triplet_margin_loss(*a, swap=True, **how),
        [randn(5, 3), randn(5, 3, seed=1), randn(5, 3, seed=2)],
    ),
    "triplet_distance": (
        F.triplet_margin_with_distance_loss,
        [randn(5, 3), randn(5, 3, seed=1), randn(5, 3, seed=2)],
    ),
    "multi_margin": (
        lambda x, t, w, **how: F.multi_margin_loss(x, t, p=2, weight=w, **how),
        [randn(5, 4), classes(5, of=4), rand(4)],
    ),
    "multilabel_margin": (
        F.multilabel_margin_loss,
        [randn(3, 4), torch.tensor([[1, 3, -1, 0], [0, -1, 1, 2], [3, 2, 1, 0]])],
    ),
    "multilabel_soft_margin": (F.multilabel_soft_margin_loss, [randn(5, 4), rand(5, 4).round()]),
}


#: Those that torch differentiates with respect to their input only.
OF_INPUT = {"bce", "bce_logits", "soft_margin", "multi_margin"}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@each("name", POINTWISE)
def test_loss(name: str) -> None:
    loss, (x, *others) = POINTWISE[name]
    for reduction in REDUCTIONS:
        check_op(
            lambda *given, reduction=reduction: loss(*given, reduction=reduction),
            *(x.requires_grad_(), *others),
            **{**FEW, "meshes": [(2, 2) if reduction == "mean" else (2,)]},
            grads=None if name in OF_INPUT else True,
        )


def test_kl_div_of_a_batch() -> None:
    check_op(lambda x, t: F.kl_div(x, t, reduction="batchmean"), randn(5, 3), rand(5, 3), **FEW)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_reductions_as_they_were_once_written() -> None:
    check_op(lambda x, t: F.mse_loss(x, t, reduce=False), randn(5), randn(5, seed=1), **FEW)
    check_op(lambda x, t: F.cross_entropy(x, t, size_average=False), randn(4, 5), classes(4), **FEW)


def test_a_mean_of_nothing_is_nan() -> None:
    check_op(F.mse_loss, randn(0, 3), randn(0, 3), **FEW)


def test_targets_that_broadcast() -> None:
    with pytest.warns(UserWarning, match="target size"):
        check_op(F.mse_loss, randn(5, 3), randn(3, seed=1), **FEW)


def test_shapes_that_differ_are_refused_though_parts_agree() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(rand(2), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="target size"):
            F.binary_cross_entropy(x, distribute_tensor(rand(1), mesh, [Replicate()]))

    run_ranks(2, program)


@each("reduction", REDUCTIONS)
@each("shape", [(5,), (4, 5), (3, 5, 2)])
def test_nll_loss(shape: tuple[int, ...], reduction: str) -> None:
    at = 0 if len(shape) == 1 else 1
    x, t = randn(*shape).requires_grad_(), classes(*shape[:at], *shape[at + 1 :])
    for weight, ignored in [(None, -100), (rand(5), int(t.reshape(-1)[-1]))]:
        check_op(
            lambda x, t, w, ignored=ignored: F.nll_loss(
                x, t, w, ignore_index=ignored, reduction=reduction
            ),
            *(x, t, weight),
            **FEW,
            grads=None,
        )


@each("reduction", REDUCTIONS)
@each("shape", [(5,), (4, 5), (3, 5, 2)])
def test_cross_entropy(shape: tuple[int, ...], reduction: str) -> None:
    at = 0 if len(shape) == 1 else 1
    x, t = randn(*shape).requires_grad_(), classes(*shape[:at], *shape[at + 1 :])
    few, last = {**FEW, "grads": None}, int(t.reshape(-1)[-1])

    def smooth(x: Tensor, t: Tensor, w: Tensor, ignored: int = -100) -> Any:
        return F.cross_entropy(
            *(x, t, w), ignore_index=ignored, reduction=reduction, label_smoothing=0.2
        )

    check_op(lambda x, t: F.cross_entropy(x, t, reduction=reduction), x, t, **few)
    check_op(lambda x, t, w: smooth(x, t, w, last), x, t, rand(5), **few)
    check_op(smooth, x, rand(*shape).softmax(at).requires_grad_(), rand(5), **few)


@each("loss", [F.cross_entropy, F.nll_loss])
@each("reduction", REDUCTIONS)
def test_targets_that_are_bytes(reduction: str, loss: Any) -> None:
    target = torch.tensor([0, 4, 255, 3, 2], dtype=torch.uint8)
    check_op(
        lambda x, t, w: loss(x, t, w, ignore_index=255, reduction=reduction),
        *(randn(5, 5).requires_grad_(), target, rand(5)),
        **FEW,
        grads=None,
    )
    target = torch.tensor([156, 3], dtype=torch.uint8)  # -100 as a byte
    check_op(lambda x, t: loss(x, t, reduction=reduction), randn(2, 160), target, **FEW)


def test_all_targets_ignored() -> None:
    check_op(lambda x, t: F.cross_entropy(x, t), randn(4, 5), torch.full((4,), -100), **FEW)


def test_more_ranks_than_classes() -> None:
    three = {**FEW, "meshes": [(3,)], "grads": None}
    x = randn(4, 2).requires_grad_()
    check_op(F.cross_entropy, x, classes(4, of=2), rand(2), **three)
    check_op(F.nll_loss, x, classes(4, of=2), rand(2), **three)


def test_a_target_that_is_no_class() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(randn(3, 4), mesh, [Shard(1)])
        with pytest.raises(IndexError, match="out of range"):
            F.cross_entropy(x, distribute_tensor(torch.tensor([0, 4, 1]), mesh, [Replicate()]))

    run_ranks(2, program)


def test_logits_are_not_gathered() -> None:
    layouts: list[Any] = [[Shard(1)], [Replicate()]]
    seen = count_op(F.cross_entropy, randn(4, 6), classes(4), layouts=layouts)
    assert seen.forward == ["all_reduce"] * 2
    assert seen.backward == []
    batch = count_op(F.cross_entropy, randn(4, 6), classes(4), layouts=[[Shard(0)], [Shard(0)]])
    assert batch.forward == ["all_reduce"]
    assert batch.backward == []


def test_ctc_loss() -> None:
    log_probs = randn(6, 3, 5).log_softmax(2)
    targets = classes(3, 2, of=4) + 1
    lengths, sizes = torch.tensor([6, 5, 6]), torch.tensor([2, 1, 2])
    for reduction in REDUCTIONS:
        check_op(
            lambda *given, reduction=reduction: F.ctc_loss(*given, reduction=reduction),
            *(log_probs, targets, lengths, sizes),
            **{**FEW, "partial": ()},
        )
