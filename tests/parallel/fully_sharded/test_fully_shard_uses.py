"""Uses of weights of a sharded module by other modules and from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import assert_close
from tilework.parallel import fully_shard
from tilework.testing import run_ranks


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("inner", ["layers", "linears"])
def test_encoders_take_the_path_of_plain_modules(inner: str) -> None:
    def program(is_sharded: bool) -> Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        model: Any = nn.TransformerEncoder(layer, 2)
        if is_sharded:
            for each in model.layers:
                fully_shard(each if inner == "layers" else each.linear1)
            fully_shard(model)
        padding = torch.tensor([[False] * 3, [False, True, True]])
        model.eval()
        with torch.no_grad():
            result: Tensor = model(torch.ones(2, 3, 8), src_key_padding_mask=padding)
            return result

    expected = program(False)
    assert not expected[1, 2].any()  # only the fast path pads with zeros
    for result in run_ranks(2, lambda rank: program(True)):
        assert_close(result, expected)
