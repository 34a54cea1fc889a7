"""A model in life, plain or wrapped, and what users do to it.

Each public method of :class:`Body` is an act. Acts run on the plain model and on ranks, by the
same code; a :class:`~tests.parallel.sides.Side` has what differs. An act returns values to compare,
or raises :class:`Skip` where it makes no sense now.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.parallel.lives.model import made, routed, rows
from tests.parallel.lives.ways import WAYS
from tests.parallel.sides import Side, clip_norm
from tilework import checkpoint
from tilework.dtensor import DTensor, distribute_tensor, verify
from tilework.parallel import DistributedDataParallel, FSDPModule

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-2}),
}
DTYPES = {"double": torch.float64, "float": torch.float32, "half": torch.float16}
MODULES = ("first", "second.up", "spare", "head", "norm", "")
Values = dict[str, Any]


class Skip(Exception):
    """The act makes no sense now."""


class UserError(Exception):
    """A mistake in a user's code, in the middle of a step."""


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@dataclass
class Setting:
    """Where a model lives.

    Attributes:
        ranks: How many ranks there are.
        side: The side of a way of wrapping.
        is_plain: True for the model beside the ranks.
        folder: For checkpoints; the same on all ranks.
        is_compared: False: losses are not looked at, which would take a collective.
    """

    ranks: int
    side: Callable[[str], Side]
    is_plain: bool
    folder: str = ""
    is_compared: bool = True


class Body:
    """A model in life.

    Args:
        setting: Where it lives.
        way: The name of the way of wrapping.
        seed: Of the first values.
        batch_norm: The norm's kind.
        dtype: A name of DTYPES.
    """

    def __init__(self, setting: Setting, way: str, seed: int, batch_norm: bool, dtype: str) -> None:
        self.setting, self.batch_norm, self.resumes = setting, batch_norm, 0
        self.is_plain = setting.is_plain
        self.dtype = DTYPES[dtype]
        self.tolerance = 1e-7 if dtype == "double" else 1e-3
        self.pending: list[Any] = []
        self.handles: list[Any] = []
        #: Those of hooks that halve what has been accumulated.
        self.halving: list[Any] = []
        self.saved: dict[str, Tensor] = {}
        #: True if a graph is pending whose backward computes parts of forward again.
        self.is_recomputed = False
        #: True if a graph is pending in which ranks have used different parts.
        self.is_uneven = False
        #: True if some gradients are those of this rank alone.
        self.is_unsynced = False
        #: True if parameters have other names or places than at first.
        self.is_altered = False
        self._wrap(way, made(batch_norm, seed, self.dtype))
        self.new_optimizer("sgd")

    def _wrap(self, way: str, model: nn.Module) -> None:
        self.way, self.groups = way, WAYS[way].groups(self.setting.ranks)
        self.side = self.setting.side(way)
        self.model: Any = self.side.wrap(model)
        self.scheduler: Any = None
        self.ema: Any = None

    @property
    def own(self) -> Any:
        """The module within a wrapper."""
        model = self.model
        return model.module if isinstance(model, DistributedDataParallel) else model

    def recover(self) -> None:
        """Go on after an error, as users do who catch it."""
        self.pending.clear()
        self.model.zero_grad()
        self.is_unsynced = False

    def _mean(self, loss: Tensor) -> Tensor:
        return self.side.mean(loss) if self.setting.is_compared else torch.zeros(())

    # -- forward -----------------------------------------------------------------------------

    def _output(self, model: Any, seed: int, routes: Sequence[int], mode: str) -> Any:
        routes = [routes[0]] * (self.groups - 1) + [routes[0 if self.batch_norm else -1]]
        x, target = rows(seed, self.dtype)
        batch = self.side.share({"x": x, "y": target})
        x = batch["x"]
        if mode == "penalty":
            x = x.clone().requires_grad_()
        if mode == "autocast" and self.dtype == torch.float32:
            self.tolerance = 0.1
        with torch.autocast("cpu", torch.bfloat16) if mode == "autocast" else nullcontext():
            if self.is_plain:
                return routed(model, x, routes, mode), batch["y"], x
            group: Any = getattr(self.side, "group", None)
            route = routes[0 if group is None else group.rank()]
            return model(x, route, mode), batch["y"], x

    def _loss(self, seed: int, routes: Sequence[int], mode: str, model: Any = None) -> Any:
        out, target, x = self._output(self.model if model is None else model, seed, routes, mode)
        loss = (out - target).square().mean()
        if mode == "penalty":
            (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = loss + 0.1 * slope.square().mean()
        return loss

    def forward(self, seed: int, routes: Sequence[int], mode: str) -> Values:
        if len(self.pending) > 2:
            raise Skip
        loss = self._loss(seed, routes, mode)
        self.is_recomputed = mode in ("recomputed", "reentrant") or self._is_recomputed()
        self._append(loss, routes)
        return {"loss": self._mean(loss)}

    def _append(self, loss: Any, routes: Sequence[int]) -> None:
        self.is_uneven = len(set(routes)) > 1 or (bool(self.pending) and self.is_uneven)
        self.pending.append(loss)

    def _is_recomputed(self) -> bool:
        return bool(self.pending) and self.is_recomputed

    def forward_twice(self, seed: int, routes: Sequence[int]) -> Values:
        if len(self.pending) > 2:
            raise Skip
        loss = self._loss(seed, routes, "") + self._loss(seed + 1, routes, "")
        self._append(loss, routes)
        return {"loss": self._mean(loss)}

    def look_without_gradients(self, seed: int, inference: bool, back: bool) -> Values:
        """An evaluation, after which training goes on or has been forgotten."""
        self.model.eval()
        with torch.inference_mode() if inference else torch.no_grad():
            loss = self._mean(self._loss(seed, (0,), ""))
        if back:
            self.model.train()
        return {"loss": loss.clone()}

    def train_mode(self) -> None:
        self.model.train()

    def fail_in_forward(self, where: str, seed: int) -> None:
        def fail(*_: Any) -> None:
            raise UserError("in forward")

        handle = self.own.get_submodule(where).register_forward_hook(fail)
        try:
            self._loss(seed, (0,), "")
        finally:
            handle.remove()

    def fail_in_backward(self, where: str, seed: int) -> None:
        def fail(_: Tensor) -> None:
            raise UserError("in backward")

        def watch(_: Any, args: Any, output: Any) -> None:
            output.register_hook(fail)

        handle = self.own.get_submodule(where).register_forward_hook(watch)
        try:
            self._loss(seed, (0,), "").backward()
        finally:
            handle.remove()

    # -- backward and steps ------------------------------------------------------------------

    def _pending(self, which: int) -> Any:
        if not self.pending:
            raise Skip
        return self.pending[which % len(self.pending)]

    def backward(self, which: int, retain: bool, keep: bool) -> None:
        """Backward of a loss; ``keep`` forgets that the graph is used up."""
        loss = self._pending(which)
        if not (retain or keep):
            self.pending = [other for other in self.pending if other is not loss]
        loss.backward(retain_graph=retain)
        self.is_unsynced = False

    def backward_of_some(self, which: int, name: str) -> None:
        """Backward to the parameters of one module alone."""
        loss = self._pending(which)
        if self.is_unsynced or self.is_uneven:
            raise Skip
        self.pending = [other for other in self.pending if other is not loss]
        loss.backward(inputs=list(self.own.get_submodule(name).parameters()))

    def input_gradient(self, seed: int) -> Values:
        """A gradient that no parameter gets."""
        out, _, x = self._output(self.model, seed, (0,), "penalty")
        (slope,) = torch.autograd.grad(out.square().sum(), x)
        return {"slope": self._mean(slope.square().mean())}

    def forget(self) -> None:
        self.pending.clear()

    def accumulate(self, seed: int, routes: Sequence[int], mode: str) -> Values:
        if any(handle in self.handles for handle in self.halving):
            raise Skip  # a hook runs once for all that is accumulated without communication
        with self.side.without_sync(self.model):
            loss = self._loss(seed, routes, mode)
            loss.backward()
        self.is_unsynced = True
        return {"loss": self._mean(loss)}

    def train(self, seed: int, routes: Sequence[int], mode: str) -> Values:
        """A whole step."""
        self.optimizer.zero_grad()
        self.model.zero_grad()
        self.is_unsynced = False
        loss = self._loss(seed, routes, mode)
        loss.backward()
        self.optimizer.step()
        return {"loss": self._mean(loss)}

    def step(self) -> None:
        if self.is_unsynced:
            raise Skip
        self.optimizer.step()

    def step_with_closure(self, seed: int, routes: Sequence[int]) -> Values:
        def closure() -> Any:
            self.model.zero_grad()
            loss = self._loss(seed, routes, "")
            loss.backward()
            return loss

        self.is_unsynced = False
        return {"loss": self._mean(self.optimizer.step(closure))}

    def zero_grad(self, set_to_none: bool, of_optimizer: bool) -> None:
        if of_optimizer and not self.is_unsynced:
            self.optimizer.zero_grad(set_to_none)
            return
        self.model.zero_grad(set_to_none)
        # Some ranks may have zeros now, and others nothing.
        self.is_unsynced = self.is_unsynced and not set_to_none

    def clip(self, norm: float, kind: float) -> Values:
        if self.is_unsynced:
            raise Skip
        total = clip_norm(self.own.parameters(), norm, kind)
        return {"norm": self.side.whole(total)}

    def clip_value(self, most: float) -> None:
        if self.is_unsynced:
            raise Skip
        torch.nn.utils.clip_grad_value_(self.own.parameters(), most)

    def scale_gradients(self, by: float, drop: int) -> None:
        """What users do to gradients before a step; ``drop``: the number of one that is dropped."""
        if self.is_unsynced:
            raise Skip
        for number, parameter in enumerate(self.own.parameters()):
            if number == drop:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.mul_(by)

    def new_optimizer(self, kind: str) -> None:
        self.kind, self.scheduler = kind, None
        self.optimizer = self.side.optimizer(self.model.parameters(), *OPTIMIZERS[kind])

    def schedule(self) -> None:
        if self.scheduler is None:
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        else:
            self.scheduler.step()

    # -- the parameters ----------------------------------------------------------------------

    def freeze(self, name: str, freezes: bool) -> None:
        self.own.get_submodule(name).requires_grad_(not freezes)

    def cast(self, dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self.tolerance = max(self.tolerance, 1e-7 if dtype == "double" else 1e-3)
        self.model.to(self.dtype)

    def cast_there_and_back(self, dtype: str) -> None:
        self.tolerance = max(self.tolerance, 5e-3 if dtype == "half" else 1e-5)
        self.model.to(DTYPES[dtype]).to(self.dtype)

    def save_weights(self) -> None:
        state = self.own.state_dict()
        self.saved = {name: self.side.whole(value) for name, value in state.items()}

    def load_weights(self, assign: bool, renew: bool) -> None:
        if not self.saved:
            raise Skip
        self._check_may_replace()
        state = {name: value.clone() for name, value in self.saved.items()}
        if assign:
            state = {name: value.to(self.dtype) for name, value in state.items()}
            now = self.own.state_dict()
            state = {name: self._like(value, now.get(name)) for name, value in state.items()}
        self.own.load_state_dict(state, assign=assign)
        if assign and renew:
            self.new_optimizer(self.kind)

    def _like(self, value: Tensor, other: Any) -> Tensor:
        """A value as users of this way would have it: whole, or cut by tensor parallelism."""
        if isinstance(other, DTensor) and not isinstance(self.own, FSDPModule):
            return distribute_tensor(value, other.device_mesh, other.placements)
        return value

    def _check_may_replace(self) -> None:
        if self._is_recomputed():  # backward would mix the old and the new, in torch as well
            raise Skip

    def write(self, number: int, by: float, kind: str) -> None:
        """A parameter is written by hand."""
        parameters = list(self.own.parameters())
        parameter = parameters[number % len(parameters)]
        if kind != "no_grad" and self.pending:
            raise Skip
        if kind == "no_grad":
            with torch.no_grad():
                parameter.mul_(by)
        elif kind == "data":
            parameter.data.mul_(by)
        else:
            parameter.data = parameter.data * by

    def replace(self, name: str, seed: int, renew: bool) -> None:
        self._check_may_replace()
        module = self.own.get_submodule(name)
        if parametrize.is_parametrized(module):
            raise Skip
        generator = torch.Generator().manual_seed(seed)
        old = module.weight
        value = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(self.dtype)
        module.weight = nn.Parameter(self._like(value, old), old.requires_grad)
        if renew:
            self.new_optimizer(self.kind)

    def tie(self, renew: bool) -> None:
        self._check_may_replace()
        if parametrize.is_parametrized(self.own.first.up):
            raise Skip
        self.is_altered = True
        self.own.second.up.weight = self.own.first.up.weight
        if renew:
            self.new_optimizer(self.kind)

    def drop_bias(self, name: str, renew: bool) -> None:
        self._check_may_replace()
        self.is_altered = True
        self.own.get_submodule(name).register_parameter("bias", None)
        if renew:
            self.new_optimizer(self.kind)

    def parametrize(self, name: str, renew: bool) -> None:
        self._check_may_replace()
        module = self.own.get_submodule(name)
        if parametrize.is_parametrized(module):
            raise Skip
        self.is_altered = True
        parametrize.register_parametrization(module, "weight", Doubled())
        if renew:
            self.new_optimizer(self.kind)

    # -- copies ------------------------------------------------------------------------------

    def average(self, seed: int, swap: bool) -> Values:
        """An average of the weights: made, moved towards them, or taken over."""
        if self.ema is None:
            self.ema = copy.deepcopy(self.own)
            return {}
        names = [[n for n, _ in m.named_parameters()] for m in (self.ema, self.own)]
        if names[0] != names[1]:
            self.ema = None
            raise Skip
        with torch.no_grad():
            for old, new in zip(self.ema.parameters(), self.own.parameters(), strict=True):
                old.lerp_(new.to(old.dtype), 0.3)
        if swap:
            self.own.load_state_dict(self.ema.state_dict())
        with torch.no_grad():
            if next(self.ema.parameters()).dtype != self.dtype:
                return {}
            return {"loss": self._mean(self._loss(seed, (0,), "", self.ema))}

    def go_on_with_a_copy(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.handles.clear()
        self.is_unsynced = False
        self.model.zero_grad()
        self.new_optimizer(self.kind)

    def move(self, way: str) -> None:
        """Into another way, by a state dict."""
        self._check_goes_into(way)
        state = {name: self.side.whole(v) for name, v in self.own.state_dict().items()}
        self._begin_again(way)
        self.own.load_state_dict(state)
        self.new_optimizer(self.kind)

    def resume(self, way: str) -> None:
        """Into another way, by a checkpoint on disk, with the optimizer."""
        self._check_goes_into(way)
        if self.is_plain:
            state = copy.deepcopy([self.own.state_dict(), self.optimizer.state_dict()])
            self._begin_again(way)
            self.new_optimizer(self.kind)
            self.own.load_state_dict(state[0])
            self.optimizer.load_state_dict(state[1])
            return
        self.resumes += 1
        folder = f"{self.setting.folder}/{self.resumes}"
        checkpoint.save({"model": self.model, "optimizer": self.optimizer}, folder)
        self._begin_again(way)
        self.new_optimizer(self.kind)
        checkpoint.load(folder, into={"model": self.model, "optimizer": self.optimizer})

    def _check_goes_into(self, way: str) -> None:
        if self.is_altered or self.setting.ranks not in WAYS[way].ranks:
            raise Skip

    def _begin_again(self, way: str) -> None:
        self.pending.clear()
        self.handles.clear()
        self.is_unsynced = False
        self._wrap(way, made(self.batch_norm, 0, self.dtype))

    # -- hooks and settings ------------------------------------------------------------------

    def hook(self, kind: str, name: str) -> None:
        module = self.own.get_submodule(name)
        if kind == "forward":
            handle = module.register_forward_hook(lambda m, args, out: out * 0.5)
        elif kind == "before":
            handle = module.register_forward_pre_hook(lambda m, args: (args[0] * 0.5, *args[1:]))
        elif kind == "backward":
            handle = module.register_full_backward_hook(
                lambda m, into, out: tuple(None if g is None else g * 2 for g in into)
            )
        else:
            parameter = next(module.parameters())
            if not parameter.requires_grad:
                raise Skip
            if kind == "gradient":
                handle = parameter.register_hook(lambda grad: grad * 2)
            else:
                handle = parameter.register_post_accumulate_grad_hook(_halve)
                self.halving.append(handle)
        self.handles.append(handle)

    def unhook(self) -> None:
        if not self.handles:
            raise Skip
        self.handles.pop().remove()

    def gather_by_hand(self, frees: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.unshard()
            if frees:
                self.model.reshard()

    def keep_gathered(self, after_forward: bool, after_backward: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_reshard_after_forward(after_forward)
            self.model.set_reshard_after_backward(after_backward)

    def spoil(self) -> None:
        """Write this rank's parameters."""
        for parameter in self.own.parameters():
            parameter.data.mul_(1.5)

    # -- looking -----------------------------------------------------------------------------

    def look(self) -> Values:
        """Parameters, buffers and gradients."""
        values: Values = {}
        for name, parameter in self.own.named_parameters():
            values[name] = self.side.whole(parameter)
            if not self.is_unsynced:
                grad = parameter.grad
                values[f"{name}.grad"] = None if grad is None else self.side.whole(grad)
        for name, buffer in self.own.named_buffers():
            values[name] = self.side.whole(buffer)
        return values

    def look_at_states(self) -> Values:
        """The optimizer's states."""
        values: Values = {}
        if self.way == "zero":
            return values
        for name, parameter in self.own.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    values[f"{name}.{key}"] = self.side.whole(value)
        return values

    def verify(self) -> None:
        if not self.is_plain:
            verify(self.own)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
