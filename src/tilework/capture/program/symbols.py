"""Inputs of a program of several sizes for a compiler that knows symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

from tilework.capture.program.sizes import Size, has_size


class Symbols:
    """A symbol for the size in torch's compiler, and what the compiler has assumed of the size.

    Args:
        size: An example of the size, by which the compiler optimizes.
    """

    def __init__(self, size: int) -> None:
        from torch._dynamo.source import LocalSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env)
        source = LocalSource("size")
        self._symbol: Any = self._env.create_symbol(size, source, DimDynamic.DYNAMIC)
        self.size: SymInt = self._env.create_symintnode(self._symbol, hint=size, source=source)  # type: ignore[assignment]

    def tensor(self, like: Tensor, shape: Sequence[int | Size] = ()) -> Tensor:
        """A fake tensor, without elements, that the compiler takes as an example of an input.

        Args:
            like: A tensor of the program at the size.
            shape: The shape in the program. If it depends on the size, the fake tensor is
                contiguous. If not, and for (), it is laid out like ``like``.
        """
        if not has_size(tuple(shape)):
            return self._mode.from_tensor(like, static_shapes=True)
        extents: list[Any] = [self._extent(each) for each in shape]
        with self._mode:
            return torch.empty(extents, dtype=like.dtype, device=like.device)

    def _extent(self, extent: int | Size) -> Any:
        if not isinstance(extent, Size):
            return extent
        return (self.size * extent.factor + extent.addend) // extent.divisor

    def hold(self, size: int) -> bool:
        """True if all that the compiler has assumed of the size is true of ``size``."""
        if self._symbol in self._env.replacements:
            return bool(self._env.replacements[self._symbol] == size)
        limits = self._env.var_to_range[self._symbol]
        guards = [guard.expr.xreplace({self._symbol: size}) for guard in self._env.guards]
        return bool(limits.lower <= size <= limits.upper) and all(map(bool, guards))
