"""Symbols for sizes, with which a compiler compiles a program once for several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._guards import TracingContext, tracing

from tilework.capture.program.graph import Hole


class Symbols:
    """The symbols of a program's holes in torch's compiler, and the compiler's assumptions.

    Integers that are equal in the example ``values`` share a symbol, and so must those of any other
    record. Other constants must be the same.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        from torch._dynamo.source import LocalSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        self._values = list(values)
        #: By integer of the example, the symbol.
        self._symbols: dict[int, Any] = {}
        self._nodes: dict[int, SymInt] = {}
        for number, value in enumerate(values):
            if _is_size(value) and value not in self._symbols:
                source = LocalSource(f"k{number}")
                symbol: Any = self._env.create_symbol(value, source, DimDynamic.DYNAMIC)
                self._symbols[value] = symbol
                node: Any = self._env.create_symintnode(symbol, hint=value, source=source)
                self._nodes[value] = node

    def at(self, number: int) -> Any:
        """The example of a hole for the compiler: a symbol, or the constant itself."""
        value = self._values[number]
        return self._nodes[value] if _is_size(value) else value

    def tensor(self, like: Tensor, shape: Sequence[int | Hole] = ()) -> Tensor:
        """A fake tensor, the compiler's example of the input; contiguous if ``shape`` has holes."""
        extents = [self.at(x.number) if isinstance(x, Hole) else x for x in shape]
        if not any(isinstance(each, Hole) for each in shape):
            return self._mode.from_tensor(like, static_shapes=True)
        with self._mode:
            return torch.empty(extents, dtype=like.dtype, device=like.device)

    def tracing(self) -> AbstractContextManager[Any]:
        """Within the block, torch's compiler may take a program of one size from the cache."""
        if self._values:  # a program from the cache would not show all that it assumes
            return nullcontext()
        return tracing(TracingContext(self._mode))

    def hold(self, values: Sequence[Any]) -> bool:
        """True if the compiler's assumptions hold for the constants ``values``."""
        known: dict[Any, int] = {}
        for value, mine in zip(values, self._values, strict=True):
            if not (_is_size(value) and _is_size(mine)):
                if value is not mine and (type(value), repr(value)) != (type(mine), repr(mine)):
                    return False
            elif known.setdefault(self._symbols[mine], value) != value:
                return False
        for symbol, value in known.items():
            limits = self._env.var_to_range[symbol]
            if not limits.lower <= value <= limits.upper:
                return False
            found = self._env.replacements.get(symbol, symbol)
            if found.xreplace(known) != value:
                return False
        return all(bool(guard.expr.xreplace(known)) for guard in self._env.guards)


def _is_size(value: Any) -> bool:
    """True for an integer that becomes a symbol: compilers treat 0 and 1 as constants."""
    return type(value) is int and value >= 2
