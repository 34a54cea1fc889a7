"""Effects of a step besides operators, and effects that happen only once."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tilework.capture.program.place import plain
from tilework.capture.recording.places import StatePlaces
from tilework.comm.world import current_world
from tilework.errors import CaptureError


def told_apart(leaves: Sequence[Any], places: StatePlaces) -> dict[int, Any]:
    """Aliases, by position, of arguments that are also variables: the recorder tells them apart."""
    result: dict[int, Any] = {}
    for number, leaf in enumerate(leaves):
        is_known = isinstance(leaf, Tensor) and id(plain(leaf)) in places.tensors
        if is_known and leaf.requires_grad:
            raise CaptureError(
                f"argument {number}, which requires a gradient, is also a tensor to which the step "
                f"refers: a program could not know whose gradient is whose. Pass x.detach(), or "
                f"another tensor"
            )
        if is_known:
            with torch.enable_grad():  # the result of this call keeps the graph
                result[number] = leaf.view_as(leaf) if leaf.requires_grad else leaf.detach()
    return result


class Unseen:
    """The state before a step of things that a step may change without an operator."""

    def __init__(self, places: StatePlaces, leaves: Sequence[Any]) -> None:
        self._places, self._leaves = places, leaves
        self._memories = [(tensor, tensor.detach()) for tensor in places.plain_tensors()]
        self._grads = [leaf.grad if _is_leaf(leaf) else None for leaf in leaves]
        self._draws = _python_draws(places)
        #: Names of tensors through whose graphs, made before the step, a backward pass went.
        self._left: list[str] = []
        self._watched = list(self._watch_graphs())
        self._made = self._made_once()

    def makes_anything_once(self) -> bool:
        """True if the step has made groups or optimizer states, which later calls will not make."""
        return not self._made_once() <= self._made

    def _made_once(self) -> set[Any]:
        states = {
            (id(optimizer), id(owner), key)
            for optimizer in self._places.instances(Optimizer)
            for owner, state in optimizer.state.items()
            for key in (state if isinstance(state, dict) else ())
        }
        return states | set(current_world().records)

    def _watch_graphs(self) -> Iterator[Any]:
        named = [(f"argument {number}", leaf) for number, leaf in enumerate(self._leaves)]
        for name, tensor in (*named, *[(place.text, x) for place, x in self._places.slots]):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                yield tensor.grad_fn.register_prehook(lambda _, name=name: self._left.append(name))

    def close(self) -> None:
        """Stop watching graphs."""
        for each in self._watched:
            each.remove()

    def refuse_changes(self) -> None:
        """Refuse (CaptureError) effects of the step that a program would not repeat."""
        if _python_draws(self._places) != self._draws:
            raise CaptureError(
                "the step draws from a generator of Python's random, or of numpy.random: a "
                "program would use the numbers of this call again. Draw with torch (torch.rand, "
                "and torch.where), or pass what is drawn as a tensor"
            )
        if self._left:
            raise CaptureError(
                f"the backward pass of the step continues from {self._left[0]} into a graph that "
                f"was made before the step; a program would not. Compute the tensor there, or "
                f"return torch.autograd.grad(loss, x), and call x.backward(gradient) after the step"
            )
        for tensor, memory in self._memories:
            if tensor.data_ptr() != memory.data_ptr():
                raise CaptureError(
                    f"the step gives {self._places.tensors[id(tensor)].text} other memory, as "
                    f".data = does: a program would keep the old. Write x.data.copy_(…), or "
                    f"an operator that works in place (mul_, lerp_), instead of x.data = …"
                )
        for number, (leaf, grad) in enumerate(zip(self._leaves, self._grads, strict=True)):
            if _is_leaf(leaf) and leaf.grad is not grad:
                raise CaptureError(
                    f"the step gives argument {number} a gradient: a program knows no other tensor "
                    f"than the argument of this call to give it to. Return torch.autograd.grad("
                    f"loss, x), or begin the step with x = x.detach().requires_grad_()"
                )

    def undo(self) -> None:
        """Give tensors the memory, and arguments the gradients, that they had before the step."""
        for tensor, memory in self._memories:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        for leaf, grad in zip(self._leaves, self._grads, strict=True):
            if _is_leaf(leaf):
                leaf.grad = grad


def _is_leaf(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_leaf


def _python_draws(places: StatePlaces) -> list[Any]:
    """The states of generators of Python's random and numpy: the global ones, and the step's."""
    numpy = sys.modules.get("numpy")
    states: list[Any] = [random.getstate()]
    states += [each.getstate() for each in places.instances(random.Random)]
    if numpy is not None:
        states.append(numpy.random.get_state())
        states += [each.get_state() for each in places.instances(numpy.random.RandomState)]
        states += [each.bit_generator.state for each in places.instances(numpy.random.Generator)]
    return [x.tobytes() if hasattr(x, "tobytes") else x for x in tree_leaves(states)]
