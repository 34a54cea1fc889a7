"""Gradients: where they come in terms, how they lie, and that no way of asking loses one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from tests.dtensor.op_checks import check_op
from tests.dtensor.sharded_values import collectives, cut, full, same, spread
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.errors import CollectiveMismatchError, RankFailedError
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: Any) -> Any:
        return self.outer(torch.tanh(self.inner(x))) + x


def plain_grads(module: nn.Module, x: Tensor, times: int = 1) -> list[Tensor]:
    made = copy.deepcopy(module)
    for _ in range(times):
        made(x).pow(2).sum().backward()
    return [param.grad for param in made.parameters() if param.grad is not None]


torch.manual_seed(7)
BLOCK = Block()
X = torch.randn(5, 6)

#: How the parameters lie on one axis: replicated, cut as Megatron does it, cut by rows.
CUTS: list[dict[str, list[Placement]]] = [
    {},
    {
        "inner.weight": [Shard(0)],
        "inner.bias": [Shard(0)],
        "outer.weight": [Shard(1)],
    },
    {name: [Shard(0)] for name, _ in BLOCK.named_parameters()},
]


@each("cuts", CUTS)
@each("rows", [Shard(0), Replicate()])
def test_gradients_lie_as_their_tensors(cuts: Any, rows: Placement) -> None:
    wanted = plain_grads(BLOCK, X, 2)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh, cuts)
        x = cut(X.clone(), mesh, [rows])
        for _ in range(2):  # the second pass adds to what the first has reduced
            module(x).pow(2).sum().backward()
        for param, want in zip(module.parameters(), wanted, strict=True):
            assert isinstance(param.grad, DTensor)
            assert param.grad.placements == param.placements
            same(param.grad, want)

    run_ranks(2, program)


def test_terms_of_all_parameters_are_reduced_together() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone(), mesh, [Shard(0)])
        loss = module(x).pow(2).sum()
        loss.backward()  # the first time the ranks agree on what they reduce
        with collectives() as entered:
            loss = module(x).pow(2).sum()
            loss.backward()
        assert entered == ["all_reduce"]

    run_ranks(2, program)


def test_one_reduction_for_all_uses_of_an_activation() -> None:
    weights = [torch.randn(4, 6) for _ in range(3)]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone(), mesh, [Replicate()])
        hidden = torch.tanh(x.requires_grad_())
        outs: list[Any] = [F.linear(hidden, cut(w, mesh, [Shard(0)])) for w in weights]
        total: Any = sum(out.to_local().sum() for out in outs)
        total.backward(retain_graph=True)  # the first time the ranks agree on what they reduce
        x.grad = None
        with collectives() as entered:
            total.backward()
        assert entered == ["all_reduce"]
        want = X.clone().requires_grad_()
        outs = [F.linear(torch.tanh(want), weight).sum() for weight in weights]
        torch.stack(outs).sum().backward()  # type: ignore[no-untyped-call]
        same(x.grad, want.grad)

    run_ranks(2, program)


@pytest.mark.parametrize("create_graph", [False, True])
def test_autograd_grad_gives_whole_gradients(create_graph: bool) -> None:
    wanted = plain_grads(BLOCK, X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone(), mesh, [Shard(0)])
        params = list(module.parameters())
        loss = module(x).pow(2).sum()
        found = torch.autograd.grad(loss, params, create_graph=create_graph)
        for param, grad, want in zip(params, found, wanted, strict=True):
            assert isinstance(grad, DTensor)
            assert grad.placements == param.placements
            same(grad, want)
            assert param.grad is None

    run_ranks(2, program)


def test_gradients_of_gradients() -> None:
    plain = copy.deepcopy(BLOCK).double()
    inputs = X.double()
    loss = plain(inputs).pow(2).sum()
    first = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
    torch.stack([grad.pow(2).sum() for grad in first]).sum().backward()  # type: ignore[no-untyped-call]
    wanted = [param.grad for param in plain.parameters()]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for cuts in CUTS:
            for rows in (Shard(0), Replicate()):
                module = spread(copy.deepcopy(BLOCK).double(), mesh, cuts)
                x = cut(inputs.clone(), mesh, [rows])
                loss = module(x).pow(2).sum()
                grads = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
                total: Any = sum(grad.pow(2).sum() for grad in grads)
                total.backward()
                for param, want in zip(module.parameters(), wanted, strict=True):
                    same(param.grad, want)

    run_ranks(2, program)


def test_plain_losses_reach_parameters() -> None:
    """backward() of a plain tensor that came out of DTensors."""
    wanted = plain_grads(BLOCK, X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone(), mesh, [Shard(0)])
        for end in ("full_tensor", "to_local", "autograd.backward"):
            module = spread(BLOCK, mesh)
            out = module(x).pow(2).sum()
            if end == "full_tensor":
                out.full_tensor().backward()
            elif end == "to_local":
                assert out.placements == (Partial(),)
                out.to_local().backward()
            else:
                torch.autograd.backward(out)
            for param, want in zip(module.parameters(), wanted, strict=True):
                same(param.grad, want)

    run_ranks(2, program)


def test_hooks_see_whole_gradients() -> None:
    wanted = plain_grads(BLOCK, X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone(), mesh, [Shard(0)])
        seen: dict[str, Tensor] = {}
        for name, param in module.named_parameters():
            param.register_hook(lambda grad, name=name: seen.__setitem__(f"h {name}", grad))
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: seen.__setitem__(f"p {name}", param.grad)
            )
        hidden = module(x)
        hidden.register_hook(lambda grad: 2 * grad)
        hidden.retain_grad()
        hidden.pow(2).sum().backward()
        for (name, param), want in zip(module.named_parameters(), wanted, strict=True):
            for kind in "hp":
                assert isinstance(seen[f"{kind} {name}"], DTensor)
                same(seen[f"{kind} {name}"], 2 * want)
            same(param.grad, 2 * want)
        assert hidden.grad.placements == (Shard(0),)
        same(hidden.grad, 4 * BLOCK(X))

    run_ranks(2, program)


class Doubled(torch.autograd.Function):
    """A user's own: doubles, and says that its gradient is tripled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return x * 2, x * weight

    @staticmethod
    def backward(ctx: Any, doubled: Tensor, scaled: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return doubled * 3 + scaled * weight, (scaled * x).sum(0)


def test_a_users_own_function_keeps_its_gradient() -> None:
    weight = torch.randn(6)

    def run(x: Any, weight: Any) -> Any:
        a, b = Doubled.apply(torch.sin(x), weight)  # type: ignore[no-untyped-call]
        return (a * a).sum() + b.sum() + x.sum()

    plain, plain_weight = X.clone().requires_grad_(), weight.clone().requires_grad_()
    run(plain, plain_weight).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone().requires_grad_(), mesh, [Shard(0)])
        w = cut(weight.clone().requires_grad_(), mesh, [Replicate()])
        run(x, w).backward()
        same(x.grad, plain.grad)
        same(w.grad, plain_weight.grad)

    run_ranks(2, program)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    wanted = plain_grads(BLOCK, X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone().requires_grad_(), mesh, [Shard(0)])
        out = checkpoint(module, x, use_reentrant=use_reentrant)
        loss = out.pow(2).sum()
        loss.backward()
        for param, want in zip(module.parameters(), wanted, strict=True):
            same(param.grad, want)

    run_ranks(2, program)


def test_checkpoints_within_checkpoints() -> None:
    """The inner one begins at what the outer one has saved, which C++ made a leaf."""
    wanted = plain_grads(BLOCK, X)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone().requires_grad_(), mesh, [Shard(0)])

        def inner(x: Any) -> Any:
            return checkpoint(module, x, use_reentrant=False)

        checkpoint(inner, x, use_reentrant=False).pow(2).sum().backward()
        for param, want in zip(module.parameters(), wanted, strict=True):
            same(param.grad, want)

    run_ranks(2, program)


def test_writing_in_place_after_a_use() -> None:
    """What was computed before the write has the gradient of before."""
    weight = torch.randn(4, 6)

    def run(x: Any, w: Any) -> Any:
        hidden = torch.tanh(x)
        before = F.linear(hidden, w)
        hidden.mul_(3)
        return before.sum() + F.linear(hidden, w).pow(2).sum()

    plain = X.clone().requires_grad_()
    # tanh and linear save what is overwritten: both libraries say so.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(plain, weight.requires_grad_()).backward()

    def run_safely(x: Any, w: Any) -> Any:
        hidden = x + 1
        before = F.linear(hidden, w)
        hidden.mul_(3)
        return before.sum() + F.linear(hidden, w).pow(2).sum()

    plain = X.clone().requires_grad_()
    run_safely(plain, weight.detach()).backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone().requires_grad_(), mesh, [Replicate()])
        w = cut(weight.detach().clone(), mesh, [Shard(0)])
        run_safely(x, w).backward()
        same(x.grad, plain.grad)

    run_ranks(2, program)


def test_ranks_that_use_other_parameters_are_told() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone(), mesh, [Shard(0)])
        weights = [cut(torch.ones(6).requires_grad_(), mesh, [Replicate()]) for _ in "ab"]
        used = weights if rank == 0 else weights[:1]
        loss: Any = sum((x * weight).to_local().sum() for weight in used)
        loss.backward()

    with pytest.raises((CollectiveMismatchError, RankFailedError), match="reduction of 1 gradient"):
        run_ranks(2, program)


def test_set_and_clear() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(X.clone().requires_grad_(), mesh, [Shard(0)])
        assert x.grad is None
        assert x.is_leaf
        assert x.grad_fn is None
        x.sum().backward()
        assert x.grad is x.grad
        x.grad = cut(X.clone(), mesh, [Replicate()])  # is laid out as x
        assert x.grad.placements == (Shard(0),)
        same(x.grad, X)
        with pytest.raises(TypeError, match="distribute_tensor"):
            x.grad = X.clone()
        with pytest.raises(RuntimeError, match="shape"):
            x.grad = cut(torch.ones(2, 6), mesh, [Shard(0)])
        same(x.grad, X)
        del x.grad
        assert x.grad is None
        with pytest.raises(RuntimeError, match="scalar"):
            (x * 2).backward()
        (x * 2).backward(cut(X.clone(), mesh, [Replicate()]))
        same(x.grad, 2 * X)
        (x * 2).backward(X.clone())  # a plain one counts as replicated
        same(x.grad, 4 * X)

    run_ranks(2, program)


def test_to_local_and_back_keeps_gradients() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            x = cut(X.clone().requires_grad_(), mesh, [placement])
            there: Any = DTensor.from_local(x.to_local(), mesh, [placement], shape=x.shape)
            (there * there).sum().backward()
            same(x.grad, 2 * X)
        # Each rank computes a term of the gradient of what all have, and says so.
        x = cut(X.clone().requires_grad_(), mesh, [Replicate()])
        local = x.to_local(grad_placements=[Partial()])
        (local * (rank + 1)).sum().backward()
        same(x.grad, torch.full_like(X, 3.0))
        with pytest.raises(ValueError, match="cannot have the placements"):
            x.to_local(grad_placements=[Shard(0)])

    run_ranks(2, program)


def test_no_grad_and_inference_mode() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(BLOCK, mesh)
        x = cut(X.clone(), mesh, [Shard(0)])
        with torch.no_grad():
            assert not module(x).requires_grad
        with torch.inference_mode():
            out = module(x)
            assert out.is_inference()
        assert_close(full(out), BLOCK(X).detach())

    run_ranks(2, program)


def test_axes_of_two_kinds(request: pytest.FixtureRequest) -> None:
    """Data-parallel and tensor-parallel at once."""
    wanted = plain_grads(BLOCK, X)
    cuts: dict[str, list[Placement]] = {
        "inner.weight": [Replicate(), Shard(0)],
        "inner.bias": [Replicate(), Shard(0)],
        "outer.weight": [Replicate(), Shard(1)],
        "outer.bias": [Replicate(), Replicate()],
    }
    fully = {name: [Shard(0), *there[1:]] for name, there in cuts.items()}

    def program(rank: int) -> None:
        mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = cut(X.clone(), mesh, [Shard(0), Replicate()])
        for placements in (cuts, fully):
            module = spread(BLOCK, mesh, placements)
            for _ in range(2):
                out = module(x)
                out.pow(2).sum().backward()
            assert_close(full(out), BLOCK(X).detach())
            for param, want in zip(module.parameters(), wanted, strict=True):
                assert param.grad.placements == param.placements
                same(param.grad, 2 * want)

    run_ranks(4, program)


def test_the_gradient_of_a_partial_tensor_keeps_the_order_of_axes() -> None:
    whole, weight = torch.arange(24.0).view(8, 3), torch.rand(8, 3)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        placements, order = [Shard(0), Shard(0), Partial()], (1, 0, 2)
        x: Any = cut(whole, mesh, [Replicate()] * 3).redistribute(
            placements=placements, order=order
        )
        x = x.detach().requires_grad_()
        (x * cut(weight, mesh, [Replicate()] * 3)).sum().backward()
        assert x.grad._spec.order == order
        same(x.grad, weight)

    run_ranks(8, program)


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_gradients_survive_a_trip_through_local_tensors() -> None:
    """pytorch#172932: ``from_local(x.to_local())`` changes nothing, in whatever layout."""

    def trip(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return (x * 2).sin()
        spec = (x * 2)._spec  # type: ignore[attr-defined]
        there = (x * 2).to_local()  # type: ignore[attr-defined]
        back = DTensor.from_local(
            there, spec.mesh, spec.placements, shape=spec.shape, order=spec.order
        )
        return back.sin()

    check_op(trip, GRID, partial=("sum", "avg"))


def test_a_gradient_in_terms_can_be_said_to_be_so() -> None:
    """torchtitan#1805: each rank's loss is of its own part, and the weight is replicated."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = GRID.t().clone().requires_grad_()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        (plain @ x).square().sum().backward()  # type: ignore[no-untyped-call]
        weight = cut(GRID.t(), mesh, [Replicate()]).requires_grad_()
        mine = cut(x, mesh, [Shard(1)]).to_local()
        (weight.to_local(grad_placements=[Partial()]) @ mine).square().sum().backward()
        same(weight.grad, plain.grad)

    run_ranks(2, program)


def test_a_hook_may_not_change_the_shape() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        x.requires_grad_()
        x.register_hook(lambda grad: grad[:2])
        with pytest.raises(
            RuntimeError, match=r"shape \[4, 2\] has returned one of shape \[2, 2\]"
        ):
            x.sum().backward()  # type: ignore[no-untyped-call]

    run_ranks(2, program)


def test_batches_of_gradients_are_refused() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.randn(3, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="for each row of grad_outputs"):
            torch.autograd.grad(x.sin(), x, torch.ones(4, 3, 2), is_grads_batched=True)
        jacobian: Any = torch.autograd.functional.jacobian
        with pytest.raises(RuntimeError, match="for each row of grad_outputs"):
            jacobian(torch.sin, x, vectorize=True)

    run_ranks(2, program)


def test_what_a_hook_returns_is_checked() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.randn(3), init_device_mesh("cpu", (2,)), [Shard(0)])
        x.requires_grad_().register_hook(lambda grad: 3)  # type: ignore[arg-type, return-value]
        with pytest.raises(TypeError, match="returned a int"):
            torch.autograd.backward(x.sum())

    run_ranks(2, program)


def test_there_is_a_gradient_for_each_root() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.randn(3), init_device_mesh("cpu", (2,)), [Shard(0)])
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="got 2 tensors"):
            torch.autograd.grad([x * 2, x * 3], x, [torch.ones(3)])

    run_ranks(2, program)


def test_a_gradient_that_is_not_given_is_one_for_real_numbers() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.ones(4).to(torch.complex64), mesh, [Shard(0)])
        x.requires_grad_()
        with pytest.raises(RuntimeError, match="only for real scalar outputs"):
            x.sum().backward()
        with pytest.raises(TypeError, match="either Tensors or None, but got float"):
            torch.autograd.backward([x * 2], [3.0])  # type: ignore[list-item]

    run_ranks(2, program)


def test_what_a_hook_returns_after_accumulating_is_dropped() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        x.register_post_accumulate_grad_hook(lambda x: x * 3)
        (x * 2).sum().backward()
        assert x.grad.full_tensor().tolist() == [2] * 4

    run_ranks(2, program)


HOOKED: list[tuple[bool, Callable[[Any], Any]]] = [
    (True, lambda x: x.register_hook(lambda grad: 2 * grad)),
    (True, lambda x: x.register_post_accumulate_grad_hook(lambda x: None)),
    (False, lambda x: x.register_hook(lambda grad: 2 * grad)),
    (False, lambda x: register_multi_grad_hook([x, x * 2], lambda grads: None)),
]


@each("is_leaf, register", HOOKED)
def test_hooks_keep_no_tensor_alive(is_leaf: bool, register: Callable[[Any], Any]) -> None:
    def program(rank: int) -> bool:
        x = cut(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        x = x if is_leaf else x * 2
        memory = ref(x.to_local())
        register(x)
        del x
        return memory() is None

    assert run_ranks(2, program) == [True, True]


def test_a_hook_outlives_its_leaf() -> None:
    def program(rank: int) -> list[Any]:
        x = cut(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
        seen: list[Any] = []
        x.register_hook(lambda grad: seen.append(full(grad)))
        x.register_post_accumulate_grad_hook(lambda x: seen.append(full(x.grad)))
        loss = (x * 3).sum()
        del x
        loss.backward()
        return [each.tolist() for each in seen]

    assert run_ranks(2, program) == [[[3.0] * 4] * 2] * 2


def test_a_write_to_one_gradient_is_none_to_another() -> None:
    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(torch.ones(4, 3), mesh, [Shard(0)])
        weights = [cut(torch.ones(3, 3), mesh, [Replicate()]).requires_grad_() for _ in range(2)]
        (x @ weights[0] @ weights[1]).sum().backward()  # reduced in one message
        rate: Any = torch.tensor(2.0, requires_grad=True)
        stepped = (rate * weights[0].grad).sum()
        weights[1].grad.zero_()
        stepped.backward()
        return float(rate.grad)

    assert run_ranks(2, program) == [108.0] * 2
