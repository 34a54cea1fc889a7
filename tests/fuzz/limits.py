"""The language of random programs: what docs/concepts/limits.md leaves out is not said in it.

Left out are these kinds of statements:

- other data (``x.data = y``, ``set_``) for a view, for what was computed from a leaf, for what has
  views in its graph, and for what an operator has kept for its backward pass; of another shape,
  for a leaf;
- dims changed in place of what requires a gradient;
- writes that torch does not count to what an operator has kept for its backward pass;
- ``out=`` that requires a gradient and has another shape; what has another shape and elements, or
  is a view, as ``fairness.py`` sees;
- gradients with respect to a view, where another view has the same base: see limits.md;
- writes to the memory of a view whose gradient has a hook, which torch forgets then, and
  ``requires_grad_(False)`` of the view's leaf;
- writes to what an operator has copied before it kept the copy, as tensordot and attention do where
  they have to, and to what a checkpoint computes from: ranks that need no copy keep what is there;
- gradients of gradients where a tensor has no elements, which torch forgets;
- what depends on how torch loops: see ``fairness.py``.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.fairness import Fairness
from tests.fuzz.language import Run

_GIVEN = re.compile(r"\b(v\d+)\.data\b(?![.\[])")
_SET = re.compile(r"\b(v\d+)\.set_\(")
_DIMS = re.compile(r"\b(v\d+)\.(?:t|transpose|squeeze|unsqueeze|swapaxes|swapdims)_\(")
_OUT = re.compile(r"out=(v\d+)\b(?!\[)")
_UNGRADED = re.compile(r"no_grad|inference_mode")
_SEEN = re.compile(r"\b(?:keep|watch)\((v\d+)|\bgradient\(.*, (v\d+)[,)]")
_HOOKED = re.compile(r"\b(?:watch|keep)\((v\d+)|\b(v\d+)\.register_hook\(")
_RECOMPUTED = re.compile(r"\brecomputed\(lambda.*?: .*, (v\d+), reentrant")
#: Writes that torch does not count.
_UNCOUNTED = re.compile(r"\.data|inference_mode|set_")


class Speaker:
    """Speaks the language: runs statements on plain tensors that are of it.

    Args:
        run: The run, on plain tensors.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        #: The memories that operators have kept for their backward passes.
        self._kept: set[int] = set()
        #: Memories that are not to be written to any more, which live on for their numbers' sake.
        self._fixed: dict[int, Any] = {}
        #: Views whose gradients have hooks.
        self._hooked: list[Tensor] = []

    def says(self, text: str) -> bool:
        """Run a statement, and say if it is of the language; one that is not may be left undone.

        Raises:
            Exception: Torch refuses it.
        """
        if self.leaves_out(text):
            return False
        shapes = {name: x.shape for name, x in self.run.tensors().items() if x.requires_grad}
        fixed = {*self._fixed}
        with Fairness() as operators, self._noting(operators):
            self.run.execute(text)
        self._note_fixed(text)
        if self._reshapes(text, shapes) or not operators.written.isdisjoint(fixed):
            return False
        changed = operators.written if _UNCOUNTED.search(text) else set()
        return operators.is_fair and changed.isdisjoint(self._kept)

    def leaves_out(self, text: str) -> bool:
        """True if a statement is not of the language, whatever it writes."""
        tensors = self.run.tensors()
        target = text.partition(" = ")[0] if " = " in text else ""
        given = [tensors.get(name) for name in _GIVEN.findall(target) + _SET.findall(text)]
        if any(x is not None and not self._takes_data(x) for x in given):
            return True
        ungraded = bool(_UNGRADED.search(text))
        turned = [tensors.get(name) for name in _DIMS.findall(text)]
        if any(x is not None and x.requires_grad for x in turned):
            return True
        resized = [tensors.get(name) for name in _OUT.findall(text)]
        if ungraded and any(x is not None and x.requires_grad for x in resized):
            return True
        seen = [tensors.get(first or second) for first, second in _SEEN.findall(text)]
        if any(x is not None and self._has_sibling(x) for x in seen):
            return True
        leaving = re.findall(r"\b(v\d+)\.requires_grad_\(False", text)
        if any(v._base is tensors.get(name) for name in leaving for v in self._hooked):
            return True
        return "create_graph" in text and not all(x.numel() for x in tensors.values())

    def _takes_data(self, x: Tensor) -> bool:
        if x._is_view() or (x.requires_grad and not x.is_leaf):
            return False
        views = [v for v in self.run.tensors().values() if v._base is x and v.requires_grad]
        return not views and x.untyped_storage()._cdata not in self._kept

    def _reshapes(self, text: str, shapes: dict[str, torch.Size]) -> bool:
        """True if a statement has given a tensor that requires a gradient data of another shape."""
        tensors = self.run.tensors()
        return any(
            name in shapes and name in tensors and tensors[name].shape != shapes[name]
            for name in _GIVEN.findall(text.partition(" = ")[0]) + _SET.findall(text)
        )

    def _has_sibling(self, x: Tensor) -> bool:
        views = [v for v in self.run.tensors().values() if v._base is not None]
        return any(v._base is x._base and v is not x for v in views)

    def _noting(self, operators: Fairness) -> AbstractContextManager[Any]:
        def note(kept: Tensor) -> Tensor:
            number = kept.untyped_storage()._cdata
            self._kept.add(number)
            if number in operators.copies:
                self._fix(operators.copies[number][1])
            return kept.clone()

        return torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept)

    def _note_fixed(self, text: str) -> None:
        """Note what a statement has hooked or has a checkpoint compute from."""
        tensors = self.run.tensors()
        for x in (tensors.get(first or second) for first, second in _HOOKED.findall(text)):
            if x is not None and x.requires_grad and x._is_view():
                self._hooked.append(x)
                self._fix(x)
        for name in _RECOMPUTED.findall(text):
            if name in tensors:
                self._fix(tensors[name])

    def _fix(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        self._fixed[storage._cdata] = storage
