"""Elementwise optimizers: the known ones, and the trial of others."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer

from tests.tables import each
from tilework.models.local_optimizer import ELEMENTWISE, check_elementwise, is_per_element

CPU = torch.device("cpu")


@each("known", sorted(ELEMENTWISE, key=repr))
def test_known_optimizers_pass_the_trial(known: type[Optimizer]) -> None:
    subclass = type(known.__name__, (known,), {})  # which is not known itself
    check_elementwise(subclass, (), {"lr": 0.1}, CPU)


def test_an_optimizer_of_full_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="LBFGS does not treat each element on its own"):
        check_elementwise(torch.optim.LBFGS, (), {}, CPU)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer, got 3"):
        check_elementwise(3, (), {}, CPU)


def test_states_with_an_element_for_each_of_the_parameters() -> None:
    local, number = torch.ones(2, 3), torch.tensor(1.0)
    assert is_per_element("exp_avg", torch.zeros(2, 3), local)
    assert not is_per_element("exp_avg", torch.zeros(3), local)
    assert not is_per_element("lr", 0.1, number)
    assert is_per_element("exp_avg", torch.zeros(()), number)
    assert not is_per_element("step", torch.zeros(()), number)
