"""ShardedOptimizer: steps on shards are those on the whole tensors; so is state, at any layout."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import (
    boxes,
    check_all_raise,
    chunks,
    cut,
    errors_of,
    examples,
    grid,
    join,
    numbered,
    on,
    parts_of,
    specs,
)
from tilework.sharded import (
    ShardedOptimizer,
    ShardedTensor,
    ShardingSpec,
    named_params_with_sharded_tensor,
    ones,
)

SIZE = (7, 5)
ROWS = chunks(0, range(3))
SPECS = {
    "rows": ROWS,
    "several, and none on rank 1": chunks(1, [2, 0, 2]),
    "empty": chunks(0, [0, 1, 2, 1, 0, 2, 1, 0]),
    "grid": grid([1, 6], [3, 2], [2, 1, 0, 1]),
    "one rank": chunks(0, [1]),
}
OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adam, {"lr": 0.1, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.1, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {"lr": 0.1}),
    (torch.optim.ASGD, {"lr": 0.1}),
    (torch.optim.Rprop, {}),
]


def ids(values: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> list[str]:
    return [f"{kind.__name__}-{'-'.join(options)}" for kind, options in values]


def initial() -> Tensor:
    return torch.cos(numbered(SIZE))


def give_gradients(tensors: Sequence[Tensor], step: int) -> None:
    """Some that are known of each element, and change with it."""
    for tensor in tensors:
        tensor.grad = torch.sin(tensor.detach() * (step + 2)) + 0.1


def plain_run(kind: type[Optimizer], options: dict[str, Any], steps: int) -> Tensor:
    weight = initial().requires_grad_()
    optimizer = kind([weight], **options)
    for step in range(steps):
        give_gradients([weight], step)
        optimizer.step()
    return weight.detach()


def weight_of(spec: ShardingSpec, rank: int, **options: Any) -> ShardedTensor:
    return cut(initial(), spec, rank, requires_grad=True, **options)


def run(optimizer: ShardedOptimizer, weight: ShardedTensor, steps: range) -> None:
    for step in steps:
        give_gradients(weight.local_tiles(), step)
        optimizer.step()


def check_whole(results: Sequence[Any], expected: Tensor) -> None:
    found = join([part for parts in results for part in parts], SIZE)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS, ids=ids(OPTIMIZERS))
def test_the_same_as_on_the_whole_tensor(kind: type[Optimizer], options: dict[str, Any]) -> None:
    def program(rank: int) -> Any:
        found = {}
        for name, spec in SPECS.items():
            weight = weight_of(spec, rank)
            run(ShardedOptimizer({"w": weight}, kind, **options), weight, range(4))
            found[name] = parts_of(weight)
        return found

    results, expected = on(3, program), plain_run(kind, options, 4)
    assert not torch.equal(expected, initial())
    for name in SPECS:
        check_whole([result[name] for result in results], expected)


def test_plain_parameters_next_to_sharded_ones() -> None:
    def program(rank: int) -> Any:
        weight, bias = weight_of(chunks(0, [1]), rank), nn.Parameter(torch.ones(2))
        optimizer = ShardedOptimizer({"w": weight, "b": bias}, torch.optim.SGD, lr=0.5)
        bias.grad = torch.tensor([1.0, 2.0])
        run(optimizer, weight, range(2))
        assert bias.tolist() == [0, -1]
        return parts_of(weight)

    check_whole(on(2, program), plain_run(torch.optim.SGD, {"lr": 0.5}, 2))


def test_zero_grad_and_closure() -> None:
    def program(rank: int) -> None:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.SGD, 0.5)

        def closure() -> float:
            optimizer.zero_grad(set_to_none=False)
            assert all(tile.grad is None or not tile.grad.any() for tile in weight.local_tiles())
            give_gradients(weight.local_tiles(), 0)
            return 3.5

        assert optimizer.step(closure) == 3.5
        optimizer.zero_grad()
        assert all(tile.grad is None for tile in weight.local_tiles())

    on(3, program)


def test_parameter_groups_have_their_options() -> None:
    def program(rank: int) -> None:
        a, b = ones(chunks(0, [0, 1]), 4), nn.Parameter(torch.ones(2))
        c = ones(chunks(0, [1]), 2)
        groups: list[dict[str, Any]] = [{"params": {"a": a}}, {"params": [("b", b)], "lr": 0.25}]
        optimizer = ShardedOptimizer(groups, torch.optim.SGD, lr=0.5)
        optimizer.add_param_group({"params": {"c": c}, "lr": 1.0})
        for tile in (*a.local_tiles(), b, *c.local_tiles()):
            tile.grad = torch.ones_like(tile)
        optimizer.step()
        assert a.local_tensor().tolist() == [0.5, 0.5]
        assert b.tolist() == [0.75, 0.75]
        assert [tile.tolist() for tile in c.local_tiles()] == [[0.0, 0.0]] * rank
        saved = optimizer.state_dict()["param_groups"]
        assert [group["params"] for group in saved] == [["a"], ["b"], ["c"]]
        assert [group["lr"] for group in saved] == [0.5, 0.25, 1.0]
        assert list(optimizer.named_params) == ["a", "b", "c"]

    on(2, program)


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=6),
    ],
)
def test_learning_rate_schedules(scheduler: Callable[[Optimizer], Any]) -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    plain = initial().requires_grad_()
    optimizer = torch.optim.SGD([plain], **options)  # type: ignore[arg-type]
    schedule = scheduler(optimizer)
    for step in range(4):
        give_gradients([plain], step)
        optimizer.step()
        schedule.step()

    def program(rank: int) -> Any:
        weight = weight_of(chunks(0, [0, 2]), rank)
        sharded = ShardedOptimizer({"w": weight}, torch.optim.SGD, **options)
        schedule = scheduler(sharded)
        for step in range(4):
            run(sharded, weight, range(step, step + 1))
            schedule.step()
        return parts_of(weight)

    check_whole(on(3, program), plain.detach())


def test_hooks_of_steps_and_states() -> None:
    def program(rank: int) -> list[str]:
        seen: list[str] = []
        optimizer = ShardedOptimizer({"w": weight_of(ROWS, rank)}, torch.optim.SGD)
        optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
        optimizer.register_state_dict_pre_hook(lambda _: seen.append("save"))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "more": 1})
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append("load"))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
        optimizer.step()
        state = optimizer.state_dict()
        assert state["more"] == 1
        optimizer.load_state_dict(state)
        return seen

    assert on(3, program) == [["step", "save", "load", "loaded"]] * 3


def test_a_schedule_outlasts_a_new_group() -> None:
    def program(rank: int) -> list[float]:
        options = {"w": weight_of(ROWS, rank)}
        optimizer = ShardedOptimizer(options, torch.optim.SGD, lr=0.5)
        optimizer.param_groups[0]["lr"] = 0.25
        optimizer.add_param_group({"params": {"b": torch.ones(1)}})
        optimizer.step()
        return [group["lr"] for group in optimizer.state_dict()["param_groups"]]

    assert on(3, program) == [[0.25, 0.5]] * 3


@pytest.mark.parametrize("is_sharded", [True, False])
def test_ranks_skip_the_same_steps_and_clip_by_one_norm(is_sharded: bool) -> None:
    """By ``GradScaler``, where the gradient of one rank is infinite; a rank has no shards."""

    def program(rank: int) -> list[Any]:
        weight = ones(chunks(0, [0, 2]), 4, requires_grad=True)
        params = {"w": weight, "b": torch.ones((), requires_grad=True)}
        optimizer: Optimizer = torch.optim.SGD([*params.values()], lr=1.0)
        if is_sharded:
            optimizer = ShardedOptimizer(params, torch.optim.SGD, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        for scale in (1e38, 1.0):
            optimizer.zero_grad()
            part = weight[3:] * scale
            loss = (weight.sum() + part.sum()) * params["b"]
            torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            whole = [each for group in optimizer.param_groups for each in group["params"]]
            norm = nn.utils.clip_grad_norm_(whole, 1.0)
            scaler.step(optimizer)
            scaler.update()
            values = weight.full_tensor().tolist(), params["b"].item()
            seen.append((norm.item(), scaler.get_scale(), *values))
        return seen

    plain = torch.tensor([1.0, 1.0, 1.0, 2.0, 5.0])  # the gradients, with that of "b"
    left = 1 - plain / plain.norm()
    for skipped, taken in on(3, program):
        assert skipped == (float("inf"), 512.0, [1.0] * 4, 1.0)
        assert taken[:2] == (pytest.approx(plain.norm().item()), 512.0)
        assert_close(torch.tensor([*taken[2], taken[3]]), left)


# -- which optimizers, which parameters ------------------------------------------------------------


class Lars(torch.optim.SGD):
    """Divides by the norm of the whole parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.data.sub_(group["lr"] * tensor.grad / tensor.grad.norm())


#: Some of these are younger than the oldest torch that will do.
WHOLE = [getattr(torch.optim, name, Lars) for name in ("LBFGS", "Adafactor", "Muon")]


def test_every_optimizer_of_torch_is_tried() -> None:
    kinds = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    kinds = {kind for kind in kinds if issubclass(kind, Optimizer)} - {Optimizer}
    # The remaining one takes sparse gradients only, which shards do not get.
    assert kinds - {torch.optim.SparseAdam} <= {kind for kind, _ in OPTIMIZERS} | {*WHOLE}


@pytest.mark.parametrize("kind", [*WHOLE, Lars])
@pytest.mark.parametrize("lr", [1e-9, 0.1, 0.0])
def test_optimizers_of_whole_tensors_are_refused(kind: type[Optimizer], lr: float) -> None:
    def program(rank: int) -> None:
        ShardedOptimizer({"w": weight_of(chunks(0, [0]), rank)}, kind, lr=lr)

    check_all_raise(
        1, program, ValueError, f"{kind.__name__} does not treat each element on its own"
    )


WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no class": (torch.ones(2), "SGD", TypeError, "subclass of torch.optim.Optimizer, got 'SGD'"),
    "no names": ([torch.ones(2)], torch.optim.SGD, TypeError, "parameters must have names"),
    "nothing": ({}, torch.optim.SGD, ValueError, "has no parameters"),
    "one name": ([("a", torch.ones(1)), ("a", torch.ones(1))], torch.optim.SGD, ValueError,
                 "two parameters have the same name"),
    "no tensor": ({"a": 3}, torch.optim.SGD, TypeError, "parameter 'a' must be a tensor, got int"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    params, kind, error, pattern = WRONG[case]
    named = {"a": params} if isinstance(params, Tensor) else params
    with pytest.raises(error, match=pattern):
        ShardedOptimizer(named, kind)


def test_wrong_options_are_told_by_the_optimizer() -> None:
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer({"a": torch.ones(1)}, torch.optim.SGD, lr=-1)
    with pytest.raises(TypeError, match="speed"):
        ShardedOptimizer({"a": torch.ones(1)}, torch.optim.SGD, speed=1)


def test_a_parameter_comes_once() -> None:
    def program(rank: int) -> None:
        weight = ones(chunks(0, [1]), 4)  # of which rank 0 has nothing
        optimizer = ShardedOptimizer({"a": weight}, torch.optim.SGD)
        optimizer.add_param_group({"params": {"b": weight}})

    check_all_raise(2, program, ValueError, "parameter 'b' is there already, as 'a'")


def test_parameters_that_were_resharded_are_noticed() -> None:
    def program(rank: int) -> None:
        weight = weight_of(chunks(0, [0, 1]), rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.SGD)
        weight.reshard(chunks(1, [0, 1]))
        if rank == 2:  # had no shard, has none, and hears of it where ranks meet
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"the optimizer's reshard_\('w', spec\)"):
                optimizer.step()
        for call in (
            optimizer.state_dict,
            lambda: optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["w"]}]}),
            lambda: optimizer.reshard_("w", ROWS),
        ):
            with pytest.raises(RuntimeError, match="it would update nothing"):
                call()

    on(3, program)


# -- state -----------------------------------------------------------------------------------------

STATEFUL = [OPTIMIZERS[i] for i in (1, 3, 4, 7, 10, 12, 13)]


def saved(state: Any) -> Any:
    """Through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def test_what_state_is_saved() -> None:
    def program(rank: int) -> None:
        weight, bias = weight_of(chunks(0, [2, 0]), rank), nn.Parameter(torch.ones(2))
        optimizer = ShardedOptimizer({"w": weight, "b": bias}, torch.optim.Adam, lr=0.1)
        bias.grad = torch.ones(2)
        run(optimizer, weight, range(2))
        state = optimizer.state_dict()["state"]
        # Also on rank 1, which has no shard.
        assert sorted(state["w"]) == ["exp_avg", "exp_avg_sq", "step"]
        assert float(state["w"]["step"]) == 2
        average = state["w"]["exp_avg"]
        assert isinstance(average, ShardedTensor)
        assert average.sharding_spec() == weight.sharding_spec()
        assert average.dtype == torch.float32
        assert not average.requires_grad
        assert type(state["b"]["exp_avg"]) is Tensor

    on(3, program)


def test_no_state_yet() -> None:
    def program(rank: int) -> Any:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.Adam, lr=0.1)
        state = optimizer.state_dict()
        assert state["state"] == {"w": {}}
        run(optimizer, weight, range(1))
        weight.reshard(ROWS)
        with torch.no_grad():
            for shard in weight.local_shards():
                shard.tensor.copy_(initial()[shard.metadata.box.slices])
        again = ShardedOptimizer({"w": weight}, torch.optim.Adam, lr=0.1)
        again.load_state_dict(state)
        run(again, weight, range(2))
        return parts_of(weight)

    check_whole(on(3, program), plain_run(torch.optim.Adam, {"lr": 0.1}, 2))


def test_loaded_state_is_a_copy() -> None:
    def program(rank: int) -> None:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.Adam, lr=0.1)
        run(optimizer, weight, range(1))
        state = saved(optimizer.state_dict())
        average = state["state"]["w"]["exp_avg"].local_tensor().clone()
        optimizer.load_state_dict(state)
        run(optimizer, weight, range(2))
        assert torch.equal(state["state"]["w"]["exp_avg"].local_tensor(), average)
        assert float(state["state"]["w"]["step"]) == 1

    on(3, program)


def test_between_plain_and_sharded() -> None:
    options = {"lr": 0.1}

    def program(rank: int) -> Any:
        plain = nn.Parameter(initial())
        whole = ShardedOptimizer({"w": plain}, torch.optim.Adam, **options)
        for step in range(2):
            give_gradients([plain], step)
            whole.step()
        weight = cut(plain.detach(), SPECS["grid"], rank, requires_grad=True)
        sharded = ShardedOptimizer({"w": weight}, torch.optim.Adam, **options)
        sharded.load_state_dict(saved(whole.state_dict()))
        run(sharded, weight, range(2, 4))
        with torch.no_grad():
            plain.copy_(weight.full_tensor())
        whole.load_state_dict(saved(sharded.state_dict()))
        give_gradients([plain], 4)
        whole.step()
        return plain.detach()

    for found in on(3, program):
        assert_close(found, plain_run(torch.optim.Adam, options, 5))


def test_a_group_of_some_ranks() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group([2, 0])
        one = weight_of(chunks(0, [2, 0, 2]), rank, process_group=group)
        two = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"one": one, "two": two}, torch.optim.Adam, lr=0.1)
        for step in range(2):
            give_gradients(one.local_tiles(), step)
            run(optimizer, two, range(step, step + 1))
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(2, 4):
            give_gradients(one.local_tiles(), step)
            run(optimizer, two, range(step, step + 1))
        optimizer.reshard_("one", chunks(1, [0]))
        return parts_of(one), parts_of(two)

    results = on(3, program)
    expected = plain_run(torch.optim.Adam, {"lr": 0.1}, 4)
    check_whole([one for one, _ in results], expected)
    check_whole([two for _, two in results], expected)


def test_shards_without_gradients_are_told() -> None:
    """Their state would be of another step than that of the others."""

    def program(rank: int) -> None:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.Adam)
        if rank != 1:
            give_gradients(weight.local_tiles(), 0)
        optimizer.step()
        optimizer.state_dict()

    check_all_raise(3, program, RuntimeError, "of parameter 'w' .*all shards must have a gradient")


LOADING: dict[str, tuple[Callable[[int, dict[str, Any]], dict[str, Any]], str]] = {
    "names": (
        lambda rank, state: {"state": {}, "param_groups": [{"params": ["v"]}]},
        r"no group of the parameters \['w'\]",
    ),
    "names on one rank": (
        lambda rank, state: {"state": {}, "param_groups": [{"params": ["v"]}]} if rank else state,
        r"no group of the parameters \['w'\]",
    ),
    "groups": (
        lambda rank, state: {
            **state,
            "param_groups": [*state["param_groups"], {"params": ["v"]}],
        },
        "has 2 groups of parameters, this optimizer 1",
    ),
    "size": (
        lambda rank, state: {
            **state,
            "state": {"w": {"exp_avg": cut(numbered((5, 7)), ROWS, rank)}},
        },
        r"'exp_avg' of parameter 'w' has size \(5, 7\), the parameter \(7, 5\)",
    ),
    "entries": (
        lambda rank, state: {**state, "state": {"w": {"step": torch.tensor(1.0)} if rank else {}}},
        "w: step=",
    ),
}


@pytest.mark.parametrize("case", LOADING)
def test_what_does_not_fit_is_told_on_all_ranks(case: str) -> None:
    change, pattern = LOADING[case]

    def program(rank: int) -> None:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.Adam)
        run(optimizer, weight, range(1))
        state = optimizer.state_dict()
        before = state["state"]["w"]["exp_avg"].local_tensor()
        try:
            optimizer.load_state_dict(change(rank, state))
        finally:
            after = optimizer._states("w")[0]
            assert after["exp_avg"] is before

    check_all_raise(3, program, ValueError, pattern)


# -- resharding in the middle ----------------------------------------------------------------------


def test_gradients_are_resharded_too() -> None:
    def program(rank: int) -> Any:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.SGD, lr=0.1)
        give_gradients(weight.local_tiles(), 0)
        optimizer.reshard_("w", SPECS["grid"])
        assert sum("gradient" in state for state in optimizer.state.values()) == 0
        optimizer.step()
        return parts_of(weight)

    check_whole(on(3, program), plain_run(torch.optim.SGD, {"lr": 0.1}, 1))


@examples(40)
@given(data=hs.data(), made=hs.sampled_from(STATEFUL))
def test_any_layouts_one_after_the_other(data: hs.DataObject, made: Any) -> None:
    """With the optimizer, beside a parameter that stays; then with one that loads its state."""
    (kind, options), n = made, data.draw(hs.integers(1, 3))
    layouts = [data.draw(specs(SIZE, tuple(range(n)))) for _ in range(3)]

    def program(rank: int) -> Any:
        weight, other = weight_of(layouts[0], rank), weight_of(layouts[0], rank)
        named = {"other": other, "w": weight}
        optimizer = ShardedOptimizer(named, kind, **options)
        for step, spec in enumerate(layouts):
            give_gradients(other.local_tiles(), step)
            run(optimizer, weight, range(step, step + 1))
            optimizer.reshard_("w", spec)
            assert weight.sharding_spec() == spec
        state = saved(optimizer.state_dict())
        optimizer.zero_grad()  # so that only one parameter steps from here
        weight.reshard(layouts[1])
        # Other options and a step, of which nothing must be left.
        again = ShardedOptimizer(named, kind, **{**options, "lr": 7.0})
        before = [tile.detach().clone() for tile in weight.local_tiles()]
        run(again, weight, range(1))
        with torch.no_grad():
            for tile, value in zip(weight.local_tiles(), before, strict=True):
                tile.copy_(value)
        again.load_state_dict(state)
        run(again, weight, range(3, 5))
        return parts_of(weight), parts_of(other)

    results = on(n, program)
    check_whole([weight for weight, _ in results], plain_run(kind, options, 5))
    check_whole([other for _, other in results], plain_run(kind, options, 3))


def test_a_reshard_that_fails_changes_nothing() -> None:
    def program(rank: int) -> Any:
        weight, bias = weight_of(ROWS, rank), nn.Parameter(torch.ones(2))
        optimizer = ShardedOptimizer({"w": weight, "b": bias}, torch.optim.Adam, lr=0.1)
        run(optimizer, weight, range(1))
        short = boxes(((0, 0), (7, 3), 0))
        for name, spec, kind in [
            ("w", short, ValueError),
            ("w", chunks(0, [3]), ValueError),
            ("w", short if rank == 1 else ROWS, ValueError),
            ("w", chunks(rank % 2, range(3)), ValueError),
            ("x", ROWS, KeyError),
            ("b", ROWS, ValueError),
        ]:
            with pytest.raises(kind):
                optimizer.reshard_(name, spec)
        assert weight.sharding_spec() == ROWS
        run(optimizer, weight, range(1, 3))
        return parts_of(weight)

    check_whole(on(3, program), plain_run(torch.optim.Adam, {"lr": 0.1}, 3))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copies_are_independent(copied: Callable[[Any], Any]) -> None:
    def program(rank: int) -> Any:
        weight = weight_of(ROWS, rank)
        optimizer = ShardedOptimizer({"w": weight}, torch.optim.Adam, lr=0.1)
        run(optimizer, weight, range(1))
        other_weight, other = copied((weight, optimizer))
        run(optimizer, weight, range(7, 9))
        other.reshard_("w", SPECS["grid"])
        run(other, other_weight, range(1, 3))
        return parts_of(other_weight)

    check_whole(on(3, program), plain_run(torch.optim.Adam, {"lr": 0.1}, 3))


# -- a module's parameters -------------------------------------------------------------------------


class Model(nn.Module):
    """With a sharded attribute, a sharded parameter, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ones(chunks(0, [0]), 4)
        self.weight = nn.Parameter(ones(chunks(0, [0]), 2))
        self.linear = nn.Linear(2, 2)
        self.same = self.linear


def test_named_parameters() -> None:
    def program(rank: int) -> None:
        model = nn.Sequential(Model())
        named = dict(named_params_with_sharded_tensor(model))
        assert list(named) == ["0.table", "0.weight", "0.linear.weight", "0.linear.bias"]
        assert named["0.table"] is model[0].table
        assert named["0.weight"] is model[0].weight
        own = named_params_with_sharded_tensor(model[0], prefix="m", recurse=False)
        assert [name for name, _ in own] == ["m.table", "m.weight"]
        assert not list(named_params_with_sharded_tensor(model, recurse=False))

    on(1, program)


def test_ranks_with_other_names_are_told() -> None:
    def program(rank: int) -> None:
        weight = weight_of(ROWS, rank)
        name = "w" if rank else "v"
        optimizer = ShardedOptimizer({name: weight}, torch.optim.Adam)
        run(optimizer, weight, range(1))
        optimizer.load_state_dict(optimizer.state_dict())

    assert all(isinstance(error, RuntimeError | ValueError) for error in errors_of(3, program))
