"""The tensors in the outputs of a module: sequences, mappings, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, local_of, wrap


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value, in a fixed order."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            _collect(each, found)
    elif isinstance(value, Mapping):
        for each in value.values():
            _collect(each, found)
    elif _is_dataclass(value):
        for field in dataclasses.fields(value):
            _collect(getattr(value, field.name, None), found)


def replace_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a value with changed tensors; parts without changes are not copied."""
    if isinstance(value, Tensor):
        return change(value)
    parts = _parts_of(value)
    changed = {key: replace_tensors(part, change) for key, part in parts.items()}
    if all(changed[key] is part for key, part in parts.items()):
        return value
    return _with_parts(value, changed)


def _parts_of(value: Any) -> dict[Any, Any]:
    if isinstance(value, PackedSequence):
        return {key: part for key, part in value._asdict().items() if key != "batch_sizes"}
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, Mapping):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    changed: Any
    if _is_dataclass(value):
        changed = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(changed, name, part)
        if isinstance(value, Mapping):  # such as transformers' ModelOutput
            for key in value:
                dict.__setitem__(changed, key, getattr(changed, key))
        return changed
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        for key, part in parts.items():
            changed[key] = part
        return changed
    if isinstance(value, PackedSequence):
        return PackedSequence(**{**value._asdict(), **parts})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts.values())
    return type(value)(parts.values())


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def leaves_of_graph(outputs: Iterable[Tensor]) -> set[int]:
    """The ids of the leaf tensors that the graphs of ``outputs`` reach."""
    tensors = list(outputs)
    nodes = accumulators(t.grad_fn for t in tensors if t.grad_fn is not None)
    leaves = {id(node.variable) for node in nodes}
    return leaves.union(id(tensor) for tensor in tensors if tensor.grad_fn is None)


def accumulators(nodes: Iterable[Any]) -> list[Any]:
    """All nodes behind ``nodes`` that accumulate the gradient of a leaf, ``variable``."""
    seen: set[Any] = set()
    found = []
    todo = [node for node in nodes if node is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is not None:
            found.append(node)
        todo.extend(after for after, _ in node.next_functions if after is not None)
    return found


class BackwardStart(torch.autograd.Function):
    """The identity; backward calls a function, then passes the gradients on."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors themselves, as views."""
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradients."""
        ctx.call()
        return None, *grads


def call_at_backward(value: Any, call: Callable[[], None]) -> Any:
    """A copy of an output; ``call`` runs once when backward reaches the copy."""
    tensors = [
        tensor for tensor in tensors_of(value) if tensor.requires_grad and _has_graph(tensor)
    ]
    if not tensors:
        return value
    # A DTensor's local tensor carries the graph.
    nodes = [local_of(t) if isinstance(t, DTensor) else t for t in tensors]
    results = BackwardStart.apply(call, *nodes)  # type: ignore[no-untyped-call]
    changed = {
        id(old): wrap(new, layout_of(old)) if isinstance(old, DTensor) else new
        for old, new in zip(tensors, results, strict=True)
    }
    return replace_tensors(value, lambda tensor: changed.get(id(tensor), tensor))


def _has_graph(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) or isinstance(tensor, DTensor)


def call_before_backward(value: Any, call: Callable[[], None], inputs: Any) -> Any:
    """Run ``call`` when backward reaches an output, which is copied only if it must."""
    passed = {id(tensor) for tensor in tensors_of(inputs)}
    nodes: dict[Any, None] = {}
    for tensor in tensors_of(value):
        if tensor.requires_grad and _has_graph(tensor):
            node = (local_of(tensor) if isinstance(tensor, DTensor) else tensor).grad_fn
            if node is None or id(tensor) in passed:
                return call_at_backward(value, call)
            nodes[node] = None
    for node in nodes:
        node.register_prehook(lambda _: call())
    return value
