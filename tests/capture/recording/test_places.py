"""Changes between calls of a captured step, and acts that are refused: none passes in silence."""

from __future__ import annotations

import copy
import enum
import math
import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.twins import run_twins, tensors_of
from tilework.capture import capture
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.errors import CaptureError
from tilework.testing import run_ranks


class Factors:
    of_class = 1.0


class Settings:
    def __init__(self) -> None:
        self.weights = [1.0, 0.5]
        self.by_name = {"first": 1.0}
        self.kinds = {"square"}
        self.recent = deque([1.0], maxlen=1)
        self.dtype = torch.float32
        self.calls = 0


class Model(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, self.factors = settings, Factors()
        self.layers: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6, bias=False))
        self.act: Any = F.silu
        weight: Any = self.layers[0].weight
        weight.register_hook(lambda grad: grad * self.settings.weights[0])

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factors.of_class

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.layers(x))
        x = sum((x * w for w in self.settings.weights), x).to(self.settings.dtype).float()
        x = x.square() if "square" in self.settings.kinds else x
        return self.scaled(x * sum(self.settings.by_name.values()) * self.settings.recent[0])


Change = Callable[[Model, Any], Any]


def options(**values: Any) -> Change:
    return lambda model, optimizer: optimizer.param_groups[0].update(values)


def in_settings(**values: Any) -> Change:
    return lambda model, optimizer: vars(model.settings).update(values)


def halve(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


CHANGES: dict[str, Change] = {
    "a gradient is left": lambda model, optimizer: model(torch.ones(2, 6)).sum().backward(),
    "an option becomes a float": options(weight_decay=0.5),
    "a flag of the optimizer": options(maximize=True),
    "a group of parameters": lambda model, optimizer: optimizer.add_param_group(
        {"params": [*model.layers[2].parameters()], "lr": 0.5}
    ),
    "no states": lambda model, optimizer: optimizer.state.clear(),
    "a frozen layer": lambda model, optimizer: model.layers[0].requires_grad_(False),
    "a module": lambda model, optimizer: model.layers.__setitem__(1, nn.Tanh()),
    "one module more": lambda model, optimizer: model.layers.append(nn.Tanh()),
    "a bias": lambda model, optimizer: setattr(
        model.layers[2], "bias", nn.Parameter(torch.ones(6))
    ),
    "a function": lambda model, optimizer: setattr(model, "act", torch.tanh),
    "a hook of a module": lambda model, optimizer: model.layers[0].register_forward_hook(
        lambda module, args, out: out * 2
    ),
    "a hook of a tensor": lambda model, optimizer: model.layers[0].bias.register_hook(
        lambda grad: grad * 2
    ),
    "a list": in_settings(weights=[2.0, 0.5]),
    "an item": lambda model, optimizer: model.settings.weights.append(3.0),
    "a key": lambda model, optimizer: model.settings.by_name.update(second=2.0),
    "a set": lambda model, optimizer: model.settings.kinds.clear(),
    "an item of a set": lambda model, optimizer: model.settings.kinds.symmetric_difference_update(
        ["square", "cube"]
    ),
    "an item of a deque": lambda model, optimizer: model.settings.recent.append(3.0),
    "a dtype": in_settings(dtype=torch.bfloat16),
    "an attribute of a class": lambda model, optimizer: setattr(Factors, "of_class", 0.5),
    "a method": lambda model, optimizer: setattr(model, "scaled", lambda x: x * 3),
    "the method forward": lambda model, optimizer: setattr(
        model.layers[0], "forward", lambda x: F.linear(x, model.layers[0].weight)
    ),
    "a hook of an optimizer": lambda model, optimizer: optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: halve(model.layers[0].weight)
    ),
    "strides": lambda model, optimizer: setattr(
        model.layers[0].weight, "data", model.layers[0].weight.data.t().contiguous().t()
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_calls_is_seen(name: str) -> None:
    twins: list[tuple[Model, Any]] = []
    calls = 0

    def make() -> Any:
        model = Model(Settings())
        optimizer = torch.optim.Adam(model.layers[0].parameters(), lr=0.1)
        twins.append((model, optimizer))

        def step(x: Tensor) -> Any:
            loss = model(x).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step, tensors_of(model, optimizer)

    def after() -> None:
        nonlocal calls
        calls += 1
        for model, optimizer in twins:
            model.settings.calls += 1  # the step does not read it
            if calls == 3:
                CHANGES[name](model, optimizer)

    Factors.of_class = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = run_twins(make, [(torch.randn(4, 6),) for _ in range(7)], after)
    assert len(program.records) in (1, 2, 3)  # records that differ in numbers share a program


class Holder:
    """Has a factor, which a test changes between calls."""

    factor: Any = 1.0


class ModuleHolder(nn.Module):
    factor: Any = 1.0


class DictHolder(dict[str, Any]):
    def __init__(self) -> None:
        self.factor: Any = 1.0


class ListHolder(list[Any]):
    factor: Any = 1.0

    def of(self, x: Tensor) -> Any:
        return x * self.factor


class Empty:
    factor: Any


def _of_no_grad(holder: Holder) -> Any:
    return torch.no_grad()(lambda x: x * holder.factor)


def _of_captured(holder: Holder) -> Any:
    inner = capture(lambda x: x * holder.factor)
    return lambda x: inner(x)


def _of_func(holder: Holder) -> Any:
    return torch.func.grad(lambda x: (x * holder.factor).sum())


def _of_attribute(holder: Any) -> Any:
    return lambda x: x * holder.factor


def _of_method(holder: ListHolder) -> Any:
    return lambda x: holder.of(x)


def _of_attribute_or_not(holder: Empty) -> Any:
    return lambda x: x * holder.factor if hasattr(holder, "factor") else x


def _of_attribute_or_one(holder: Empty) -> Any:
    return lambda x: x * getattr(holder, "factor", 1.0)


def _of_made_name(holder: Holder) -> Any:
    return lambda x: x * getattr(holder, "_".join(["fac", "tor"]).replace("_", ""))


def _function() -> Any:
    def function() -> None:
        pass

    function.factor = 1.0  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (_of_attribute, Holder),
        (_of_attribute, ModuleHolder),
        (_of_attribute, DictHolder),
        (_of_attribute, ListHolder),
        (_of_attribute, _function),
        (_of_method, ListHolder),
        (_of_attribute_or_not, Empty),
        (_of_attribute_or_one, Empty),
        (_of_made_name, Holder),
        (_of_no_grad, Holder),
        (_of_func, Holder),
        (_of_captured, Holder),
    ],
)
def test_a_factor_that_changes_between_calls_is_read(make: Any, held: Any) -> None:
    twins = [held(), held()]
    step, program = make(twins[0]), capture(make(twins[1]))
    x = torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(5):
            assert torch.equal(step(x), program(x)), f"call {call}"
            if call == 2:
                for each in twins:
                    each.factor = 5.0
    assert len(program.records) in (1, 2)


def _of_a_count_of_a_scheduler() -> Any:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.5)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return lambda x: x * scheduler.last_epoch, scheduler.step


def _of_a_factor_of_a_scaler() -> Any:
    scaler = torch.amp.GradScaler("cpu", growth_interval=1, init_scale=8.0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        return scaler.scale(x)

    return step, lambda: scaler.set_growth_factor(4.0)


def _of_an_attribute_of_a_tensor() -> Any:
    weight: Any = torch.ones(3)
    weight.factor = 1.0
    return lambda x: x * weight * weight.factor, lambda: setattr(weight, "factor", 2.0)


def _of_defaults() -> Any:
    def step(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return step, lambda: setattr(step, "__defaults__", (3.0,))


def _of_code() -> Any:
    def function(x: Tensor) -> Tensor:
        return x * 2

    def other(x: Tensor) -> Tensor:
        return x * 3

    return lambda x: function(x), lambda: setattr(function, "__code__", other.__code__)


def _of_a_number_of_numpy() -> Any:
    counts = {"steps": np.int64(1)}
    return lambda x: x * int(counts["steps"]), lambda: counts.update(steps=np.int64(2))


def _of_an_array() -> Any:
    arrays = [np.ones(1)]
    return lambda x: x * float(arrays[0][0]), lambda: arrays.__setitem__(0, np.zeros(1))


def test_an_attribute_that_the_step_does_not_read_is_no_change() -> None:
    class Trainer:
        def half(self, x: Tensor) -> Tensor:
            return x / 2

        def step(self, x: Tensor) -> Tensor:
            return self.half(x)

    trainer: Any = Trainer()
    program, x = capture(trainer.step), torch.ones(2)
    for call in range(4):
        setattr(trainer, f"loss{call}", program(x))
    assert len(program.records) == 1
    trainer.half = lambda x: x / 4
    assert torch.equal(program(x), x / 4)
    trainer.half = lambda x: x - 4
    with pytest.warns(UserWarning, match="self.half is another object"):
        assert torch.equal(program(x), x - 4)


def test_keys_of_a_dict_may_refuse_to_be_compared() -> None:
    class Key(enum.Enum):
        A = 1
        __hash__ = enum.Enum.__hash__

        def __eq__(self, other: object) -> bool:
            if not isinstance(other, Key):
                raise TypeError("a key of another class")
            return self is other

    factors: dict[Any, list[float]] = {Key.A: [2.0]}
    program, x = capture(lambda x: x * factors[Key.A][0]), torch.ones(2)
    for _ in range(3):
        assert torch.equal(program(x), x * 2)


def test_a_global_with_the_name_of_an_attribute_is_no_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "factor", 0)
    holder = Holder()
    program = capture(lambda x: x * holder.factor)
    for call in range(4):
        monkeypatch.setitem(globals(), "factor", [call] if call % 2 else call)
        assert program(torch.ones(())) == 1.0
    assert len(program._all()) == 1


@pytest.mark.parametrize(
    "make",
    [
        _of_a_count_of_a_scheduler,
        _of_a_factor_of_a_scaler,
        _of_an_attribute_of_a_tensor,
        _of_defaults,
        _of_code,
        _of_a_number_of_numpy,
        _of_an_array,
    ],
)
def test_what_no_dispatcher_shows_is_read_in_each_call(make: Any) -> None:
    torch.manual_seed(0)
    step, change = make()
    torch.manual_seed(0)
    other, change_other = make()
    program, x = capture(other), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(6):
            assert torch.equal(step(x), program(x)), f"call {call}"
            if call == 2:
                change()
                change_other()
    assert len(program.records) in (1, 2)


def test_an_array_that_is_an_argument_is_read_in_each_call() -> None:
    program, factors = capture(lambda x, factors: x * float(factors[0])), np.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(4):
            factors[0] = call // 2
            assert program(torch.ones(()), factors) == call // 2


def test_hooks_of_all_modules_are_seen() -> None:
    model = nn.Linear(3, 3, bias=False)
    program, x = capture(lambda x: model(x).detach()), torch.ones(3)
    for _ in range(3):
        before = program(x)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        with pytest.warns(UserWarning, match="recorded again"):
            assert torch.equal(program(x), before * 2)
    finally:
        hook.remove()
    assert torch.equal(program(x), before)


@pytest.mark.parametrize("drawn", [0, 1])
def test_generators_in_one_state_are_told_apart(drawn: int) -> None:
    twins = [[torch.Generator().manual_seed(1) for _ in range(2)] for _ in range(2)]

    def step_of(generators: list[torch.Generator]) -> Callable[[], Tensor]:
        return lambda: torch.rand(3, generator=generators[drawn])

    step, program = step_of(twins[0]), capture(step_of(twins[1]))
    for call in range(5):
        assert torch.equal(step(), program())
        for generators in twins if call == 0 else ():  # before the recorded call
            generators[1 - drawn].set_state(generators[drawn].get_state())


def test_options_that_are_loaded_are_read() -> None:
    optimizers: list[torch.optim.Optimizer] = []

    def make() -> Any:
        model = nn.Linear(6, 6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizers.append(optimizer)

        def step(x: Tensor) -> None:
            model.zero_grad()
            model(x).mean().backward()
            optimizer.step()

        return step, tensors_of(model)

    def load() -> None:
        for optimizer in optimizers:
            state = optimizer.state_dict()
            state["param_groups"][0]["maximize"] ^= True
            optimizer.load_state_dict(state)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_twins(make, [(torch.randn(4, 6),) for _ in range(5)], load)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_arguments_are_told_apart_where_the_recorded_call_had_one_tensor(needs_grad: bool) -> None:
    scale, x, other = [torch.full((3,), float(i)).requires_grad_(needs_grad) for i in (2, 1, 5)]
    same = torch.full((3,), 2.0) if needs_grad else scale
    program = capture(lambda a, b, c: (a * 100 + b * 10 + c + scale).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert program(x, x, same)[0] == 114
        assert program(x, other, same)[0] == 154
        assert program(x, x, other.detach() if needs_grad else other)[0] == 117


def test_whether_arguments_are_one_tensor_is_a_condition() -> None:
    program = capture(lambda a, b: a * 2 if a is b else a + 3 * b)
    x, y = torch.ones(2), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            assert program(x, x).tolist() == [2.0, 2.0]
            assert program(x, y).tolist() == [4.0, 4.0]


def test_shapes_orders_and_gradients_that_no_operator_reads_are_conditions() -> None:
    holder: Any = Holder()
    holder.cache, holder.scales = torch.zeros(3), {"a": 2.0, "b": 3.0}
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def step(x: Tensor) -> Tensor:
        for scale in holder.scales.values():
            x = x * scale + 1
        frozen.grad = x.clone()
        return x * int(holder.cache.shape[0] + 1)

    program = capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(8):
            if call == 3:
                holder.cache = torch.zeros(5)
            if call == 5:
                holder.scales["a"] = holder.scales.pop("a")
            assert torch.equal(program(torch.ones(2) * call), step(torch.ones(2) * call)), call
            assert frozen.grad is not None


def test_an_argument_with_gradients_that_is_also_a_variable_is_refused() -> None:
    scale = torch.ones(3, requires_grad=True)
    program = capture(lambda x: x * scale)
    program(scale)
    with pytest.raises(CaptureError, match="argument 0, which requires a gradient, is also"):
        program(scale)


def test_a_captured_method_is_bound_to_each_object() -> None:
    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor, self.shift = torch.tensor(factor), factor

        @capture
        def of(self, x: Tensor) -> Tensor:
            return x * self.factor + self.shift

    first, second = Scale(2.0), Scale(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            assert [each.of(torch.ones(())).item() for each in (first, second)] == [4.0, 6.0]
    first.factor = torch.tensor(5.0)
    assert first.of(torch.ones(())) == 7.0
    assert len(Scale.of.records) == 1


def _of_two_attributes(holder: Any) -> Any:
    def step(x: Tensor) -> Any:
        holder.state = holder.state + x
        return holder.state + 10 * holder.first

    holder.first = holder.state = torch.zeros(3)
    return step, lambda: setattr(holder, "state", holder.first)


def _of_tied_weights(holder: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].weight = model[1].weight
    weight = nn.Parameter(torch.zeros(3, 3))
    return torch.no_grad()(model.forward), lambda: setattr(model[1], "weight", weight)


@pytest.mark.parametrize(("make", "when"), [(_of_two_attributes, 1), (_of_tied_weights, 3)])
def test_places_that_had_one_tensor_are_told_apart(make: Any, when: int) -> None:
    results = []
    for run in (lambda step: step, capture):
        torch.manual_seed(0)
        step, change = make(Holder())
        step, x = run(step), torch.arange(3.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = []
            for call in range(6):
                if call == when:
                    change()
                found.append(step(x))
            results.append(found)
    assert all(map(torch.equal, *results))


def test_a_copy_of_the_owner_of_a_captured_step_has_programs_of_its_own() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(2.0))
            self.fast = capture(self.of)

        def of(self, x: Tensor) -> Tensor:
            return (x * self.factor).detach()

    scale = Scale()
    for _ in range(3):
        scale.fast(torch.ones(()))
    copied = copy.deepcopy(scale)
    nn.init.constant_(copied.factor, 5.0)
    for _ in range(3):
        assert copied.fast(torch.ones(())) == 5.0
    assert scale.fast(torch.ones(())) == 2.0


def _give_other_memory(model: nn.Linear, x: Tensor) -> None:
    model.weight.data = model.weight.data * 2


def _draw_in_python(model: nn.Linear, x: Tensor) -> Tensor:
    return x * random.random()


def _draw_in_numpy(model: nn.Linear, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def _draw_of_a_generator(model: Any, x: Tensor) -> Tensor:
    return x * vars(model).setdefault("draws", random.Random(0)).random()  # type: ignore[no-any-return]


def _draw_of_a_generator_in_numpy(model: Any, x: Tensor) -> Tensor:
    return x * vars(model).setdefault("draws", np.random.default_rng(0)).random()  # type: ignore[no-any-return]


def _give_an_argument_a_gradient(model: nn.Linear, x: Tensor) -> None:
    model(x).sum().backward()


class _Counting(torch.optim.Optimizer):
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1


def _count_in_an_optimizer(model: Any, x: Tensor) -> None:
    vars(model).setdefault("optimizer", _Counting(model.parameters(), {})).step()


class _CountingItself(torch.optim.SGD):
    steps = 0

    def step(self) -> None:  # type: ignore[override]
        self.steps += 1


def _count_as_an_optimizer(model: Any, x: Tensor) -> None:
    vars(model).setdefault("optimizer", _CountingItself(model.parameters())).step()


def _switch_the_mode(model: nn.Module, x: Tensor) -> None:
    model.train(not model.training)


def _switch_functions(model: Any, x: Tensor) -> Any:
    act = vars(model).setdefault("act", torch.sin)
    model.act = torch.cos if act is torch.sin else torch.sin
    return model.act(x)


def _switch_tuples(model: Any, x: Tensor) -> Any:
    sizes = vars(model).setdefault("sizes", (1, 2))
    model.sizes = sizes[::-1]
    return x * sizes[0]


def _replace_a_tuple(model: Any, x: Tensor) -> None:
    model.state = tuple(each + 1 for each in vars(model).setdefault("state", (x.detach(),)))


def _count_in_a_list(model: Any, x: Tensor) -> None:
    counts = vars(model).setdefault("counts", [0])
    counts[0] += 1
    counts.append(1)


def _look_up_sparsely(model: nn.Linear, x: Tensor) -> None:
    F.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("step", "records"), [(_count_as_an_optimizer, 7), (_switch_the_mode, 2)])
def test_a_program_sets_the_counts_and_flags_that_the_step_sets(
    step: Callable[..., Any], records: int
) -> None:
    models = [nn.Linear(3, 3).requires_grad_(False) for _ in range(2)]
    program = capture(lambda x: step(models[1], x), check="always")
    for call in range(8):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(torch.ones(3))
        step(models[0], torch.ones(3))
        states = [(x.training, getattr(getattr(x, "optimizer", None), "steps", 0)) for x in models]
        assert states[0] == states[1], call
    assert len(program._all()) == records


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (_count_in_an_optimizer, "step of a parameter's state"),
        (_switch_functions, "the step replaces model.act, a builtin_function_or_method"),
        (_switch_tuples, r"changes model.sizes\[1\] in Python, from 1 to another object"),
        (_replace_a_tuple, r"makes a tuple with the tensor model.state\[0\]"),
        (_count_in_a_list, r"the step changes .*model.counts"),
        (_look_up_sparsely, "layout torch.sparse_coo"),
        (_give_other_memory, "weight other memory"),
        (_draw_in_python, "Python's random"),
        (_draw_in_numpy, r"numpy\.random"),
        (_draw_of_a_generator, "Python's random"),
        (_draw_of_a_generator_in_numpy, r"numpy\.random"),
        (_give_an_argument_a_gradient, "argument 0 a gradient"),
    ],
)
def test_what_torch_does_not_show_is_refused_and_undone(
    step: Callable[..., Any], message: str
) -> None:
    model = nn.Linear(3, 3)

    def of_model(x: Tensor) -> Any:
        result = step(model, x)
        return result.detach() if isinstance(result, Tensor) else result

    program = capture(of_model)
    program(torch.ones(2, 3).requires_grad_())
    before = [tensor.clone() for tensor in model.parameters()]
    kept = {key: copy.copy(value) for key, value in vars(model).items()}
    x = torch.ones(2, 3).requires_grad_()
    with pytest.raises(CaptureError, match=message):
        program(x)
    assert x.grad is None
    assert all(map(torch.equal, model.parameters(), before))
    kept.update({key: vars(model)[key] for key in ("draws", "optimizer") if key in kept})
    assert vars(model) == kept


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items.__setitem__("mean", items["x"].mean()),
        lambda items: items["list"].append(items["x"].sum()),
        lambda items: items["list"].__setitem__(0, items["list"][0] + 1),
        lambda items: items.__setitem__("count", items["count"] + 1),
        lambda items: items.pop("count"),
    ],
)
def test_a_step_that_changes_a_container_among_the_arguments_is_refused(change: Any) -> None:
    items: dict[str, Any] = {"x": torch.ones(3), "list": [torch.ones(3)], "count": 0}
    program = capture(lambda items: change(items))
    program({**items, "list": list(items["list"])})
    with pytest.raises(CaptureError, match="changes a list or dict among its arguments"):
        program(items)
    assert items["count"] == 0
    assert len(items) == 3
    assert len(items["list"]) == 1


def test_a_backward_pass_into_a_graph_of_before_is_refused() -> None:
    weight = torch.ones(3, requires_grad=True)
    program: Any = capture(lambda x: x.sum().backward())
    program(weight + 1)
    weight.grad = None
    with pytest.raises(CaptureError, match="from argument 0 into a graph"):
        program(weight + 1)
    program = capture(lambda x: torch.autograd.grad(x.square().sum(), x)[0])
    for _ in range(3):
        assert torch.equal(program(weight + 1), torch.full((3,), 4.0))


def test_lengths_of_sequences_are_read_in_each_call() -> None:
    torch.manual_seed(0)
    rnn, x = nn.RNN(2, 3, batch_first=True), torch.randn(2, 4, 2)

    @torch.no_grad()
    def step(x: Tensor, lengths: Tensor) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(rnn(packed)[0], batch_first=True)[0]

    program = capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for short in (2, 2, 2, 3, 2, 3):
            lengths = torch.tensor([4, short])
            assert torch.equal(program(x, lengths), step(x, lengths))
    assert len(program.records) == 2


def test_what_libraries_decide_by_numbers_is_decided_again() -> None:
    def make() -> Any:
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        draws = torch.Generator().manual_seed(3)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x * torch.rand(2, 3, generator=draws)).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)  # which does nothing if a gradient is infinite
            scaler.update()
            return loss.detach()

        return step, tensors_of(model)

    batches = [(torch.randn(2, 3),) for _ in range(10)]
    batches[5] = batches[7] = (torch.full((2, 3), math.inf),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = run_twins(make, batches)
    assert len(program.records) == 2


def test_a_library_that_decides_at_the_start_of_a_step_is_recorded_for_each_way() -> None:
    program = capture(lambda x: F.one_hot(x) * 2)  # as many columns as the greatest number needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for greatest in (2, 2, 3, 2, 3):
            assert program(torch.tensor([0, greatest])).shape == (2, greatest + 1)
    assert len(program.records) == 1


def test_a_view_that_had_to_move_is_refused_where_it_comes_from_outside() -> None:
    def program(rank: int) -> None:
        base = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        view = base[3]
        steps: list[tuple[tuple[Any, ...], Any]] = [((), lambda: view + 1), ((view,), torch.neg)]
        for args, step in steps:
            captured: Any = capture(step)
            captured(*args)
            with pytest.raises(CaptureError, match="Make the view in the step"):
                captured(*args)

    run_ranks(2, program)
