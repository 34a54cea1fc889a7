"""Deep copies: copies of tensors that share memory share memory, as torch's do.

If a tensor is a view, the base is copied too, and the copy of the tensor is a view of that copy. It
is cut off the graph: for autograd all copies are leaves, and none is a view of another.
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
    """A deep copy, which requires no gradient. Local.

    It shares memory with copies in the same ``memo`` if the originals share memory.

    Args:
        tensor: The tensor, refreshed.
        memo: The dict that ``copy.deepcopy`` passes on.
    """
    known: Any = memo
    copies: _Copies = known.get("tilework") or known.setdefault("tilework", _Copies())
    shown: Any = copies.of(tensor, memo)
    if copies.is_nobodys(shown):
        return shown  # type: ignore[no-any-return]
    return same_memory(shown, shown._local_tensor.data, data_of, apart="data")  # type: ignore[no-any-return]


class _Copies:
    """The copies of tensors and their bases made in one ``copy.deepcopy``, by the original."""

    def __init__(self) -> None:
        #: With the originals, which live as long as their identities count.
        self._known: dict[int, tuple[DTensorBase, DTensorBase]] = {}
        #: What views are made of, by the copies that are no views.
        self._data: dict[DTensorBase, DTensorBase] = {}
        self._given: set[DTensorBase] = set()

    def is_nobodys(self, copied: DTensorBase) -> bool:
        """True if a copy is no view, and was not given to anybody. It then counts as given."""
        if copied._viewed is not None or copied in self._given:
            return False
        self._given.add(copied)
        return True

    def of(self, tensor: DTensorBase, memo: dict[int, Any]) -> DTensorBase:
        """The copy of a tensor, or of the base if the tensor shows all of that. Made once."""
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
        """The tensor that serves as the base of copies instead of ``copied``, and is in no graph.

        A copy that is a view serves itself.
        """
        if copied._viewed is not None:
            return copied
        if copied not in self._data:
            self._data[copied] = same_memory(
                copied, copied._local_tensor.data, data_of, apart="data"
            )
        return self._data[copied]
