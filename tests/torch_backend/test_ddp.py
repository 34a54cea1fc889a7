"""DDP where its C++ reducer asks most of a backend: checkpointing, shared weights, hooks.

Gradients are compared with those of the plain model over all ranks' batches.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from tests.jobs import Launcher, Rank
from tests.rounding import assert_close

BATCH, WIDTH = 4, 20
_Output = Callable[[Any], Tensor]


class Checkpointed(nn.Module):
    """Recomputes its second layer in backward, once or more often.

    Args:
        layers: Which of the two layers runs at each place; a negative one is not checkpointed.
        shared: Whether the two have one weight.
        unused: Whether there is a layer that never runs.
    """

    def __init__(
        self, *layers: int, shared: bool = False, reentrant: bool = False, unused: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(31)
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shared:
            self.l1.weight = self.l2.weight
        self.layers, self.reentrant = layers, reentrant
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        for number in self.layers:
            layer = self.l1 if abs(number) == 1 else self.l2
            x = layer(x) if number < 0 else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def compare(rank: Rank, model: nn.Module, read: _Output = lambda y: y, **settings: Any) -> None:
    """A few steps of DDP have the gradients that the plain model has over all batches."""
    plain = copy.deepcopy(model)
    parallel = DDP(copy.deepcopy(model), bucket_cap_mb=1, **settings)
    random = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.rand(BATCH * rank.size, WIDTH, generator=random, requires_grad=True)
        target = torch.rand(BATCH * rank.size, WIDTH, generator=random)
        mine = slice(BATCH * rank.number, BATCH * (rank.number + 1))
        for each, batch, wanted in ((plain, x, target), (parallel, x[mine], target[mine])):
            each.zero_grad()
            loss = nn.functional.mse_loss(read(each(batch)), wanted)
            torch.autograd.backward(loss)
        for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
            if p.grad is None:
                assert q.grad is None or not q.grad.any()
            else:
                assert_close(q.grad, p.grad, rtol=1.3e-6, atol=5e-5)


def checkpointing(rank: Rank, reentrant: bool) -> None:
    with rank.joined():
        for view, static in itertools.product((False, True), (False, True)):
            settings: dict[str, Any] = {"gradient_as_bucket_view": view, "static_graph": static}
            compare(rank, Checkpointed(-1, 2, reentrant=reentrant), **settings)
            if static or not reentrant:
                compare(rank, Checkpointed(-1, 2, shared=True, reentrant=reentrant), **settings)
                unused = Checkpointed(-1, 2, reentrant=reentrant, unused=True)
                compare(rank, unused, find_unused_parameters=True, **settings)
            if static:
                twice = Checkpointed(-1, 2, 2, shared=True, reentrant=reentrant)
                compare(rank, twice, **settings)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointing(ranks: Launcher, reentrant: bool) -> None:
    ranks(2, checkpointing, reentrant)


def ready_twice(rank: Rank) -> None:
    with rank.joined():
        model = Checkpointed(-1, 2, reentrant=True, unused=True)
        with pytest.raises(RuntimeError, match="ready only once"):
            compare(rank, model, find_unused_parameters=True)


def test_the_reducers_own_errors_arrive(ranks: Launcher) -> None:
    ranks(2, ready_twice)


def divided(bucket: Any) -> torch.futures.Future[Tensor]:
    """A hook with a reduction of its own, and two callbacks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    future: torch.futures.Future[Tensor] = (
        work.get_future().then(lambda f: [f.value()[0].div_(2)]).then(lambda f: f.value()[0])
    )
    return future


def hooks(rank: Rank) -> None:
    with rank.joined():
        group = dist.new_group()
        for view in (False, True):
            parallel = DDP(Checkpointed(-1, -2), process_group=group, gradient_as_bucket_view=view)
            parallel.register_comm_hook(None, lambda _, bucket: divided(bucket))
            parallel(torch.full((1, WIDTH), rank.number + 1.0)).sum().backward()
            plain = Checkpointed(-1, -2)
            plain(torch.full((2, WIDTH), 1.5)).mean(0).sum().backward()
            for p, q in zip(plain.parameters(), parallel.parameters(), strict=True):
                assert_close(q.grad, p.grad)


def test_a_hook_with_callbacks(ranks: Launcher) -> None:
    ranks(2, hooks)


@dataclass
class Outputs:
    first: Tensor
    second: Tensor | None


class ReturnsDataclass(nn.Module):
    """Returns more than a tensor, and may leave a layer out."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = both

    def forward(self, x: Tensor) -> Outputs:
        return Outputs(self.l2(x), self.l1(x) if self.both else None)


def dataclasses(rank: Rank) -> None:
    with rank.joined():
        compare(rank, ReturnsDataclass(False), lambda y: y.first, find_unused_parameters=True)
        compare(rank, ReturnsDataclass(True), lambda y: y.first + y.second)


def test_outputs_that_are_dataclasses(ranks: Launcher) -> None:
    ranks(2, dataclasses)


def pipeline(rank: Rank) -> float:
    """Each rank holds one layer: activations go up, gradients come down."""
    torch.manual_seed(9)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(rank.size)]
    layer, me, last = layers[rank.number], rank.number, rank.size - 1
    norm = 0.0
    for step in range(3):
        x = torch.full((BATCH, WIDTH), 0.1 * step)
        if me:
            x = torch.empty(BATCH, WIDTH)
            dist.recv(x, me - 1)
            x.requires_grad_()
        y = torch.tanh(layer(x))
        if me < last:
            dist.send(y.detach(), me + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, me + 1)
            torch.autograd.backward(y, gradient)
        else:
            torch.autograd.backward(y.square().sum())
        if me:
            assert x.grad is not None
            dist.send(x.grad, me - 1)
        assert layer.weight.grad is not None
        norm += layer.weight.grad.norm().item()
    return norm


def test_a_pipeline_of_messages(ranks: Launcher) -> None:
    for by_backend in ranks(3, Rank.on_both, pipeline):
        assert by_backend["tilework"] == by_backend["gloo"] > 0
