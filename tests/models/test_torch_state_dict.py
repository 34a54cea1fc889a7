"""When torch's functions of state dicts are redirected, and what they refuse.

Their results are tested with those of tilework's own, in tests/checkpoint/test_state_dict.py.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import nn

from tilework.parallel import fully_shard
from tilework.testing import run_ranks

torchs: Any = torch_state_dict


def test_a_module_that_is_loaded_after_tilework_is_redirected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, torchs.__name__)
    later: Any = importlib.import_module(torchs.__name__)
    assert later is not torchs
    options = later.StateDictOptions(full_state_dict=True)

    def program(rank: int) -> Any:
        model = fully_shard(nn.Linear(2, 2))
        state = later.get_model_state_dict(model, options=options)
        return {name: type(tensor) for name, tensor in state.items()}

    whole = {"weight": later.torch.Tensor, "bias": later.torch.Tensor}
    assert run_ranks(2, program) == [whole, whole]
    monkeypatch.setattr(torchs.torch.distributed.checkpoint, "state_dict", torchs)


def test_plain_models_are_torchs() -> None:
    model = nn.Linear(2, 2)
    state = torchs.get_model_state_dict(model)
    assert state["weight"].data_ptr() == model.weight.data_ptr()
    assert torchs.set_model_state_dict(model, state) == ([], [])


def test_parts_of_a_model_are_taken_by_their_names() -> None:
    def program(rank: int) -> Any:
        model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        fully_shard(model)
        options = torchs.StateDictOptions(full_state_dict=True, keep_submodule_prefixes=False)
        with pytest.warns(FutureWarning, match="submodules"):
            state = torchs.get_model_state_dict(model, submodules={model[1]}, options=options)
        return list(state)

    assert run_ranks(2, program) == [["weight"]] * 2


def test_models_with_a_state_dict_in_place_of_their_class_are_refused() -> None:
    def program(rank: int) -> None:
        model = fully_shard(nn.Linear(2, 2))
        torchs._patch_model_state_dict(model)
        with pytest.raises(TypeError, match="call get_model_state_dict and"):
            model.state_dict()

    run_ranks(2, program)
