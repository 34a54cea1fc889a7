"""What torch computes of some dtypes only is refused for others, wherever it is composed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.tables import each
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

WHOLE = torch.arange(12).reshape(3, 4)
FLAGS = WHOLE > 4
SINGLE, DOUBLE = torch.ones(3, 4), torch.ones(4, dtype=torch.float64)
REFUSED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "softmax": (lambda x: x.softmax(0) + x.softmax(1), WHOLE),
    "log_softmax": (lambda x: x.log_softmax(0) + x.log_softmax(1), WHOLE),
    "argmax": (lambda x: x.argmax(), FLAGS),
    "argmin": (lambda x: x.argmin(), FLAGS),
    "trace": (lambda x: x.trace(), FLAGS),
    "nanmean": (lambda x: x.nanmean(), WHOLE),
    "matrix_norm": (lambda x: torch.linalg.norm(x, 1), WHOLE),
    "cross_entropy": (lambda x: F.cross_entropy(x.float(), x), WHOLE),
    "layer_norm": (lambda x: F.layer_norm(x, (4,), DOUBLE), SINGLE),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), WHOLE),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, DOUBLE, training=True), SINGLE),
    "cumsum": (lambda x: x.clone().cumsum_(0) + x.clone().cumsum_(1), FLAGS),
    "masked.cumsum": (lambda x: torch.masked.cumsum(x, 0) + torch.masked.cumsum(x, 1), FLAGS),
    "index_reduce": (
        lambda x: x.index_reduce(0, torch.tensor([0]), x[:1], "prod", include_self=False),
        FLAGS,
    ),
}


@pytest.mark.filterwarnings("ignore::tilework.dtensor.GatherWarning")
@each("dim", [0, 1])
@each("name", REFUSED)
def test_dtypes_that_torch_refuses_are_refused(name: str, dim: int) -> None:
    call, value = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError)):
        call(value)

    def program(rank: int) -> None:
        x = distribute_tensor(value, init_device_mesh("cpu", (2,)), [Shard(dim)])
        with pytest.raises((RuntimeError, TypeError)):
            call(x)

    run_ranks(2, program)
