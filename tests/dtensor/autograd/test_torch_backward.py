"""``torch.autograd.backward`` as older versions of torch have it, which ask no class."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.dtensor.autograd import torch_backward
from tilework.testing import run_ranks

_torchs = torch.autograd.backward


@functools.wraps(_torchs)
def of_old(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """It takes what is no tensor for a sequence, before it could ask a class."""
    tensors = tensors if isinstance(tensors, torch.Tensor) else tuple(tensors)
    _torchs(tensors, *args, **kwargs)


def test_this_torch_asks() -> None:
    assert torch_backward.asks_classes()  # by itself, or as it was replaced


def test_a_torch_that_does_not_ask_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", of_old)
    assert not torch_backward.asks_classes()


@pytest.mark.parametrize("as_tuple", [True, False])
def test_dtensors_and_plain_tensors(as_tuple: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch_backward.asking(of_old))

    def program(rank: int) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        weight = distribute_tensor(torch.ones(4), mesh, [Replicate()]).requires_grad_()
        plain = torch.ones(2, requires_grad=True)
        for loss in ((x * weight).sum(), (plain * 3).sum()):
            torch.autograd.backward((loss,) if as_tuple else loss)
        assert weight.grad is not None
        assert plain.grad is not None
        return weight.grad.full_tensor().tolist(), plain.grad.tolist()

    assert run_ranks(2, program) == [([0, 1, 2, 3], [3, 3])] * 2
