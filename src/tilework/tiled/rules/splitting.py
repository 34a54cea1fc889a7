"""Operators that split a dim: split, chunk, unbind, and their like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import Arg, Decomposition, RuleResult, local_call
from tilework.tiled.op_table import rule
from tilework.tiled.rules.reshaping import dim_at

#: The dim that an operator splits, from the number of dims and the other arguments.
DimOf = Callable[..., int]


def _given_dim(ndim: int, *args: Any, dim: int = 0, **_: Any) -> int:
    return int(args[1]) if len(args) > 1 else dim


#: The dim that each operator splits.
SPLITS: Mapping[str, DimOf] = {
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "tensor_split"), _given_dim),
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"), _given_dim),
    "hsplit": lambda ndim, *_, **__: 0 if ndim == 1 else 1,
    "vsplit": lambda ndim, *_, **__: 0,
    "dsplit": lambda ndim, *_, **__: 2,
}


def split_lengths(
    name: str, input: Arg, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[int]] | None:
    """The dim that a call splits, and the lengths of the parts; None if torch refuses it."""
    on_meta = torch.empty(input.shape, device="meta")
    try:
        dim = SPLITS[name](input.ndim, *args, **kwargs) % input.ndim
        results = getattr(Tensor, name)(on_meta, *args, **kwargs)
        return dim, [result.shape[dim] for result in results]
    except (RuntimeError, IndexError, ZeroDivisionError):  # raised by torch when it is run
        return None


def with_item(items: Sequence[Any], at: int, item: Any) -> list[Any]:
    """A copy of ``items`` with ``item`` at the index ``at``."""
    items = list(items)
    items[at] = item
    return items


def _register(name: str) -> None:
    @rule(name, is_view=not name.startswith("unsafe_"))
    def split_rule(input: Arg, *args: Any, **kwargs: Any) -> RuleResult:
        if any(isinstance(arg, Arg) for arg in (*args, *kwargs.values())):
            return None
        split = split_lengths(name, input, args, kwargs)
        if split is None:
            return None
        dim, lengths = split
        factors = [Factor(size) for size in input.shape]
        before = with_item(factors, dim, Factor(input.shape[dim], unshardable=True))
        outputs = [with_item(factors, dim, Factor(length, unshardable=True)) for length in lengths]
        return local_call({input: before}, outputs, rearranges=True)


for _name in SPLITS:
    _register(_name)


@rule("unbind", is_view=True)
def _unbind(input: Arg, dim: int = 0) -> RuleResult:
    dim = dim_at(dim, input.ndim)
    factors = [Factor(size) for size in input.shape]
    return local_call(
        {input: with_item(factors, dim, Factor(input.shape[dim], unshardable=True))},
        [factors[:dim] + factors[dim + 1 :]] * input.shape[dim],
        rearranges=True,
    )


# -- copies of views -------------------------------------------------------------------------


def _copied(name: str) -> None:
    """Register the rule of ``<name>_copy``, which makes the view ``<name>`` and copies it."""
    view: Any = _view_or_copy if name == "view" else getattr(Tensor, name)

    def compute(*args: Any, **kwargs: Any) -> Any:
        result = view(*args, **kwargs)
        return result.clone() if isinstance(result, Tensor) else tuple([x.clone() for x in result])

    rule(f"{name}_copy")(lambda *_, **__: Decomposition(compute))


def _view_or_copy(tensor: Tensor, size: Any) -> Tensor:
    """The tensor in another dtype or shape, copied where a view is impossible."""
    return tensor.view(size) if isinstance(size, torch.dtype) else tensor.reshape(size)


for _name in (
    *("narrow", "select", "split", "split_with_sizes", "unbind", "diagonal", "expand", "permute"),
    *("squeeze", "unsqueeze", "t", "transpose", "unfold", "view"),
):
    _copied(_name)
