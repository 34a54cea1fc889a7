"""Deep copies: those of tensors that share memory share memory, as torch's do.

Behind them stands a copy of what each tensor is a view of. Views of these are cut off the graph, so
the copies themselves are leaves, and no views of each other.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from tilework.dtensor.base import DTensorBase, DTensorT, base_then, data_of, wrap_as
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.views.copied_views import WATCHED, mark, refresh, same_memory

#: Makes of a tensor another of all of its memory.
_WHOLE = (None, Tensor.detach, data_of)


def deep_copy(tensor: DTensorT, memo: dict[int, Any]) -> DTensorT:
    """A copy that requires no gradient, in one memory with copies of others. Local.

    Args:
        tensor: The tensor, refreshed.
        memo: That of ``copy.deepcopy``.
    """
    known: Any = memo
    copies: _Copies = known.get("tilework") or known.setdefault("tilework", _Copies())
    shown: Any = copies.of(tensor, memo)
    if copies.is_nobodys(shown):
        return shown  # type: ignore[no-any-return]
    return same_memory(shown, shown._local_tensor.data, data_of, apart="data")  # type: ignore[no-any-return]


class _Copies:
    """Copies of tensors and of what they are views of, by the identity of the original."""

    def __init__(self) -> None:
        #: With the originals, which live as long as their identities count.
        self._known: dict[int, tuple[DTensorBase, DTensorBase]] = {}
        #: What views are made of, by the copies that are no views.
        self._data: dict[DTensorBase, DTensorBase] = {}
        self._given: set[DTensorBase] = set()

    def is_nobodys(self, copied: DTensorBase) -> bool:
        """True if nobody has a copy that is no view: the caller has it from now on."""
        if copied._viewed is not None or copied in self._given:
            return False
        self._given.add(copied)
        return True

    def of(self, tensor: DTensorBase, memo: dict[int, Any]) -> DTensorBase:
        """The copy of a tensor, or of one that it shows all of."""
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = (tensor, self._made(tensor, memo))
        return known[1]

    def _made(self, tensor: DTensorBase, memo: dict[int, Any]) -> DTensorBase:
        refresh(tensor)
        view = tensor._view_of
        if view is WATCHED:
            view = None
        base = None if tensor._viewed is None else base_then(tensor)
        if base is not None and tensor._viewed[2] in _WHOLE and view in (None, base._view_of):  # type: ignore[index]
            return self.of(base, memo)
        if view is not None:
            base = view.base
            if view.shares and view.redo in _WHOLE:
                return self.of(base, memo)
        copied = wrap_as(
            type(tensor),
            copy.deepcopy(tensor._local_tensor.detach(), memo),
            tensor._spec,
            tensor._digest if tensor._made is None else digest_of(tensor),
        )
        if base is None:
            return copied
        base = self._base(self.of(base, memo))
        if view is not None:
            mark(copied, base, view.redo, view.write, view.shares)
            base = copied._viewed[0]  # type: ignore[index]
        assert tensor._viewed is not None
        *_, func, args, kwargs = tensor._viewed
        copied._viewed = (base, base._spec, func, (base, *args[1:]), kwargs)
        return copied

    def _base(self, copied: DTensorBase) -> DTensorBase:
        """A copy as the base of others, off the graph in which somebody may have it."""
        if copied._viewed is not None:
            return copied
        if copied not in self._data:
            self._data[copied] = same_memory(
                copied, copied._local_tensor.data, data_of, apart="data"
            )
        return self._data[copied]
