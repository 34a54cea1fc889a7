"""Small training programs as users write them: the plain model's lives on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tilework.errors import DistError
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


class Net(nn.Module):
    """Two layers, a norm, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.fails = self.checkpoints = False

    def body(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.norm(self.second(torch.tanh(hidden)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.fails:
            raise ValueError("in forward")
        if self.checkpoints:
            hidden = checkpoint(self.body, hidden, use_reentrant=False)
        else:
            hidden = self.body(hidden)
        first, second = (head(hidden) for head in self.heads)
        loss: Tensor = first.square().mean() + second.abs().mean()
        return loss


class Life:
    """A model on some ranks, plain on one, and a record of its gradients."""

    def __init__(self, rank: int, ranks: int, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.rank, self.ranks = rank, ranks
        self.model: Any = Net()
        self.wrapped: Any = self.model
        if ranks > 1:
            self.wrapped = DistributedDataParallel(self.model, **options)
        self.rows = torch.Generator().manual_seed(5)
        self.record: list[Tensor | None] = []
        self.new_optimizer()

    def new_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)

    def loss(self, model: Any = None) -> Any:
        x = torch.randn(4, 4, generator=self.rows).chunk(self.ranks)[self.rank].clone()
        return (model or self.wrapped)(x)

    def finish(self) -> None:
        """The end of a step: gradients are recorded, and taken."""
        grads = [parameter.grad for parameter in self.model.parameters()]
        self.record += [None if grad is None else grad.clone() for grad in grads]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.loss().backward()
        self.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        return self.wrapped.no_sync() if self.ranks > 1 else nullcontext()


def freezes(life: Life) -> None:
    life.step()
    life.model.first.requires_grad_(False)
    life.step()
    life.model.second.weight.requires_grad_(False)
    life.model.first.requires_grad_(True)
    life.step()


def freezes_before_backward(life: Life) -> None:
    life.step()
    loss = life.loss()
    life.model.first.requires_grad_(False)
    loss.backward()
    life.finish()
    life.model.first.requires_grad_(True)
    life.step()


def averages_weights(life: Life) -> None:
    average = AveragedModel(life.wrapped, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
    for _ in range(3):
        life.step()
        average.update_parameters(life.wrapped)
    with torch.no_grad():
        life.loss(average)
    life.record += [parameter.detach() for parameter in average.parameters()]


def swaps_averaged_weights(life: Life) -> None:
    for _ in range(3):
        life.step()
        kept = [parameter.data for parameter in life.model.parameters()]
        for parameter in life.model.parameters():
            parameter.data = parameter.data / 2
        life.loss()
        for parameter, data in zip(life.model.parameters(), kept, strict=True):
            parameter.data = data


def swaps_parameters(life: Life) -> None:
    life.step()
    for _ in range(2):
        old = life.model.first.weight
        life.model.first.weight = nn.Parameter(old.detach() / 2)
        life.loss()
        life.model.first.weight = old
        life.step()


def trains_a_copy(life: Life) -> None:
    life.step()
    life.wrapped = copy.deepcopy(life.wrapped)
    life.model = getattr(life.wrapped, "module", life.wrapped)
    life.new_optimizer()
    life.step()
    life.step()


def adds_losses(life: Life) -> None:
    for _ in range(3):
        (life.loss() + life.loss()).backward()
        life.finish()


def interleaves(life: Life) -> None:
    for _ in range(3):
        one, other = life.loss(), life.loss()
        one.backward()
        other.backward()
        life.finish()


def retains(life: Life) -> None:
    for _ in range(3):
        loss = life.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        life.finish()


def fails_in_forward(life: Life) -> None:
    life.step()
    life.model.fails = True
    with pytest.raises(ValueError, match="in forward"):
        life.loss()
    life.model.fails = False
    life.step()
    life.step()


def fails_in_backward(life: Life) -> None:
    def fail(_: Tensor) -> None:
        raise ValueError("in backward")

    for layer in (life.model.first, life.model.heads[1], life.model.second):
        life.step()
        handle = layer.weight.register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            life.loss().backward()
        handle.remove()
        life.optimizer.zero_grad()
    life.step()


def hooks_gradients(life: Life) -> None:
    handle = life.model.second.weight.register_hook(lambda grad: grad * 2)
    life.step()
    life.step()
    handle.remove()
    life.step()


def evaluates_in_between(life: Life) -> None:
    for _ in range(3):
        loss = life.loss()
        life.wrapped.eval()
        with torch.no_grad():
            life.loss()
        with torch.inference_mode():
            life.loss()
        life.wrapped.train()
        loss.backward()
        life.finish()


def checkpoints(life: Life) -> None:
    life.model.checkpoints = True
    for _ in range(3):
        life.step()


def accumulates(life: Life) -> None:
    for _ in range(3):
        for _ in range(2):
            with life.no_sync():
                life.loss().backward()
        life.step()


def accumulates_by_halves(life: Life) -> None:
    for _ in range(2):
        with life.no_sync():
            loss = life.loss()
        loss.backward()
        later = life.loss()
        with life.no_sync():
            later.backward()
        life.step()


def clears_what_it_accumulated(life: Life) -> None:
    for _ in range(3):
        with life.no_sync():
            life.loss().backward()
        loss = life.loss()
        life.optimizer.zero_grad()
        loss.backward()
        life.finish()


def sets_gradients(life: Life) -> None:
    for _ in range(3):
        for parameter in life.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        life.step()


def penalises_gradients(life: Life) -> None:
    for _ in range(3):
        x = torch.ones(4, 4).chunk(life.ranks)[life.rank].clone().requires_grad_()
        loss = life.wrapped(x)
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + grad.mul(x.numel()).square().mean()).backward()
        life.finish()


def ties(life: Life) -> None:
    life.step()
    life.model.heads[1].weight = life.model.heads[0].weight
    life.new_optimizer()
    life.step()
    life.step()


def grows(life: Life) -> None:
    life.step()
    head, more = life.model.heads[0], nn.Linear(4, 4)
    nn.init.eye_(more.weight)
    nn.init.zeros_(more.bias)
    life.model.heads[0] = nn.Sequential(head, nn.Tanh(), more)
    life.new_optimizer()
    life.step()
    life.step()


def loads(life: Life) -> None:
    saved = copy.deepcopy(life.wrapped.state_dict())
    life.step()
    life.wrapped.load_state_dict(saved)
    life.step()
    life.wrapped.load_state_dict(saved, assign=True)
    life.new_optimizer()
    life.step()


PROGRAMS: list[Callable[[Life], None]] = [
    *(freezes, freezes_before_backward, averages_weights, swaps_averaged_weights),
    *(swaps_parameters, trains_a_copy, adds_losses, interleaves, retains, fails_in_forward),
    *(fails_in_backward, hooks_gradients, evaluates_in_between, checkpoints, accumulates),
    *(accumulates_by_halves, clears_what_it_accumulated, sets_gradients, penalises_gradients),
    *(ties, grows, loads),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 2e-4, "find_unused_parameters": True},
}


def _record(rank: int, ranks: int, program: Callable[[Life], None], options: Any) -> Any:
    life = Life(rank, ranks, options)
    program(life)
    return [*life.record, *(parameter.detach().clone() for parameter in life.model.parameters())]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_is_that_of_one_process(program: Callable[[Life], None], options: str) -> None:
    expected = _record(0, 1, program, {})
    for record in run_ranks(2, _record, 2, program, OPTIONS[options]):
        assert [value is None for value in record] == [value is None for value in expected]
        for value, right in zip(record, expected, strict=True):
            if right is not None:
                torch.testing.assert_close(value, right)


def _fails_alone(life: Life) -> None:
    life.model.fails = life.rank == 1
    try:
        life.step()
    except ValueError:
        life.model.fails = False


def _does_not_synchronise_alone(life: Life) -> None:
    with life.no_sync() if life.rank else nullcontext():
        life.step()


def _freezes_alone(life: Life) -> None:
    life.model.first.requires_grad_(life.rank == 0)


def _keeps_gradients_alone(life: Life) -> None:
    life.loss().backward()
    life.optimizer.step()
    if life.rank == 0:
        life.optimizer.zero_grad()


def _clips_alone(life: Life) -> None:
    life.loss().backward()
    if life.rank == 1:
        nn.utils.clip_grad_norm_(life.model.parameters(), 0.01)
    life.finish()


def _loads_alone(life: Life) -> None:
    if life.rank == 1:
        life.model.load_state_dict({k: 2 * v for k, v in life.model.state_dict().items()})


def _drops_a_bias_alone(life: Life) -> None:
    if life.rank == 1:
        life.model.first.register_parameter("bias", None)
        life.new_optimizer()


UNLIKE: list[Callable[[Life], None]] = [
    *(_fails_alone, _does_not_synchronise_alone, _freezes_alone, _keeps_gradients_alone),
    *(_clips_alone, _loads_alone, _drops_a_bias_alone),
]


@pytest.mark.parametrize("act", UNLIKE, ids=lambda act: act.__name__.strip("_"))
def test_an_act_of_one_rank_alone_is_an_error_on_all(act: Callable[[Life], None]) -> None:
    def live(rank: int) -> None:
        life = Life(rank, 2, {})
        life.step()
        act(life)
        for _ in range(8):
            life.step()

    def program(rank: int) -> None:
        with pytest.raises(DistError):
            live(rank)

    run_ranks(2, program)
