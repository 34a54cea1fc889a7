"""Tensors that wrap others, as torch and its users make them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class Wrapper(Tensor):
    """A tensor without memory of its own, as torch's wrappers of others."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, (4,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise NotImplementedError(func)
