"""Gradients, flags, and torch's own machinery on sharded tensors: modules, optimizers, init."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import init

from tests.sharded.ops.op_checks import CUTS, RANKS, SIZE, close, shards_of, values
from tests.sharded.ranks_and_specs import check_all_raise, chunks, on
from tests.tables import each
from tilework.sharded import ShardedTensor, full, ones, zeros

SPEC = CUTS["all on rank 1"]


def test_read_only_as_torch_has_it() -> None:
    def program(rank: int) -> None:
        ones(SPEC, *SIZE).requires_grad = True

    check_all_raise(RANKS, program, RuntimeError, "torch function '__set__'")


def test_flags_are_the_same_on_every_rank() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        leaf: Any = ones(SPEC, *SIZE, requires_grad=True)
        result = leaf * 2
        with torch.no_grad():
            outside = leaf * 2
        flags = (leaf.is_leaf, result.is_leaf, result.requires_grad, outside.requires_grad)
        graph = leaf.grad_fn is None, type(result.grad_fn).__name__, leaf.grad is None
        kind = leaf.dtype, leaf.device.type, leaf.layout, leaf.ndim, leaf.nbytes, leaf.is_meta
        return flags, graph, kind, len(leaf), leaf.numel(), leaf.element_size()

    first, *others = on(RANKS, program)
    assert others == [first] * 2
    assert first[:2] == ((True, False, True, False), (True, "MulBackward0", True))


def test_the_shards_get_the_gradient() -> None:
    def program(rank: int) -> None:
        tensor: Any = ones(CUTS["rows"], *SIZE, requires_grad=True)
        (tensor * 3).sum().backward()
        for tile in tensor.local_tiles():
            assert tile.grad is not None
            assert tile.grad.eq(3).all()
        assert tensor.grad.sharding_spec() == tensor.sharding_spec()
        tensor.grad.zero_()
        assert not any(tile.grad.any() for tile in tensor.local_tiles())
        tensor.grad = ones(CUTS["rows"], *SIZE)
        assert all(tile.grad.all() for tile in tensor.local_tiles())
        tensor.grad = None
        assert all(tile.grad is None for tile in tensor.local_tiles())

    on(RANKS, program)


def test_backward_of_a_tensor_with_its_gradient() -> None:
    def program(rank: int) -> None:
        for name in ("grid", "all on rank 1"):
            leaf: Any = shards_of(values(*SIZE).requires_grad_(), CUTS[name], rank)
            (leaf * leaf).backward(torch.ones_like(leaf))
            close(leaf.grad.full_tensor(), 2 * values(*SIZE))
            torch.autograd.backward([leaf * 3], [torch.ones_like(leaf)])
            close(leaf.grad.full_tensor(), 2 * values(*SIZE) + 3)
            (found,) = torch.autograd.grad((leaf * leaf).sum(), [leaf])
            assert isinstance(found, ShardedTensor)
            close(found.full_tensor(), 2 * values(*SIZE))
            with pytest.raises(RuntimeError, match="only for scalar outputs"):
                leaf.backward()

    on(RANKS, program)


def test_second_derivatives() -> None:
    def program(rank: int) -> None:
        leaf: Any = shards_of(values(*SIZE).requires_grad_(), CUTS["rows"], rank)
        ones_alike = [torch.ones_like(leaf)]
        (first,) = torch.autograd.grad([leaf**3], [leaf], ones_alike, create_graph=True)
        assert isinstance(first, ShardedTensor)
        torch.autograd.backward(first.sum())
        close(leaf.grad.full_tensor(), 6 * values(*SIZE))

    on(RANKS, program)


@each(
    "compute",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: float(x),
        lambda x: x.numpy(),
        lambda x: 1.0 in x,
        lambda x: x.storage(),
        lambda x: x.data_ptr(),
        lambda x: x.untyped_storage(),
        lambda x: x.register_hook(print),
        lambda x: x.resize_(3),
        lambda x: x.new_zeros(3),
        lambda x: x.__setattr__("data", torch.ones(4)),
        lambda x: x.__setattr__("grad", torch.ones(4)),
    ],
)
def test_what_no_rank_can_answer_alone_raises(compute: Callable[[Any], Any]) -> None:
    for size in ((4,), (1,)):
        check_all_raise(
            2,
            lambda rank, size=size: compute(ones(chunks(0, [0]), *size)),  # type: ignore[misc]
            RuntimeError,
            "not supported for ShardedTensor!$",
        )


def test_truth_of_many_values_is_ambiguous() -> None:
    check_all_raise(2, lambda rank: bool(ones(SPEC, 4)), RuntimeError, "ambiguous")


def _linear_model(rank: int) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(shards_of(values(*SIZE), SPEC, rank))
    model.register_buffer("mean", shards_of(values(*SIZE), CUTS["rows"], rank))
    return model


def test_modules() -> None:
    def program(rank: int) -> None:
        model: Any = _linear_model(rank)
        weight: Any = model.weight
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
        (weight * weight).sum().backward()
        tiles = weight.local_tiles()
        for change, dtype in ((model.half, torch.float16), (model.double, torch.float64)):
            change()
            assert next(model.parameters()) is weight
            assert weight.requires_grad
            assert all(x is y for x, y in zip(tiles, weight.local_tiles(), strict=True))
            assert {weight.dtype, weight.grad.dtype, model.mean.dtype} == {dtype}
            assert weight.metadata().tensor_properties.dtype == dtype
            assert all(tile.dtype == dtype for tile in tiles)
        model.zero_grad()
        assert weight.grad is None
        assert type(copy.deepcopy(model).weight) is type(weight)
        assert isinstance(copy.deepcopy(model).weight, nn.Parameter)
        assert set(model.state_dict()) == {"weight", "mean"}
        other: Any = _linear_model(rank)
        other.weight.data.zero_()
        other.load_state_dict(model.state_dict())
        assert torch.equal(other.weight, model.weight)
        model.requires_grad_(False)
        assert not model.weight.requires_grad
        model.to_empty(device="meta")
        assert model.weight.is_meta
        assert model.weight.metadata().shards_metadata[0].placement.device().type == "meta"

    on(RANKS, program)


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "SGD, foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam, foreach": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=True),
    "Adagrad, foreach": lambda p: torch.optim.Adagrad(p, 0.1, foreach=True),
    "RMSprop, foreach": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, foreach=True),
}


@each("make", _OPTIMIZERS.values())
def test_torchs_optimizers_train_as_unsharded(
    make: Callable[[Any], torch.optim.Optimizer],
) -> None:
    def train(parameter: Any) -> Any:
        optimizer = make([parameter])
        for _ in range(4):
            optimizer.zero_grad()
            (parameter.tanh() * parameter).mean().backward()
            nn.utils.clip_grad_norm_([parameter], 0.05)
            optimizer.step()
        return parameter

    expected = train(nn.Parameter(values(*SIZE))).detach()

    def program(rank: int) -> None:
        for spec in CUTS.values():
            found = train(nn.Parameter(shards_of(values(*SIZE), spec, rank)))
            close(found.full_tensor(), expected)

    on(RANKS, program)


def test_averaged_models() -> None:
    def program(rank: int) -> None:
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.75)  # type: ignore[no-untyped-call]
        mean: Any = nn.Parameter(shards_of(values(*SIZE), CUTS["grid"], rank))
        other: Any = nn.Parameter(shards_of(values(*SIZE, seed=1), CUTS["grid"], rank))
        average([mean], [other], torch.tensor(1))
        close(mean.full_tensor(), 0.75 * values(*SIZE) + 0.25 * values(*SIZE, seed=1))

    on(RANKS, program)


def test_clipping_values() -> None:
    def program(rank: int) -> None:
        leaf: Any = nn.Parameter(shards_of(values(*SIZE), CUTS["grid"], rank))
        (leaf * leaf).sum().backward()
        nn.utils.clip_grad_value_([leaf], 0.5)
        assert leaf.grad.abs().max() == 0.5

    on(RANKS, program)


def test_init_of_all_tiles() -> None:
    def program(rank: int) -> None:
        tensor = zeros(chunks(0, [0, 1]), 40, 30, requires_grad=True)
        filled: dict[Callable[..., Any], tuple[float, float]] = {
            init.uniform_: (0, 1),
            init.kaiming_uniform_: (-((6 / 30) ** 0.5), (6 / 30) ** 0.5),
            init.xavier_uniform_: (-((6 / 70) ** 0.5), (6 / 70) ** 0.5),
            init.trunc_normal_: (-2, 2),
            init.normal_: (-9, 9),
            init.kaiming_normal_: (-9, 9),
        }
        for fill, (low, high) in filled.items():
            assert fill(tensor) is tensor
            assert low <= tensor.min() <= tensor.max() <= high
            assert tensor.std() > 0.1
        init.constant_(tensor, 3)
        assert torch.equal(tensor, full(chunks(0, [0, 1]), (40, 30), 3.0))
        init.ones_(tensor)
        assert torch.equal(tensor, ones(chunks(0, [0, 1]), 40, 30))
        assert tensor.is_leaf

    on(2, program)


def test_checkpointing_recomputes() -> None:
    def program(rank: int) -> None:
        from torch.utils.checkpoint import checkpoint

        leaf: Any = shards_of(values(*SIZE).requires_grad_(), CUTS["grid"], rank)
        checkpoint(lambda x: (x * x).sum(), leaf, use_reentrant=False).backward()
        close(leaf.grad.full_tensor(), 2 * values(*SIZE))

    on(RANKS, program)


def test_what_would_go_around_the_interception_raises() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch._C.DisableTorchFunctionSubclass():
                return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    def program(rank: int) -> None:
        Double.apply(ones(SPEC, *SIZE, requires_grad=True))  # type: ignore[no-untyped-call]

    check_all_raise(2, program, RuntimeError, "inside torch's C\\+\\+")
