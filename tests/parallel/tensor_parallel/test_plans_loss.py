"""loss_parallel: the loss of sharded logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.dtensor.sharded_values import collectives, cut, same
from tilework.dtensor import Shard, init_device_mesh
from tilework.parallel import loss_parallel
from tilework.testing import run_ranks


def test_loss_parallel_gathers_no_logits() -> None:
    logits, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 4, 2, -100, 1, 3])
    wanted: Any = F.cross_entropy(logits, targets)
    wanted.backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(logits, mesh, [Shard(1)])
        with loss_parallel():
            loss: Any = F.cross_entropy(x, targets)
            loss.backward()
            same(loss, wanted)
            same(x.grad, logits.grad)
            with collectives() as used:
                F.cross_entropy(x, targets)
            assert set(used) == {"all_reduce"}
            with pytest.raises(NotImplementedError, match="unique has no rule"):
                torch.unique(x.detach())

    run_ranks(2, program)
