"""Results of models: what microbatches can make together, and what is refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from tilework.parallel.pipeline.stage import Ghost, Route


def check_results(
    part: Any, whole: Any, rows: int, all_rows: int, is_weighted: bool, is_single: bool
) -> None:
    """Refuse a result that cannot be joined. Local; the same on all ranks.

    Args:
        part: A microbatch's result, on ghosts.
        whole: The result of the whole batch, on ghosts.
        rows: The rows of the microbatch.
        all_rows: The rows of the batch.
        is_weighted: True if the caller said how numbers are weighted.
        is_single: True if the microbatch is the whole batch.

    Raises:
        ValueError: A value of the result is neither a tensor of rows, nor a weighted number.
    """
    known, own = _named(whole), _named(part)
    for name in {**own, **known}:
        value, expected = own.get(name), known.get(name)
        if isinstance(value, Tensor) and isinstance(expected, Tensor):
            shape = (all_rows, *value.shape[1:]) if value.dim() else ()
            is_row = tuple(expected.shape) == shape and value.shape[:1] == (rows,)
            is_number = not value.dim() and value.is_floating_point() and is_weighted
            if is_single or is_row or (is_number and not expected.dim()):
                continue
        elif value is None and expected is None:
            continue
        raise ValueError(
            f"evaluate() gives tensors whose dim 0 has the rows of the inputs, alone or in a "
            f"tuple, list, dict or Hugging Face's output, and result{name} is {_text(value)} for "
            f"{rows} rows, {_text(expected)} for all {all_rows}: pass loss=, ask "
            f"for another of the results (in Hugging Face's models use_cache=False, no hidden "
            f"states, no attentions), or, for a loss that the model computes, pass weight="
        )


def check_made(result: Any, route: Route, *, exactly: bool) -> None:
    """Refuse a result of the last stage that is another than on ghosts. Local.

    Args:
        result: What the last stage made of a microbatch.
        route: The microbatch's route.
        exactly: True to compare shapes and dtypes, too.

    Raises:
        ValueError: Values are missing, are of other stages, or have other shapes.
    """
    expected, spec = tree_flatten(route.result)
    leaves, own = tree_flatten(result)
    differs = exactly and [*map(_kind, leaves)] != [*map(_kind, expected)]
    if own != spec or differs or any(isinstance(leaf, Ghost) for leaf in leaves):
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


def _kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else type(value)


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{'an empty ' if _is_empty(value) else ''}{type(value).__name__}"
    return f"{list(value.shape)} {value.dtype}"


def _texts(values: list[Any]) -> str:
    return ", ".join(map(_text, values)) or "nothing"
