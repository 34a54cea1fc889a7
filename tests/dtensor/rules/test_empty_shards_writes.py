"""What an operator has saved for its gradient is written to, where a rank has no elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.tables import each
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

_SAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "layer_norm": lambda x: functional.layer_norm(x, (3,)),
    "rms_norm": lambda x: functional.rms_norm(x, (3,)),
    "group_norm": lambda x: functional.group_norm(x[:, :, None], 3),
    "conv1d": lambda x: functional.conv1d(x[:, :, None], x[:3, :, None].detach().requires_grad_()),
    "cumprod": lambda x: x.cumprod(1),
    "std": lambda x: x.std(1),
    "mul": lambda x: x * x,
}


@each("name", _SAVING)
def test_all_ranks_refuse_the_backward_pass(name: str) -> None:
    def program(rank: int) -> None:
        whole = torch.arange(12.0).view(4, 3)
        leaf = distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)]).requires_grad_()
        x = leaf * 1
        result = _SAVING[name](x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.pow(2).sum().backward()  # type: ignore[no-untyped-call]

    run_ranks(3, program)
