"""The parameters and buffers that a module has: changes between steps are noticed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from tilework.parallel.stale_optimizers import ParameterPlaces
from tilework.tiled import TiledTensor


class Members:
    """The submodules and parameters that some modules had; compared in C in each step."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tables: list[Mapping[str, Any]] = [
            *(each._modules for each in modules),
            *(each._parameters for each in modules),
        ]
        #: Kept alive, so that no other object can get the same ids.
        self._held = list(_values(self._tables))
        self._ids = list(map(id, self._held))

    def is_current(self) -> bool:
        """True unless submodules or parameters were added, replaced or removed."""
        return list(map(id, _values(self._tables))) == self._ids


class ModuleStructure:
    """The modules and parameters within a module; compared in C in each step."""

    def __init__(self, module: nn.Module) -> None:
        #: Every module once, with the name.
        self.modules = list(module.named_modules())
        every = [each for _, each in self.modules]
        #: Every parameter once, with the name.
        self.parameters = _named(self.modules)
        self._parameters: list[Mapping[str, Any]] = [each._parameters for each in every]
        self._members = Members(every)
        self._buffers: list[Mapping[str, Any]] = [each._buffers for each in every]
        self.places = ParameterPlaces(module)
        self._held = [p for p in _values(self._parameters) if p is not None]
        self._kinds = list(map(_kind, self._held))
        #: The parameters with local tensors, and the local tensors.
        self._tiled = [p for p in self._held if isinstance(p, TiledTensor)]
        self._tiles = [p.local_memory() for p in self._tiled]

    def is_current(self, module: nn.Module) -> bool:
        """True unless modules or parameters were added, replaced, removed, frozen or cast."""
        return (
            self.modules[0][1] is module
            and self._members.is_current()
            and list(map(_kind, self._held)) == self._kinds
            and all(
                list(map(id, parameter.local_memory())) == list(map(id, tiles))
                for parameter, tiles in zip(self._tiled, self._tiles, strict=True)
            )
        )

    def named_buffers(self) -> Iterable[tuple[str, Tensor]]:
        """Every current buffer once, with the name."""
        seen: set[int] = set()
        for prefix, owner in self.modules:
            for name, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    yield _joined(prefix, name), buffer

    def has_buffers(self) -> bool:
        """True if a module has a buffer now."""
        return any(self._buffers)


def _named(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Parameter]]:
    named: dict[nn.Parameter, str] = {}
    for prefix, owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter not in named:
                named[parameter] = _joined(prefix, name)
    return [(name, parameter) for parameter, name in named.items()]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _values(mappings: Iterable[Mapping[str, Any]]) -> Iterable[Any]:
    return chain.from_iterable(map(dict.values, mappings))  # type: ignore[arg-type]


_kind = attrgetter("requires_grad", "dtype")
