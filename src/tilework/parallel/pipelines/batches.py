"""Batches cut into microbatches, and results that microbatches make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

from tilework.parallel.pipelines.stage import Ghost, Route

#: How losses of microbatches make the loss of a batch: "rows": means over rows; "sum": they add up;
#: a function from a microbatch's target to the weight of the microbatch's mean.
Weight = Literal["rows", "sum"] | Callable[[Any], Any]


def rows_of(values: Any) -> int:
    """The rows of a batch."""
    leaves = [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]
    rows = {each.shape[0] if each.dim() else -1 for each in leaves}
    if len(rows) != 1 or -1 in rows:
        shapes = ", ".join(str(list(each.shape)) for each in leaves) or "no tensor"
        raise ValueError(
            f"inputs and target are cut along dim 0, and need equally many rows there, got "
            f"{shapes}: what has no rows belongs into the model, or into the loss"
        )
    return rows.pop()


def cut_batch(values: Any, rows: int, count: int) -> list[Any]:
    """The values of each microbatch."""
    if rows < max(count, 1):
        raise ValueError(
            f"the batch has {rows} rows, and the schedule {count} microbatches: each needs a row"
        )
    leaves, spec = tree_flatten(values)
    cut = [x.tensor_split(count) if isinstance(x, Tensor) else [x] * count for x in leaves]
    return [tree_unflatten([each[number] for each in cut], spec) for number in range(count)]


def weights_of(targets: Sequence[Any], rows: Sequence[int], weight: Weight) -> list[float]:
    """The factor of each microbatch's loss in the loss of the batch."""
    if weight == "sum":
        return [1.0] * len(rows)
    if weight == "rows":
        return [each / sum(rows) for each in rows]
    if not callable(weight):
        raise ValueError(f'weight is "rows", "sum" or a function of the target, got {weight!r}')
    counts = [float(weight(each)) for each in targets]
    if not sum(counts):
        raise ValueError("weight= counts no element in this batch: the mean of nothing is no loss")
    return [each / sum(counts) for each in counts]


def joined(results: Mapping[int, Any], weights: Sequence[float]) -> Any:
    """The results of microbatches: tensors with rows one after the other, weighted numbers."""
    parts = [results[number] for number in range(len(weights))]
    if len(parts) == 1:
        return parts[0]

    def total(*each: Tensor) -> Tensor:
        return sum((x * w for x, w in zip(each, weights, strict=True)), start=each[0].new_zeros(()))

    def join(*each: Any) -> Any:
        if isinstance(each[0], Tensor):
            return torch.cat(each) if each[0].dim() else total(*each)
        return each[0]

    return tree_map(join, *parts)


def check_results(
    results: Mapping[int, Any],
    routes: Sequence[Route],
    whole: Any,
    rows: Sequence[int],
    is_weighted: bool,
) -> None:
    """Refuse results of microbatches that cannot be joined to ``whole``, a ghost. Local."""
    known = _named(whole)
    for number, part in results.items():
        check_made(part, routes[number])
        own = _named(part)
        for name in {**own, **known}:
            value, expected = own.get(name), known.get(name)
            if not _joins(value, expected, rows, number, is_weighted):
                raise ValueError(
                    f"evaluate() gives tensors whose dim 0 has the rows of the inputs, alone or in "
                    f"a tuple, list, dict or Hugging Face's output, and result{name} is "
                    f"{_text(value)} for {rows[number]} rows, {_text(expected)} for all "
                    f"{sum(rows)}: pass loss=, ask for another of the results (in Hugging Face's "
                    f"models use_cache=False, no hidden states, no attentions), or, for a loss "
                    f"that the model computes, pass weight="
                )


def _joins(value: Any, whole: Any, rows: Sequence[int], number: int, is_weighted: bool) -> bool:
    if not (isinstance(value, Tensor) and isinstance(whole, Tensor)):
        return value is whole is None or (len(rows) == 1 and type(value) is type(whole))
    is_same = value.dtype == whole.dtype and tuple(value.shape[1:]) == tuple(whole.shape[1:])
    if len(rows) == 1 or not value.dim():
        is_number = value.is_floating_point() and is_weighted
        return is_same and value.shape == whole.shape and (len(rows) == 1 or is_number)
    return is_same and (value.shape[0], whole.shape[:1]) == (rows[number], (sum(rows),))


def check_made(result: Any, route: Route) -> None:
    """Refuse a result of the last stage that lacks values, or has other stages'. Local."""
    expected, spec = route.flat_result
    leaves, own = tree_flatten(result)
    if own != spec or any(isinstance(leaf, Ghost) for leaf in leaves):
        raise ValueError(
            f"the model's result has {_texts(expected)}, and the last stage made "
            f"{_texts(leaves)}: values that hooks or caches collect in the modules of other "
            f"stages are not there. Do not ask for them (in Hugging Face's models "
            f"use_cache=False, no hidden states, no attentions), or return what modules return"
        )


def _named(result: Any) -> dict[str, Any]:
    """Values by path; an empty container is a value, as a collection of other stages may be."""
    pairs = tree_flatten_with_path(result, is_leaf=_is_empty)[0]
    return {keystr(path): value for path, value in pairs}


def _is_empty(value: Any) -> bool:
    return isinstance(value, tuple | list | dict) and not value


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{'an empty ' if _is_empty(value) else ''}{type(value).__name__}"
    return f"{list(value.shape)} {value.dtype}"


def _texts(values: list[Any]) -> str:
    return ", ".join(map(_text, values)) or "nothing"
