"""The base class of DTensor: the fields of an instance, and functions that need only these fields.

Redistribution, gradients and propagation are written with :class:`DTensorBase`. The public class,
``tensor.DTensor``, stands above them and adds the methods. Every instance has the public class.
Code above that class therefore tests ``x.__class__ is DTensor``. Code below cannot import the
class: it tests ``isinstance(x, DTensorBase)``, and makes new tensors with ``type(x)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.layout import Box, Placement, Tiling
from tilework.mesh import DeviceMesh
from tilework.optional_core import core as _core
from tilework.tiled import Handler, TiledTensor, packet_of

DTensorT = TypeVar("DTensorT", bound="DTensorBase")

_make = Tensor._make_wrapper_subclass
_grad_enabled = torch.is_grad_enabled


#: The descriptor of the dict that an instance has.
_fields: Any = Tensor.__dict__["__dict__"]


def _refuse_swapped(grads: Any) -> None:
    raise RuntimeError(
        "backward reached a DTensor that torch.utils.swap_tensors has swapped since forward, as "
        "loading and casting do with set_swap_module_params_on_conversion(True): call backward "
        "before that"
    )


class DTensorBase(TiledTensor):
    """A global shape and a layout on a mesh, and this rank's local tensor."""

    _local_tensor: Tensor
    _spec: DTensorSpec
    #: Records of the gradient, and of a tensor that is a gradient.
    _grads: GradRecord | None = None
    #: Of a view that is to be checked before use: if elements were moved, how the tensor is cut off
    #: the graph of these: "" (not at all), "detach" or "data". See ``views/moved_views.py``.
    _view_of: str | None = None
    #: Of a view: the tensor that it was made of, and the call.
    _viewed: Viewed | None = None
    #: The memory, which views share; made by ``own_memory``.
    _memory: Memory | None = None
    #: The provenance digest; None: the digest of the contents. See ``dtensor.provenance``.
    _digest: int | None = None
    #: Of a view: how it was made of what it shows, which then counts too.
    _made: int | None = None
    #: True if it was made while gradients were off, as the results of a user's own Function are.
    _made_without_grad: bool = False

    @property
    def __dict__(self) -> dict[str, Any]:
        fields: dict[str, Any] = _fields.__get__(self)
        return fields

    @__dict__.setter
    def __dict__(self, fields: dict[str, Any]) -> None:
        """Take the fields of another tensor, as ``torch.utils.swap_tensors`` does. Local.

        A view of this tensor becomes the owner of the memory. A graph to this tensor's former local
        tensor raises in backward, as it does for plain tensors.
        """
        viewed = fields.get("_viewed")
        while viewed is not None and viewed[0] is not self:
            viewed = viewed[0]._viewed
        if viewed is not None:
            fields.update(_viewed=None)
        local = _fields.__get__(self).get("_local_tensor")
        if local is not None and local.is_leaf and local.requires_grad:
            get_gradient_edge(local).node.register_prehook(_refuse_swapped)
        _fields.__set__(self, fields)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of the layout."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placement along each axis of the mesh."""
        return self._spec.placements

    @property
    def tiling(self) -> Tiling:
        return self._spec.tiling

    def local_tiles(self) -> list[Tensor]:
        """The local tensor in a list, or the views of it that are the rank's boxes."""
        return [tile for local in self.local_memory() for tile in self._spec.tiles_of(local)]

    def local_memory(self) -> list[Tensor]:
        """The local tensor in a list; an empty list outside the mesh."""
        return [self._local_tensor] if self._spec.takes_part else []

    def local_boxes(self) -> list[Box]:
        if self._spec.partial_axes:
            raise TypeError(
                f"{self!r} is not reduced yet, so no rank has values of a part: reduce it first, "
                f"with redistribute(placements=…)"
            )
        return list(self._spec.local_boxes)

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """The full value on every rank; see :meth:`DTensor.full_tensor`. Collective."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.shape)

    def dim(self) -> int:
        """The number of dims: a method, as rules ask for it at every call."""
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._local_tensor.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local_tensor.device


def _wrap_as(
    kind: type[DTensorT], local: Tensor, spec: DTensorSpec, digest: int | None = None
) -> DTensorT:
    """The tensor of a class, unchecked; the provenance digest is by default the contents'."""
    tensor: DTensorT = _make(
        kind, spec.size, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
    )
    tensor._local_tensor = local
    tensor._spec = spec
    tensor._digest = digest
    if not _grad_enabled():
        tensor._made_without_grad = True
    return tensor


wrap_as = _wrap_as if _core is None else _core.wrap_as


def local_tensor_of(tensor: DTensorBase) -> Tensor:
    """The memory of this rank, whatever its place in the graph. Unchecked; local."""
    return tensor._local_tensor


def layout_of(tensor: DTensorBase) -> DTensorSpec:
    """The layout of a tensor. Unchecked; local."""
    return tensor._spec


def given_digest(tensor: DTensorBase) -> int:
    """The digest that the tensor was given; 0 if none. Local."""
    return tensor._digest or 0


def defer_grad(tensor: DTensorBase, reduce: Callable[[], None] | None) -> None:
    """Let ``tensor.grad`` call ``reduce`` before it is read; None: no longer. Local."""
    grads_of(tensor).deferred = reduce


def deferred_grad(tensor: DTensorBase) -> Callable[[], None] | None:
    """The function that :func:`defer_grad` was given; None if none waits. Local."""
    return None if tensor._grads is None else tensor._grads.deferred


def forget_grad(tensor: DTensorBase) -> None:
    """Forget the DTensor that ``tensor.grad`` returned: the local gradient is another. Local."""
    grads_of(tensor).shown = None


# -- records that a tensor keeps -------------------------------------------------------------


class Memory:
    """Counts of writes, and other records, of the memory that a tensor shares with views of it.

    ``root`` is the record of the memory, if torch counts writes to the tensors with this record
    separately, as for ``data`` and for copies; ``shows`` the source of the elements, if a view had
    to move them.
    """

    #: The number of writes, those included that torch does not count; and the last one.
    writes: int = 0
    writer: str = ""
    #: The provenance digest of all writes.
    digest: int = 0
    #: Autograd's number at the last write that torch counts.
    written_at: int = -1
    #: Views that a user's own Function took.
    taken: tuple[ref[DTensorBase], ...] = ()
    #: Local tensors with a count of writes of their own, which the program was given.
    counters: tuple[Tensor, ...] = ()
    #: A local tensor of it, the numbers of writes to that and of changes of the mode when it was
    #: last hashed, and the digest of that.
    content: tuple[Tensor, int, int, int] | None = None

    def __init__(self, root: Memory | None = None, shows: Snapshot | None = None) -> None:
        self.root, self.shows = root, shows

    def counting_on(self, before: Memory) -> Memory:
        """This record, for a tensor that had another record: torch's own count continues."""
        self.written_at, self.taken = before.written_at, before.taken
        return self


class Snapshot:
    """Elements that were copied from a base, which a view with this local tensor shows.

    ``redo`` makes the same view of a given tensor, a DTensor or a plain tensor; ``write`` writes
    the view's value (the second argument) to the base (the first).
    """

    __slots__ = ("base", "base_spec", "count", "local", "own_count", "redo", "spec", "write")

    def __init__(
        self, base: DTensorBase, local: Tensor, spec: DTensorSpec, redo: Redo, write: Write
    ) -> None:
        self.base, self.base_spec = base, base._spec
        self.local, self.spec, self.redo, self.write = local, spec, redo, write
        #: The numbers of writes, to the base and to the copy, when both were last equal.
        self.count = self.own_count = 0


class GradRecord:
    """Records of a tensor's gradient, and of a tensor that is a gradient."""

    __slots__ = ("aliases", "cleared", "deferred", "noted", "shown")

    def __init__(self) -> None:
        #: The gradient as it was last asked for.
        self.shown: Any = None
        #: Of a leaf with a gradient that is not reduced yet: reduces it, and adds it to ``grad``.
        self.deferred: Callable[[], None] | None = None
        #: The number of backward passes when the gradient was last cleared.
        self.cleared = 0
        #: Of a gradient: the digest that it was last given, and that of what was written to it.
        self.noted: tuple[int, int | None] | None = None
        #: The local tensor at places in the graph where gradients are partial, by the axes.
        self.aliases: dict[Ints, Alias] = {}

    def forget(self) -> None:
        """Drop what was known of the tensor's gradient: the tensor shows other memory."""
        self.shown, self.aliases = None, {}


class Alias(NamedTuple):
    """A tensor's local memory, at a place in the graph where gradients are partial."""

    tensor: Tensor
    #: The local tensor that the alias stands for.
    local: Tensor
    #: The node that had computed ``local`` when the alias was made; None for a leaf. Once ``local``
    #: has another node, the alias is out of date.
    grad_fn: Any


class Place(NamedTuple):
    """A local tensor at a place in the graph, and the layout at that place."""

    local: Tensor
    spec: DTensorSpec


#: The tensor that a view was made of; the layout that it had then; the call that made the view,
#: with the tensor as its first argument, or None for the whole tensor; and how that tensor was made
#: of another one, or where it begins in its memory. A plain tuple, for views are made in a few
#: microseconds.
Viewed = tuple["DTensorBase", DTensorSpec, Any, tuple[Any, ...], dict[str, Any], Any]


def data_of(tensor: Tensor) -> Tensor:
    """The tensor's data: the same memory, whose writes torch does not count."""
    return tensor.data


#: Calls that make views outside of the graph.
APART = (Tensor.detach, data_of)


def grads_of(tensor: DTensorBase) -> GradRecord:
    """The record of a tensor's gradient, made if there is none."""
    grads = tensor._grads
    if grads is None:
        grads = tensor._grads = GradRecord()
    return grads


def own_memory(tensor: DTensorBase) -> Memory:
    """The record of a tensor, shared with tensors whose writes torch counts together."""
    memory = tensor._memory
    if memory is None:
        memory = tensor._memory = Memory()
    return memory


def memory_of(tensor: DTensorBase) -> Memory:
    """The memory that a tensor would show if it were plain; for a copy, the memory of the base."""
    memory = tensor._memory or own_memory(tensor)
    return memory.root or memory


def is_moved(tensor: DTensorBase) -> bool:
    """True if a tensor shows a copy of elements of a base, since they had to move."""
    return tensor._view_of is not None and own_memory(tensor).shows is not None


def owner_of(tensor: DTensorBase) -> DTensorBase:
    """The tensor that has the memory of a view; the tensor itself if there is no other.

    If that tensor has got other data or dims since, the first remaining view of the memory.
    """
    while (viewed := tensor._viewed) is not None and viewed[0]._spec is viewed[1]:
        tensor = viewed[0]
    return tensor


def base_in_graph(tensor: DTensorBase) -> DTensorBase | None:
    """The tensor that a view was made of; None for no view, or one outside of the graph."""
    if tensor._viewed is None or tensor._viewed[2] in APART:
        return None
    return tensor._viewed[0]


def root_in_graph(tensor: DTensorBase) -> DTensorBase:
    """The last base in the graph, following views of views; the tensor itself without a base."""
    while (base := base_in_graph(tensor)) is not None:
        tensor = base
    return tensor


#: A view of a DTensor, and of a plain tensor likewise.
Redo = Callable[[Any], Any]
#: Writes a view's value (the second) to what it is a view of (the first).
Write = Callable[[Any, Any], None]


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor so far; 0 for inference tensors, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def writes_to(base: DTensorBase) -> int:
    """The number of writes to the memory of a base, those to local tensors included."""
    memory = memory_of(base)
    locals_ = [base._local_tensor, *memory.counters]
    if (owner := owner_of(base)) is not base:
        locals_.append(owner._local_tensor)
    return memory.writes + sum(map(version_of, locals_))


def writes_beside(leaves: Iterable[DTensorBase]) -> int:
    """The number of writes to leaves' memory, without those to their local tensors alone."""
    count = 0
    for leaf in leaves:
        if (memory := leaf._memory) is not None:
            memory = memory.root or memory
            count += memory.writes
            if memory.counters:
                count += sum(map(version_of, memory.counters))
    return count


def is_stale(tensor: DTensorBase) -> bool:
    """True for a copy of elements of a base if the base has other values now."""
    shown = own_memory(tensor).shows
    return shown is not None and (
        is_stale(shown.base)
        or shown.base._spec is not shown.base_spec
        or writes_to(shown.base) != shown.count
        or version_of(shown.local) != shown.own_count
    )


#: What runs each function on DTensors; filled when a function is first met.
HANDLERS: dict[Any, Handler] = {}


def forget_handler(func: Any) -> None:
    """Look up a function's handler again at the next call."""
    packet = packet_of(func)
    for known in list(HANDLERS):
        if known is func or packet_of(known) is packet:
            del HANDLERS[known]
