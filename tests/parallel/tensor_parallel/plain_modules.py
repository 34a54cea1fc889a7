"""Parallel modules against plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.dtensor.sharded_values import full
from tests.rounding import assert_close
from tilework.dtensor import DTensor, init_device_mesh
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

torch.manual_seed(5)
WIDTH, HEADS, BYTES = 6, 3, 7


def check_gradients(module: nn.Module, plain: nn.Module) -> None:
    for (name, found), wanted in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, name
        assert wanted.grad is not None, name
        grad = full(found.grad) if isinstance(found.grad, DTensor) else found.grad
        told = f"{name}: {{}}".format
        assert_close(grad, wanted.grad, msg=told)


def square(output: Any) -> Any:
    return output.square().sum()


def alone(program: Callable[[DeviceMesh], Any]) -> Any:
    """On a mesh of one rank."""
    return run_ranks(1, lambda rank: program(init_device_mesh("cpu", (1,))))[0]
