"""Random numbers of ranks that are threads: those of processes, whatever the others draw."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.tables import each
from tilework import sharded
from tilework.errors import DistError
from tilework.parallel import DistributedDataParallel
from tilework.sharded import ChunkShardingSpec
from tilework.testing import run_ranks

DRAWS: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(3),
    "randn_like": lambda: torch.randn_like(torch.ones(3)),
    "randint": lambda: torch.randint(99, (3,)),
    "randperm": lambda: torch.randperm(9),
    "normal": lambda: torch.normal(torch.zeros(3)),
    "multinomial": lambda: torch.ones(9).multinomial(3),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "bernoulli_": lambda: torch.empty(9).bernoulli_(0.5),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "dropout": lambda: F.dropout(torch.ones(9)),
    "dropout2d": lambda: F.dropout2d(torch.ones(1, 9, 2, 2)),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(9), training=True),
    "native_dropout": lambda: torch.native_dropout(torch.ones(9), 0.5, True)[0],
    "gamma": lambda: torch._standard_gamma(torch.ones(3)),
    "Dropout": lambda: nn.Dropout()(torch.ones(9)),
    "rrelu": lambda: F.rrelu(-torch.ones(3), training=True),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(3)),
    "Linear": lambda: nn.Linear(3, 3).weight.detach(),
    "Embedding": lambda: nn.Embedding(3, 3).weight.detach(),
    "orthogonal_": lambda: nn.init.orthogonal_(torch.empty(3, 3)),
    "LSTM": lambda: nn.LSTM(3, 3, 2, dropout=0.5)(torch.ones(2, 3))[0].detach(),
    "attention": lambda: nn.MultiheadAttention(4, 2, dropout=0.5)(*[torch.ones(2, 4)] * 3)[
        0
    ].detach(),
    "Normal": lambda: torch.distributions.Normal(0.0, 1.0).sample((3,)),  # type: ignore[no-untyped-call]
    "Poisson": lambda: torch.distributions.Poisson(torch.full((3,), 4.0)).sample(),  # type: ignore[no-untyped-call]
}


def seeded(draw: Callable[[], Tensor], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    return [draw(), draw()]


@each("draw", DRAWS.values())
def test_a_rank_draws_as_a_process_does(draw: Callable[[], Tensor]) -> None:
    def program(rank: int) -> list[Tensor]:
        return seeded(draw, rank)

    for rank, drawn in enumerate(run_ranks(2, program)):
        for own, expected in zip(drawn, seeded(draw, rank), strict=True):
            assert torch.equal(own, expected)


def test_other_ranks_do_not_interfere() -> None:
    def model() -> list[Tensor]:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4))
        return [parameter.detach() for parameter in layers.parameters()]

    def program(rank: int) -> list[list[Tensor]]:
        models = []
        for seed in range(40):
            torch.manual_seed(seed + rank)
            models.append(model())
        return models

    for rank, models in enumerate(run_ranks(4, program)):
        for seed, drawn in enumerate(models):
            torch.manual_seed(seed + rank)
            assert all(map(torch.equal, drawn, model()))


def test_ranks_begin_with_the_state_of_the_program() -> None:
    torch.manual_seed(3)
    first, second = run_ranks(2, lambda rank: torch.rand(3))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.rand(3))  # which the ranks have left as it was


def test_a_recomputed_layer_drops_the_same() -> None:
    def program(rank: int) -> bool:
        torch.manual_seed(rank)
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(lambda x: F.dropout(x), x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        return torch.equal(x.grad, y.detach())

    assert all(run_ranks(4, program))


def test_sharded_tensors_are_filled_from_the_ranks_own() -> None:
    def program(rank: int) -> Tensor:
        torch.manual_seed(rank)
        st = sharded.empty(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 2)
        nn.init.uniform_(st)
        return st.local_tensor()

    first, again = run_ranks(2, program), run_ranks(2, program)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(*first)


def test_a_generator_that_is_given_is_drawn_from() -> None:
    def program(rank: int) -> Tensor:
        torch.manual_seed(0)
        torch.rand(2, generator=torch.Generator().manual_seed(1))
        return torch.rand(2)

    torch.manual_seed(0)
    assert torch.equal(run_ranks(2, program)[1], torch.rand(2))


def test_call_sites_are_those_of_the_program() -> None:
    def program(rank: int) -> str:
        loss = DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum()
        with pytest.raises(DistError) as caught:
            loss.backward() if rank else dist.broadcast(torch.ones(2), 0)
        return str(caught.value)

    for text in run_ranks(2, program):
        assert text.startswith("rank 0 called broadcast float32 [2] root 0, rank 1 all_reduce")
        assert f" at {__file__}:" in text.partition("  rank 1: #3 for backward pass 1 of")[2]
