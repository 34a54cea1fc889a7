"""Results of models: what microbatches can make together, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from tilework.parallel.pipelines.stage import Ghost, Route


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
