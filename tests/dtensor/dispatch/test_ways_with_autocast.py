"""``torch.autocast`` takes operators that are composed for shards as it takes torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rounding import assert_close
from tests.tables import pairs
from tilework.dtensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

TARGET = torch.tensor([0, 3, 1, 1])
CALLS: dict[str, Callable[[Any], Any]] = {
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET),
    "cross_entropy, of probabilities": lambda x: F.cross_entropy(x, x.softmax(1)),
    "cross_entropy, none": lambda x: F.cross_entropy(x, TARGET, reduction="none"),
    "nll_loss": lambda x: F.nll_loss(x.log_softmax(1), TARGET),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "trace": lambda x: x.trace(),
    "prod": lambda x: x.prod(1),
    "quantile": lambda x: x.quantile(0.3, 0),
    "replicate": lambda x: F.pad(x[None], (2, 1), "replicate"),
    "reflect": lambda x: F.pad(x[None], (2, 1), "reflect"),
    "constant": lambda x: F.pad(x[None], (2, 1)),
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cat": lambda x: torch.cat([x, x.float()]),
}
IN_LOWER_PRECISION = ("matmul", "linear", "einsum", "attention")


@pairs(
    placement=[Replicate(), Shard(0), Shard(1)], dtype=[torch.float32, torch.bfloat16], name=CALLS
)
def test_dtypes_and_values_are_those_of_plain_tensors(
    name: str, dtype: torch.dtype, placement: Placement
) -> None:
    drawn = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)

    def result(x: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = CALLS[name](x)
        y.abs().float().sum().backward()
        return y.detach(), x.grad

    expected = result(drawn.clone().requires_grad_())

    def program(rank: int) -> None:
        x = distribute_tensor(drawn, init_device_mesh("cpu", (2,)), [placement]).requires_grad_()
        for found, wanted in zip(result(x), expected, strict=True):
            assert found.dtype == wanted.dtype
            assert isinstance(found, DTensor)
            coarse = dtype is torch.bfloat16 or name in IN_LOWER_PRECISION
            assert_close(
                found.full_tensor(), wanted, rtol=2e-2 * coarse + 1e-5, atol=2e-2 * coarse + 1e-6
            )

    run_ranks(2, program)
