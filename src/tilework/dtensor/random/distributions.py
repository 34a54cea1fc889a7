"""Samples of torch.distributions with DTensors as parameters: all ranks draw the same numbers.

Most distributions draw by torch's factories, which take no tensors. Each rank would get different
numbers in plain tensors, which count as replicated. Therefore ``sample`` and ``rsample`` of every
distribution run in a mode in which these draws use a generator with the same state on all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributions import Distribution, Transform
from torch.overrides import TorchFunctionMode

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.random.generator import next_key, seeded_generator
from tilework.dtensor.random.philox import Key
from tilework.mesh import DeviceMesh

_METHODS = ("sample", "rsample", "sample_n")
#: The names of torch's functions that draw random numbers with a generator.
_TAKES_GENERATOR = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"),
        *("binomial", "_standard_gamma", "_sample_dirichlet", "uniform_", "normal_", "random_"),
        *("bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_"),
    }
)
#: Functions without a generator in some versions of torch, and the methods that fill like them.
_LIKE = {"rand_like": "uniform_", "randn_like": "normal_"}


class _DrawingAlike(TorchFunctionMode):
    """Plain tensors get equal random numbers on all ranks; the first draw is collective."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key: Key | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.empty and "memory_format" not in kwargs:
            return torch.zeros(*args, **kwargs)  # ranks compare contents, which must be the same
        if name not in _TAKES_GENERATOR and name not in _LIKE:
            return func(*args, **kwargs)
        if types or kwargs.get("generator") is not None:  # a DTensor draws by keys
            return func(*args, **kwargs)
        tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
        device = kwargs.get("device") or (torch.get_default_device() if tensor is None else None)
        if device is None:
            assert tensor is not None
            device = tensor.device
        generator = self._generator(torch.device(device))
        if name in _LIKE:
            return getattr(torch.empty_like(*args, **kwargs), _LIKE[name])(generator=generator)
        return func(*args, **kwargs, generator=generator)

    def _generator(self, device: torch.device) -> torch.Generator:
        if self._key is None:
            self._key = next_key(self._mesh)
        if device not in self._generators:
            self._generators[device] = seeded_generator(self._key, device)
        return self._generators[device]


def _mesh_of(distribution: Any) -> DeviceMesh | None:
    """The mesh of the first DTensor among a distribution's parameters; None without DTensors."""
    left, seen = [distribution], set()
    while left:
        each = left.pop()
        if isinstance(each, DTensorBase):
            return each.device_mesh
        if isinstance(each, (Distribution, Transform)) and id(each) not in seen:
            seen.add(id(each))
            left.extend(vars(each).values())
        elif isinstance(each, (list, tuple)):
            left.extend(each)
    return None


def _drawing_alike(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a sampling method: with DTensor parameters, all ranks draw the same numbers."""

    @functools.wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = None if torch.compiler.is_compiling() else _mesh_of(self)
        if mesh is None:
            return original(self, *args, **kwargs)
        with _DrawingAlike(mesh):
            return original(self, *args, **kwargs)

    return sample


def _replace_methods(kind: type) -> None:
    """Wrap a distribution class's own sampling methods; call it once per class."""
    for name in _METHODS:
        if name in vars(kind):
            setattr(kind, name, _drawing_alike(vars(kind)[name]))


def _note_subclass(cls: Any, **kwargs: Any) -> None:
    super(Distribution, cls).__init_subclass__(**kwargs)
    _replace_methods(cls)


_left: list[type] = [Distribution]
_done: set[type] = set()
while _left:
    _kind = _left.pop()
    if _kind not in _done:
        _done.add(_kind)
        _replace_methods(_kind)
        _left.extend(_kind.__subclasses__())
Distribution.__init_subclass__ = classmethod(_note_subclass)  # type: ignore[assignment, arg-type]
