"""Stages: modules that run one part of a model's forward.

A stage runs the model's own forward. Values that other stages make are *ghosts* there: they have a
shape and no memory, and operators on them give ghosts. Values that depend on inputs alone are
computed in every stage. When the forward comes to the stage's first module, the ghosts that were
received become tensors, in place; when it comes to the next stage's first module, it ends.

Each rank follows the whole forward once on ghosts, for each structure of inputs. So all ranks know
which values cross which cut.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_map_only,
)

from tilework.comm.per_call.internal import call_site, unrecorded
from tilework.comm.world import current_world
from tilework.parallel.pipelines.split import Split, copied, stage_of
from tilework.show import bytes_text
from tilework.tiled.rules import call_on_meta

#: The name of a value: ("call", number of the call, leaf of the result), or ("argument", stage,
#: leaf of the arguments of the stage's first call).
Key = tuple[str, int, int]


@dataclass(frozen=True)
class Crossing:
    """A value that crosses cuts."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    #: True if a gradient comes back.
    has_gradient: bool
    text: str

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "a number"
        return f"{self.text} ({shape} {str(self.dtype).removeprefix('torch.')})"


@dataclass(frozen=True)
class Call:
    """A call of a unit, as it was followed on ghosts."""

    name: str
    #: The result: the structure, and the leaves, without memory for tensors.
    spec: Any
    leaves: tuple[Any, ...]


@dataclass
class Route:
    """A forward on ghosts, from which stages know what crosses each cut."""

    calls: list[Call] = field(default_factory=list)
    cuts: list[tuple[Crossing, ...]] = field(default_factory=list)
    #: For each stage, by leaf of the first call's arguments, the values there.
    arguments: list[dict[int, Key]] = field(default_factory=list)
    #: For each stage, the arguments of the first call that are computed in every stage.
    local: list[list[str]] = field(default_factory=list)
    result: Any = None

    @cached_property
    def flat_result(self) -> tuple[list[Any], Any]:
        """The leaves of the result, and the structure."""
        return tree_flatten(self.result)

    def __str__(self) -> str:
        lines = []
        for cut, values in enumerate(self.cuts):
            nbytes = sum(each.dtype.itemsize * math.prod(each.shape) for each in values)
            texts = ", ".join(map(str, values))
            lines.append(f"stage {cut} to {cut + 1}: {texts}: {bytes_text(nbytes)}")
            if self.local[cut + 1]:
                names = ", ".join(self.local[cut + 1])
                lines.append(f"  computed in each stage, from inputs alone: {names}")
        return "\n".join(lines)


class Ghost(Tensor):
    """A tensor that another stage has: shape and dtype, without memory."""

    #: The stage that makes it, and the last stage that uses it.
    made_by: int
    used_by: int
    #: The line that makes it.
    origin: str
    #: Of a value that may cross: the key, and a name for people.
    key: Key | None
    text: str
    #: A tensor on ``meta``.
    shadow: Tensor
    #: The full name, for a parameter.
    parameter: str

    @staticmethod
    @unrecorded
    def __new__(
        cls,
        shadow: Tensor,
        device: torch.device,
        made_by: int,
        origin: str = "",
        parameter: str = "",
    ) -> Ghost:
        ghost: Ghost = Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=device
        )
        ghost.shadow, ghost.made_by, ghost.used_by = shadow, made_by, made_by
        ghost.key, ghost.text, ghost.origin, ghost.parameter = None, "", origin, parameter
        if parameter:
            vars(ghost)["_is_param"] = True  # a module takes it for a parameter
        return ghost

    @classmethod
    @unrecorded
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of a function, which is no part of a captured program."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The result of an operator, as a ghost."""
        return _on_ghosts(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a value of stage {self.made_by}, {tuple(self.shape)} {self.dtype}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Ghost:
        return self


@unrecorded
def _shadow_of(tensor: Tensor) -> Tensor:
    """A tensor on ``meta`` like another, which counts as memory on no pretended rank either."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_ghosts(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    walk = _current.walk
    position = 0 if walk is None else walk.position
    follows = walk if isinstance(walk, GhostWalk) else None
    of_shadow: dict[int, Ghost] = {}

    def lower(value: Any) -> Any:
        if isinstance(value, Ghost):
            if follows is not None:
                follows.use(value)
            of_shadow[id(value.shadow)] = value
            return value.shadow
        if isinstance(value, Tensor):
            return torch.empty_like(value, device="meta")
        return torch.device("meta") if isinstance(value, torch.device) else value

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in of_shadow:
            return of_shadow.get(id(value), value)
        device = next(iter(of_shadow.values())).device
        return Ghost(value, device, position, "" if follows is None else call_site())

    lowered = tree_map(lower, (args, dict(kwargs)))
    if follows is not None:
        follows.check_writes(func, args, kwargs)
    try:
        result = call_on_meta(func, *lowered)
    except (NotImplementedError, RuntimeError) as error:
        text = str(error).lower()
        if "meta" not in text and "data-dependent" not in text:
            raise
        raise RuntimeError(
            f"{func} at {call_site()} needs the values of a tensor that stage "
            f"{max(ghost.made_by for ghost in of_shadow.values())} makes, and a stage sees only "
            f"the shapes of values from other stages: move the cut behind this line, or let the "
            f"line depend on inputs alone"
        ) from error
    if torch.Tag.inplace_view in func.tags:  # as transpose_: the ghost gets the new shape, too
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
    return tree_map(lift, result)


class Reached(BaseException):
    """Ends a stage's forward where the next stage begins."""


class _Current(threading.local):
    walk: Walk | None = None


_current: Final = _Current()


class Walk(ABC):
    """A run of a model's forward, with values on a device."""

    def __init__(self, split: Split, device: torch.device) -> None:
        self.split, self.device = split, device
        #: The stage of the last call.
        self.position = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which this thread's calls of units belong to this walk."""
        before, _current.walk = _current.walk, self
        try:
            yield
        finally:
            _current.walk = before

    @abstractmethod
    def call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's result."""


class GhostWalk(Walk):
    """A forward of the whole model on ghosts, which finds what crosses the cuts."""

    def __init__(self, split: Split, device: torch.device) -> None:
        super().__init__(split, device)
        stages = range(split.stages)
        self.route = Route(arguments=[{} for _ in stages], local=[[] for _ in stages])
        #: Units and parameters of containers, in the order of first uses.
        self.order: list[str] = []
        #: Ghosts that later stages use.
        self.used: list[Ghost] = []
        #: Ghosts that an operator writes to, and the stage that does it.
        self.written: list[tuple[Ghost, int]] = []
        self._is_inside = False

    def use(self, ghost: Ghost) -> None:
        """Note the stage that uses a ghost."""
        is_own = ghost.parameter in self.split.own
        if is_own and ghost.parameter not in self.order:
            self.order.append(ghost.parameter)
        if ghost.parameter and ghost.made_by != self.position:
            hint = "; pass example= to pipeline(), to have the stage found that uses it first"
            raise RuntimeError(
                f"{ghost.parameter} is in stage {ghost.made_by}, and stage {self.position} uses "
                f"it, at {call_site()}: it is on both sides of a cut. Give the second use a module "
                f"besides that shares the parameter (a tie), or move the cut{hint * is_own}"
            )
        if ghost.made_by < self.position:
            if ghost.used_by == ghost.made_by:
                self.used.append(ghost)
            ghost.used_by = self.position

    def check_writes(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Note writes, and refuse those between modules that another stage would not see."""
        for number, schema in enumerate(func._schema.arguments):
            if schema.alias_info is None or not schema.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(schema.name)
            maker = value.made_by if isinstance(value, Ghost) else None
            if isinstance(value, Ghost):
                self.written.append((value, self.position))
            if not self._is_inside and maker != self.position:
                raise RuntimeError(
                    f"{func} at {call_site()} writes in stage {self.position} to a tensor that "
                    f"{'every stage' if maker is None else f'stage {maker}'} makes: write to a "
                    f"copy, or do it in a module"
                )

    def call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's result, in which values have names."""
        name, stage = gate.name, gate.stage
        if stage < self.position:
            raise RuntimeError(
                f"{name} is in stage {stage}, and the model calls it in stage {self.position}: it "
                f"would be on both sides of a cut. Move the cut, or make a second module that "
                f"shares the parameters; where modules run in another order than they are listed, "
                f"pass example= to pipeline()"
            )
        if stage > self.position + 1:
            raise RuntimeError(
                f"the model calls {name} of stage {stage} right after stage {self.position}: "
                f"no module of stage {self.position + 1} runs between"
            )
        if stage > self.position:
            self._name_arguments(name, stage, (args, kwargs))
        self.position, self._is_inside = stage, True
        try:
            result = gate.unit()(*args, **kwargs)
        finally:
            self._is_inside = False
        return self._named(name, result)

    def _name_arguments(self, name: str, stage: int, args: Any) -> None:
        for number, (path, value) in enumerate(tree_flatten_with_path(args)[0]):
            which = keystr(path[1:]).strip("[]'")
            text = f"argument {which} of {name}"
            if isinstance(value, Ghost):
                if value.key is None:
                    value.key, value.text = ("argument", stage, number), text
                self.route.arguments[stage][number] = value.key
            elif isinstance(value, Tensor):
                self.route.local[stage].append(text)

    def _named(self, name: str, result: Any) -> Any:
        """A unit's result as ghosts, also what depends on inputs alone."""
        leaves, spec = tree_flatten(result)
        kept = list(leaves)
        for number, value in enumerate(leaves):
            if isinstance(value, Tensor):
                ghost: Any = value
                if not isinstance(value, Ghost):
                    ghost = Ghost(_shadow_of(value), self.device, self.position)
                if ghost.key is None:
                    ghost.key, ghost.text = ("call", len(self.route.calls), number), name
                leaves[number], kept[number] = ghost, ghost.shadow
        self.route.calls.append(Call(name, spec, tuple(kept)))
        if name not in self.order:
            self.order.append(name)
        return spec.unflatten(leaves)

    def finish(self, result: Any, first_trained: float) -> Route:
        """The route, after the forward; stages from ``first_trained`` on make gradients."""
        last = self.split.stages - 1
        if self.position < last:
            raise RuntimeError(f"the forward ran no module of stage {self.position + 1}")
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, Ghost):
                self.use(leaf)
        self._check_memory()
        cuts: list[list[Crossing]] = [[] for _ in range(last)]
        for ghost in self.used:
            if ghost.key is None:
                raise RuntimeError(
                    f"a tensor that stage {ghost.made_by} makes at {ghost.origin} is used in stage "
                    f"{ghost.used_by}, and is neither a module's result nor an argument of a "
                    f"stage's first module: make it in a module, or move the cut"
                )
            trains = ghost.is_floating_point() and ghost.made_by >= first_trained
            shape = tuple(ghost.shape)
            for cut in cuts[ghost.made_by : ghost.used_by]:
                cut.append(Crossing(ghost.key, shape, ghost.dtype, trains, ghost.text))
        self.route.cuts = [tuple(sorted(each, key=lambda c: c.key)) for each in cuts]
        self.route.result = result
        return self.route

    def _check_memory(self) -> None:
        """Refuse writes to one of two values that share memory before a cut, and not behind."""
        known: dict[int, Ghost] = {}
        for ghost in self.used:
            memory = _memory_of(ghost)
            of = [stage for x, stage in self.written if _memory_of(x) == memory]
            if known.setdefault(memory, ghost) is not ghost and max(of, default=0) > ghost.made_by:
                raise RuntimeError(
                    f"stage {max(of)} writes to one of two values of stage {ghost.made_by} that "
                    f"share memory there, at {ghost.origin or known[memory].origin}, and are sent "
                    f"apart: write to a copy"
                )


def _memory_of(ghost: Ghost) -> int:
    return int(ghost.shadow.untyped_storage()._cdata)


class StageWalk(Walk):
    """A forward of a stage, for inputs with a route, and the values that cross the cut before."""

    def __init__(
        self,
        split: Split,
        device: torch.device,
        stage: int,
        route: Route,
        received: Sequence[Tensor],
    ) -> None:
        super().__init__(split, device)
        self.stage, self.route, self.calls = stage, route, 0
        self.received = received
        self.after = route.cuts[stage] if stage + 1 < split.stages else ()
        #: Values by key: all objects that stand for them.
        self.values: dict[Key, list[Tensor]] = {}
        self._drawn = _random_state() if stage else None

    def call(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A unit's result; of another stage's unit, ghosts. Ends at the next stage."""
        calls = self.route.calls
        expected = calls[self.calls].name if self.calls < len(calls) else "the end"
        if gate.name != expected:
            raise RuntimeError(
                f"the model calls {gate.name} where it called {expected} for inputs of the same "
                f"shapes: stages can follow a forward only if shapes decide what it calls"
            )
        if gate.stage > self.position:
            self._begin(gate.stage, (args, kwargs))
            self.position = gate.stage
        number, self.calls = self.calls, self.calls + 1
        if gate.stage == self.stage:
            result = gate.unit()(*args, **kwargs)
            leaves = tree_flatten(result)[0]
            for crossing in self.after:
                if crossing.key[:2] == ("call", number):
                    self.values[crossing.key] = [leaves[crossing.key[2]]]
            return result
        with torch._C._DisableTorchDispatch():
            leaves = [
                Ghost(x.detach(), self.device, gate.stage) if isinstance(x, Tensor) else x
                for x in calls[number].leaves
            ]
        for leaf, value in enumerate(leaves):
            self.values["call", number, leaf] = [value]
        return calls[number].spec.unflatten(leaves)

    def _begin(self, stage: int, args: Any) -> None:
        """Turn received ghosts into tensors, or end."""
        leaves = tree_flatten(args)[0]
        for number, key in self.route.arguments[stage].items():
            known = self.values.setdefault(key, [])
            if all(leaves[number] is not each for each in known):
                known.append(leaves[number])
        if stage > self.stage:
            raise Reached
        if stage < self.stage:
            return
        if self._drawn is not None and self._drawn != _random_state():
            raise RuntimeError(
                f"the model draws random numbers before stage {stage}, outside of the modules of "
                f"other stages, and each stage would draw others: draw them in a module with "
                f"parameters, or pass them as inputs"
            )
        before = self.route.cuts[stage - 1] if stage else ()
        for crossing, tensor in zip(before, self.received, strict=True):
            own: Tensor = Writable.apply(tensor)  # type: ignore[no-untyped-call]
            for ghost in self.values.pop(crossing.key, ()):
                _become(ghost, own)
            self.values[crossing.key] = [own]

    def sent(self) -> tuple[Tensor, ...]:
        """The values that cross the cut after the stage."""
        return tuple(self.values[each.key][0] for each in self.after)


class Writable(torch.autograd.Function):
    """The same memory, in which the forward may write: it is no leaf, and no view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@unrecorded
def _become(ghost: Tensor, tensor: Tensor) -> None:
    """Make a ghost the tensor, for all that refer to it; in the ghost's dtype."""
    own = tensor.view_as(tensor) if ghost.dtype == tensor.dtype else tensor.to(ghost.dtype)
    try:
        torch.utils.swap_tensors(ghost, own)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RuntimeError(
            "autograd holds a value of another stage, as checkpoint() between modules makes it do: "
            "call checkpoint() in the modules, or wrap them in checkpoint_wrapper"
        ) from error


# -- modules ---------------------------------------------------------------------------------------


class Gate(nn.Module):
    """Stands for a unit while a forward runs, so that the walk sees calls before any wrapper."""

    __slots__ = ("name", "stage", "unit")

    def __init__(self, unit: nn.Module, name: str, stage: int, *, is_here: bool = True) -> None:
        if is_here:
            object.__setattr__(self, "__dict__", unit.__dict__)
        else:
            super().__init__()
        # Weak: the state of captured stages leaves out other stages.
        for key, value in (("unit", ref(unit)), ("name", name), ("stage", stage)):
            object.__setattr__(self, key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's result; of another stage's unit, ghosts."""
        walk = _current.walk
        return self.unit()(*args, **kwargs) if walk is None else walk.call(self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unit(), name)


class Elsewhere(Gate):
    """Stands for a unit that another stage has: no parameters, and ghosts for results."""

    def __init__(self, unit: nn.Module, name: str, stage: int) -> None:
        super().__init__(unit, name, stage, is_here=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ghosts."""
        if _current.walk is None:
            raise RuntimeError(
                f"{self.name} is in stage {self.stage} of a pipeline: call the stages by "
                f"Stages.step() or Stages.evaluate()"
            )
        return super().__call__(*args, **kwargs)

    def extra_repr(self) -> str:
        """The stage."""
        return f"{self.name}, in stage {self.stage}"


class StageModule(nn.Module):
    """Methods that the module of a stage has besides the model's, whose subclass it is."""

    _stage: tuple[Split, int, torch.device]

    def forward(self, received: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """The values that cross the next cut, or the model's result in the last stage.

        ``received`` has the route, and the values that cross the cut before.
        """
        split, stage, device = self._stage
        walk = StageWalk(split, device, stage, received[0], received[1:])
        with self._gates(split, stage), walk.running():
            try:
                result = super().forward(*args, **kwargs)
            except Reached:
                return walk.sent()
        if stage + 1 < split.stages:
            raise RuntimeError(
                f"the model ends in stage {stage}, and went on for inputs of the same shapes: "
                f"stages can follow a forward only if shapes decide what it calls"
            )
        return result

    @contextmanager
    def _gates(self, split: Split, stage: int) -> Iterator[None]:
        """A context in which gates stand in the places of this stage's units."""
        replaced = []
        for name, of in split.units.items():
            if of == stage:
                path, _, key = name.rpartition(".")
                modules: dict[str, Any] = self.get_submodule(path)._modules
                replaced.append((modules, key, modules[key]))
                modules[key] = Gate(modules[key], name, stage)
        try:
            yield
        finally:
            for modules, key, unit in replaced:
                modules[key] = unit


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (StageModule, kind), {"__module__": kind.__module__})
    return _classes[kind]


#: The routes that a twin has found, by inputs. Ghosts in them are no state of a captured step.
_routes: Final[WeakKeyDictionary[Twin, list[tuple[Any, Route]]]] = WeakKeyDictionary()


class Twin:
    """The whole model on ghosts, which finds the routes of inputs."""

    def __init__(self, model: nn.Module, split: Split, device: torch.device) -> None:
        self._split, self._device = split, device
        #: The units by name, with ghosts for parameters.
        self.units: dict[str, nn.Module] = {}
        trained = {
            stage_of(name, split)
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter.requires_grad
        }
        #: The first stage whose results need gradients.
        self.first_trained = min(trained, default=math.inf)

        def unit(name: str, module: nn.Module) -> nn.Module | None:
            if name not in split.units:
                return None
            of = split.units[name]
            self.units[name] = copied(module, partial(_ghost_of, device, of), name=name)
            return Gate(self.units[name], name, of)

        def own(name: str, tensor: Tensor) -> Tensor:
            of = split.own.get(name)
            return tensor.clone() if of is None else _ghost_of(device, of, name, tensor)

        self._model: nn.Module = copied(model, own, unit)
        _routes[self] = []

    def part(self, model: nn.Module, stage: int) -> StageModule:
        """The module of one stage: the model with other stages' units replaced by stand-ins. Local.

        Units are the model's own modules; containers are copies. Names are the model's.
        """
        split, device = self._split, self._device

        def unit(name: str, module: nn.Module) -> nn.Module | None:
            of = split.units.get(name, stage)
            if name in split.containers:
                return None
            return module if of == stage else Elsewhere(self.units[name], name, of)

        def own(name: str, tensor: Tensor) -> Tensor | None:
            return tensor if split.own.get(name, stage) == stage else None

        part: Any = copied(model, own, unit)
        for name, of in split.own.items():
            if of != stage:
                path, _, key = name.rpartition(".")
                container = part.get_submodule(path)
                del container._parameters[key]
                ghost = _ghost_of(device, of, name, model.get_parameter(name))
                object.__setattr__(container, key, ghost)
        part.__class__ = _class_of(type(model))
        object.__setattr__(part, "_stage", (split, stage, device))
        return part  # type: ignore[no-any-return]

    def __str__(self) -> str:
        first = next((str(route) for _, route in _routes[self]), "")
        return first or "what crosses: see after the first step"

    def order(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """Units and parameters of containers, in the order of a forward. Local."""
        walk = GhostWalk(self._split, self._device)
        self._follow(walk, args, kwargs)
        return walk.order

    @unrecorded
    def route(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Route:
        """The route of these inputs, with what crosses the cuts. Local; the same on all ranks."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        kinds = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else _plain(x) for x in leaves]
        device = self._device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        key = (spec, *kinds, training, torch.is_grad_enabled(), casts)
        for known, route in _routes[self]:
            if known == key:
                return route
        self._model.train(training)
        walk = GhostWalk(self._split, self._device)
        route = walk.finish(self._follow(walk, args, kwargs), self.first_trained)
        _routes[self].append((key, route))
        return route

    def _follow(self, walk: Walk, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The forward's result, on ghosts; random generators stay as they are."""
        generator = default_generator()
        state = generator.get_state()
        buffers = [
            (f"{path}.{key}".lstrip("."), module, key, x, x._version)
            for path, module in self._model.named_modules()
            for key, x in module._buffers.items()
            if x is not None and not isinstance(x, Ghost) and not x.is_inference()
        ]
        given = args, dict(kwargs)
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), given)
        versions = _versions((args, kwargs))
        try:
            with walk.running():
                result = self._model(*args, **kwargs)
        finally:
            generator.set_state(state)
        if versions != _versions((args, kwargs)):
            raise RuntimeError(
                "the forward writes to an input, which every stage has, and only one stage would "
                "see it: write to a copy"
            )
        for name, module, key, x, version in buffers:
            is_cache = key in module._non_persistent_buffers_set
            if x._version != version or not (is_cache or module._buffers.get(key) is x):
                raise RuntimeError(
                    f"the forward writes to the buffer {name}, which every stage has, and each "
                    f"would write at another time: let a module with parameters have the buffer"
                )
        return result


def default_generator() -> torch.Generator:
    """The generator that this rank's operators draw from."""
    return current_world().generator or torch.default_generator


@unrecorded
def _random_state() -> bytes:
    return default_generator().get_state().numpy().tobytes()


def _ghost_of(device: torch.device, stage: int, name: str, tensor: Tensor) -> Tensor:
    return Ghost(_shadow_of(tensor), device, stage, parameter=name)


def _versions(values: Any) -> list[int]:
    leaves = tree_flatten(values)[0]
    return [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _plain(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
