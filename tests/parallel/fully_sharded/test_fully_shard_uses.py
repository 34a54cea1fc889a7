"""Uses of weights of a sharded module by other modules and from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import assert_close
from tilework.errors import CollectiveMismatchError, PeerLostError
from tilework.parallel import MixedPrecisionPolicy, fully_shard
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


class Filling(nn.Linear):
    """A layer that puts values into a dict for later layers, as shared keys of attention."""

    def forward(self, x: Tensor, shared: dict[str, Tensor] | None = None) -> Tensor:
        assert shared is not None
        return x + shared.setdefault("first", super().forward(x))


def test_layers_share_a_dict_in_which_nothing_is_cast() -> None:
    def program(rank: int) -> list[str]:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        shared: dict[str, Tensor] = {}
        torch.manual_seed(0)
        for layer in (Filling(4, 4), Filling(4, 4)):
            fully_shard(layer, mp_policy=policy)(torch.ones(2, 4), shared=shared)
        return list(shared)

    assert run_ranks(2, program) == [["first"]] * 2


def test_a_module_within_that_is_called_itself_is_named() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        model[1](model[0](torch.full((2, 4), 1.0 + rank))).sum().item()

    with pytest.raises(CollectiveMismatchError, match=r"of Sequential.*register_fsdp_forward"):
        run_ranks(2, program)


def test_unequal_batches_get_advice() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 1))
        for _ in range(1 + rank):
            model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(PeerLostError, match=r"(?s)gather 2 of Linear .* equally many batches"):
        run_ranks(2, program)


def test_numbers_of_ranks_to_shard_over_after_forward() -> None:
    def program(rank: int) -> tuple[bool, ...]:
        with pytest.raises(NotImplementedError, match=r"mesh of two axes, \(2, 2\)"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=2)
        with pytest.raises(ValueError, match="has to divide the 4 ranks"):
            fully_shard(nn.Linear(2, 2), reshard_after_forward=3)
        torch.manual_seed(0)
        models = [fully_shard(nn.Linear(4, 4), reshard_after_forward=n) for n in (1, 4)]
        with pytest.raises(ValueError, match="got 2"):
            models[0].set_reshard_after_forward(2)
        for model in models:
            model(torch.ones(1, 4))
        return tuple(model._fsdp_state.phase == "gathered" for model in models)

    assert run_ranks(4, program) == [(True, False)] * 4


def test_extensions_are_refused_where_the_shard_has_them() -> None:
    def program(rank: int) -> None:
        model = nn.Linear(2, 2)
        vars(model.weight)["fsdp_pre_all_gather"] = print
        with pytest.raises(NotImplementedError, match="does not call them"):
            fully_shard(model)

    run_ranks(1, program)
