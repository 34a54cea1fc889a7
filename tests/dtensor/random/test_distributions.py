"""torch.distributions of DTensors: samples are the same on every rank, mesh and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributions as td
from torch import Tensor
from torch.distributions import Distribution

from tilework.dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

_numbers = torch.Generator().manual_seed(0)
P = torch.rand(4, 3, generator=_numbers) * 0.5 + 0.3
L = torch.randn(4, 3, generator=_numbers)
S = torch.rand(4, 3, generator=_numbers) + 0.5
ROWS = torch.rand(4, generator=_numbers) * 0.5 + 0.4
COVARIANCE = torch.stack([torch.eye(3) * (i + 1) + 0.1 for i in range(4)])

Place = Callable[[Tensor], Tensor]


class OwnDraws(Distribution):
    """A program's own distribution, which draws plain numbers."""

    has_rsample = True
    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        shape = self._extended_shape(sample_shape)
        return self.loc + torch.randn_like(torch.empty(shape)) * torch.randint(1, 5, shape)


MAKERS: dict[str, Callable[[Place], Distribution]] = {
    "Bernoulli": lambda d: td.Bernoulli(d(P)),
    "Bernoulli of logits": lambda d: td.Bernoulli(logits=d(L)),
    "Beta": lambda d: td.Beta(d(P), d(S)),
    "Binomial": lambda d: td.Binomial(5, d(P)),
    "Categorical": lambda d: td.Categorical(d(P)),
    "Cauchy": lambda d: td.Cauchy(d(L), d(P)),
    "Chi2": lambda d: td.Chi2(d(P)),
    "ContinuousBernoulli": lambda d: td.ContinuousBernoulli(d(P)),
    "Dirichlet": lambda d: td.Dirichlet(d(P)),
    "Exponential": lambda d: td.Exponential(d(P)),
    "FisherSnedecor": lambda d: td.FisherSnedecor(d(P), d(S)),
    "Gamma": lambda d: td.Gamma(d(P), d(S)),
    "Geometric": lambda d: td.Geometric(d(P)),
    "Gumbel": lambda d: td.Gumbel(d(L), d(P)),
    "HalfCauchy": lambda d: td.HalfCauchy(d(P)),
    "HalfNormal": lambda d: td.HalfNormal(d(P)),
    "Independent": lambda d: td.Independent(td.Normal(d(L), d(P)), 1),
    "InverseGamma": lambda d: td.InverseGamma(d(P), d(S)),
    "Kumaraswamy": lambda d: td.Kumaraswamy(d(P), d(S)),
    "LKJCholesky": lambda d: td.LKJCholesky(3, d(ROWS)),
    "Laplace": lambda d: td.Laplace(d(L), d(P)),
    "LogNormal": lambda d: td.LogNormal(d(L), d(P)),
    "LogisticNormal": lambda d: td.LogisticNormal(d(L), d(P)),
    "LowRankMultivariateNormal": lambda d: td.LowRankMultivariateNormal(
        d(L), d(P[:, :, None].clone()), d(S)
    ),
    "MultivariateNormal": lambda d: td.MultivariateNormal(d(L), d(COVARIANCE)),
    "MixtureSameFamily": lambda d: td.MixtureSameFamily(
        td.Categorical(d(P)), td.Normal(d(L), d(S))
    ),
    "Multinomial": lambda d: td.Multinomial(5, d(P)),
    "NegativeBinomial": lambda d: td.NegativeBinomial(d(S), d(P)),
    "Normal": lambda d: td.Normal(d(L), d(P)),
    "OneHotCategorical": lambda d: td.OneHotCategorical(d(P)),
    "OneHotCategoricalStraightThrough": lambda d: td.OneHotCategoricalStraightThrough(d(P)),
    "Pareto": lambda d: td.Pareto(d(P), d(S)),
    "Poisson": lambda d: td.Poisson(d(P)),
    "RelaxedBernoulli": lambda d: td.RelaxedBernoulli(torch.tensor(0.7), d(P)),
    "RelaxedOneHotCategorical": lambda d: td.RelaxedOneHotCategorical(torch.tensor(0.7), d(P)),
    "StudentT": lambda d: td.StudentT(d(S + 1), d(L), d(P)),
    "TransformedDistribution": lambda d: td.TransformedDistribution(
        td.Normal(L, P), [td.AffineTransform(d(L), d(P))]
    ),
    "Uniform": lambda d: td.Uniform(d(P), d(P + S)),
    "VonMises": lambda d: td.VonMises(d(L), d(P)),
    "Weibull": lambda d: td.Weibull(d(P), d(S)),
    "Wishart": lambda d: td.Wishart(d(ROWS + 4), d(COVARIANCE)),
    "a program's own": lambda d: OwnDraws(d(L)),
}


def samples(make: Callable[[Place], Distribution], n: int, placement: Placement) -> list[Any]:
    """The global samples on each of ``n`` ranks, which have generators in different states."""

    def program(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (n,))
        torch.manual_seed(7 + rank)
        one = make(lambda x: distribute_tensor(x, mesh, [placement]))
        drawn = [one.sample(), one.sample(torch.Size((2,)))]
        if one.has_rsample:
            drawn.append(one.rsample())
        assert all(isinstance(each, DTensor) for each in drawn)
        # Of a replicated one nothing is communicated: each rank's part is the whole.
        return [each.full_tensor() for each in drawn]  # type: ignore[attr-defined]

    return run_ranks(n, program)


@pytest.mark.filterwarnings("ignore:Singular sample")  # torch's, of Wishart
@pytest.mark.parametrize("name", MAKERS)
def test_samples_are_the_same_on_every_rank_and_in_every_layout(name: str) -> None:
    make = MAKERS[name]
    ((first, several, *rest),) = samples(make, 1, Replicate())
    torch.manual_seed(0)
    plain = make(lambda x: x)
    assert first.shape == plain.sample().shape
    assert several.shape == plain.sample(torch.Size((2,))).shape
    found = [*samples(make, 2, Replicate()), *samples(make, 2, Shard(0))]
    for each in found:
        for ours, expected in zip(each, (first, several, *rest), strict=True):
            torch.testing.assert_close(ours, expected)
    assert all(map(torch.equal, found[0], found[1]))


def test_samples_of_plain_parameters_are_torchs() -> None:
    def program(rank: int) -> Tensor:
        torch.manual_seed(3)
        return td.Normal(L, P).rsample()

    torch.manual_seed(3)
    (found,) = run_ranks(1, program)
    assert torch.equal(found, td.Normal(L, P).rsample())


def test_gradients_pass_through_samples() -> None:
    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(rank)
        scale = distribute_tensor(P, mesh, [Shard(0)]).requires_grad_()
        noise = td.Normal(distribute_tensor(L, mesh, [Shard(0)]), scale).rsample()
        noise.sum().backward()  # type: ignore[no-untyped-call]
        assert isinstance(scale.grad, DTensor)
        assert isinstance(noise, DTensor)
        return scale.grad.full_tensor() * P + L - noise.full_tensor()

    for rest in run_ranks(2, program):
        torch.testing.assert_close(rest, torch.zeros(4, 3))
