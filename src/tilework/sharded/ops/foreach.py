"""torch._foreach_*, as optimizers call them: the operator on each tensor of the lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.sharded.registry import Handler


def _each(operator: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
        def at(i: int, value: Any) -> Any:
            return value[i] if isinstance(value, list | tuple) else value

        results = []
        for i in range(len(args[0])):
            others = {name: at(i, value) for name, value in kwargs.items()}
            results.append(operator(*(at(i, value) for value in args), **others))
        return results

    return handler


def _addc(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``addcmul`` or ``addcdiv``, whose factor is positional in the lists' form."""

    def run(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
        return operator(x, a, b, value=value)

    return run


def _in_place(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator that has no form of its own that writes its first argument."""

    def run(x: Tensor, *args: Any) -> Tensor:
        return x.copy_(operator(x, *args))

    return run


def _operator(name: str) -> Callable[..., Any] | None:
    found: Any = getattr(Tensor, name, None)
    if name.startswith("addc"):
        return _addc(found)
    if found is None and name.endswith("_"):
        plain = getattr(Tensor, name[:-1], None)
        return plain and _in_place(plain)
    return found  # type: ignore[no-any-return]


def _table() -> dict[Callable[..., Any], Handler]:
    found = {}
    for full in dir(torch):
        name = full.removeprefix("_foreach_")
        operator = _operator(name) if name != full else None
        if operator is not None:
            found[getattr(torch, full)] = _each(operator)
    return found


TABLE: dict[Callable[..., Any], Handler] = _table()
