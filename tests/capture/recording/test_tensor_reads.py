"""What torch's dispatcher does not show of tensors, while a step is recorded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilework.capture import capture


def test_a_step_may_make_modules() -> None:
    def step(x: Tensor) -> Tensor:
        with torch.device("cpu"):
            layer = nn.Linear(3, 2)
        nn.init.uniform_(layer.weight)
        result: Tensor = layer(x)
        return result.detach()

    program = capture(step, check="always")
    for seed in range(4):
        torch.manual_seed(seed)
        expected = step(torch.ones(3))
        torch.manual_seed(seed)
        assert torch.equal(program(torch.ones(3)), expected)
