"""Conversion to SyncBatchNorm keeps what a layer has and does besides."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from tilework.parallel import SyncBatchNorm
from tilework.testing import run_ranks

convert: Any = SyncBatchNorm.convert_sync_batchnorm
revert: Any = SyncBatchNorm.revert_sync_batchnorm


class NormAndActivation(nn.BatchNorm2d):
    """An activation after the normalisation, and an attribute."""

    slope = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(super().forward(x), self.slope)


class OwnNorm(nn.BatchNorm1d):
    """Normalises by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _on_two_ranks(make: Any, shape: tuple[int, ...]) -> None:
    """The converted layer on halves of the rows gives what the plain one gives on all of them."""
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1))

    def program(rank: int, ranks: int) -> Tensor:
        layer = make() if ranks == 1 else convert(make())
        out: Tensor = layer(x.chunk(ranks)[rank])
        return out.detach()

    halves = run_ranks(2, program, 2)
    torch.testing.assert_close(torch.cat(halves), program(0, 1))


def _parametrized() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def _hooked() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    return layer


@pytest.mark.parametrize(
    "make",
    [lambda: NormAndActivation(3), _parametrized, _hooked, nn.LazyBatchNorm2d],
    ids=["subclass", "parametrized", "hooked", "lazy"],
)
def test_a_converted_layer_does_what_it_did_on_all_rows(make: Any) -> None:
    _on_two_ranks(make, (3, 2, 2))


@pytest.mark.parametrize(
    "make",
    [lambda: NormAndActivation(3), _parametrized, _hooked, nn.LazyBatchNorm2d],
    ids=["subclass", "parametrized", "hooked", "lazy"],
)
def test_conversion_there_and_back_is_the_same_layer(make: Any) -> None:
    layer = make()
    kind = type(layer).__mro__[0:3]
    assert convert(layer) is layer
    assert isinstance(layer, SyncBatchNorm)
    assert revert(layer) is layer
    assert not isinstance(layer, SyncBatchNorm)
    assert "process_group" not in vars(layer)
    if kind[0] in (NormAndActivation, nn.LazyBatchNorm2d):
        assert type(layer) is kind[0]


def test_parametrizations_can_be_removed_afterwards() -> None:
    layer = convert(_parametrized())
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is SyncBatchNorm
    assert layer.weight.tolist() == [2.0, 2.0, 2.0]


def test_a_forward_of_its_own_is_refused_before_anything_changes() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), OwnNorm(2))
    with pytest.raises(TypeError, match=r"1 is a OwnNorm, whose forward does not call super"):
        convert(net)
    assert type(net[0]) is nn.BatchNorm1d


def test_converted_subclasses_can_be_copied_and_pickled() -> None:
    layer = convert(NormAndActivation(3))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert other.weight.equal(layer.weight)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(4, 3, 5, 2).permute(0, 1, 3, 2),
        torch.randn(4, 5, 3).transpose(1, 2),
        torch.randn(4, 3, 2, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
    ],
    ids=["permuted", "transposed", "channels last", "features first"],
)
def test_results_have_the_strides_of_torchs(x: Tensor) -> None:
    expected = F.batch_norm(x, None, None, training=True)

    def program(rank: int) -> tuple[int, ...]:
        return tuple(SyncBatchNorm(3)(x).stride())

    assert run_ranks(2, program)[0] == expected.stride()
