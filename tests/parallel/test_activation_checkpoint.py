"""Activations computed again: the same gradients, names and classes, in place."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from tilework.mesh import init_device_mesh
from tilework.parallel import (
    CheckpointImpl,
    CheckpointWrapper,
    DistributedDataParallel,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    fully_shard,
)
from tilework.testing import run_ranks


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(self.linear(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), nn.Linear(4, 4), Block())


def gradients(module: nn.Module) -> list[Tensor]:
    module(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def calls(module: nn.Module) -> list[int]:
    return [each.calls for each in module.modules() if isinstance(each, Block)]


@pytest.mark.parametrize("kind", list(CheckpointImpl))
def test_names_classes_and_gradients_are_as_before(kind: CheckpointImpl) -> None:
    plain, wrapped = model(), model()
    apply_activation_checkpointing(
        wrapped, {Block}, checkpoint_wrapper_fn=lambda each: checkpoint_wrapper(each, kind)
    )
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert [isinstance(each, CheckpointWrapper) for each in wrapped] == [True, False, True]
    torch.testing.assert_close(gradients(wrapped), gradients(plain))
    assert calls(plain) == [1, 1]
    assert calls(wrapped) == [2, 2]


def test_modules_are_chosen_by_name_and_by_a_function() -> None:
    by_name, by_function = model(), model()
    apply_activation_checkpointing(by_name, "?")
    apply_activation_checkpointing(by_function, check_fn=lambda each: isinstance(each, Block))
    assert all(isinstance(each, CheckpointWrapper) for each in by_name)
    assert not isinstance(by_function[1], CheckpointWrapper)
    with pytest.raises(ValueError, match="no module of Sequential is chosen"):
        apply_activation_checkpointing(by_name, {nn.Conv2d})


def test_a_module_is_copied_and_pickled_as_what_it_is() -> None:
    block = checkpoint_wrapper(Block())
    assert checkpoint_wrapper(block) is block
    for made in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert isinstance(made, CheckpointWrapper)
        assert isinstance(made, Block)
        torch.testing.assert_close(gradients(made), gradients(block))
        block.zero_grad()


def test_a_copy_of_a_compiled_module_computes_with_the_weights_of_the_copy() -> None:
    layer = checkpoint_wrapper(nn.Linear(2, 2))
    layer.compile(backend="eager")
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, 2)).any()


def test_another_function_may_do_it() -> None:
    seen: list[object] = []

    def run(forward: object, x: Tensor, note: str) -> object:
        seen.append(note)
        return forward(x)  # type: ignore[operator]

    checkpoint_wrapper(Block(), checkpoint_fn=run, note="here")(torch.ones(1, 4))
    assert seen == ["here"]


@pytest.mark.parametrize("first", ["checkpoint", "shard"])
def test_sharded_modules_compute_again(first: str) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain, sharded = model(), model()
        if first == "checkpoint":
            apply_activation_checkpointing(sharded, {Block})
        for block in sharded:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        if first == "shard":
            apply_activation_checkpointing(sharded, {Block})
        expected = gradients(plain)
        sharded(torch.ones(2, 4)).sum().backward()
        for parameter, grad in zip(sharded.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), grad)  # type: ignore[union-attr]
        assert calls(sharded) == [2, 2]

    run_ranks(2, program)


@pytest.mark.parametrize("first", ["checkpoint", "shard"])
def test_sharded_layers_compute_again_themselves(first: str) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        sharded = copy.deepcopy(plain)
        if first == "checkpoint":
            apply_activation_checkpointing(sharded, {nn.Linear})
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        if first == "shard":
            apply_activation_checkpointing(sharded, {nn.Linear})
        expected = gradients(plain)
        sharded(torch.ones(2, 4)).sum().backward()
        for parameter, grad in zip(sharded.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), grad)  # type: ignore[union-attr]

    run_ranks(2, program)


def test_replicas_compute_again() -> None:
    def program(rank: int) -> None:
        wrapped = model()
        apply_activation_checkpointing(wrapped, {Block})
        replica = DistributedDataParallel(wrapped)
        torch.testing.assert_close(gradients(replica), gradients(model()))

    run_ranks(2, program)


def test_compiled_modules_compute_again() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    wrapped = copy.deepcopy(plain)
    apply_activation_checkpointing(wrapped, {nn.Linear})
    compiled = torch.compile(wrapped, backend="aot_eager")
    compiled(torch.ones(2, 4)).sum().backward()
    for parameter, grad in zip(wrapped.parameters(), gradients(plain), strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_a_lazy_module_is_refused_until_its_first_call() -> None:
    layer = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="the first call of LazyLinear changes it again"):
        checkpoint_wrapper(layer)
    layer(torch.ones(1, 3))
    assert isinstance(checkpoint_wrapper(layer), CheckpointWrapper)
