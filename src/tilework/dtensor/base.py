"""The base class of DTensor: the fields of an instance, and functions that need only these fields.

Redistribution, gradients and propagation are written with :class:`DTensorBase`. The public class,
``tensor.DTensor``, stands above them and adds the methods. Every instance has the public class.
Code above that class therefore tests ``x.__class__ is DTensor``. Code below cannot import the
class: it tests ``isinstance(x, DTensorBase)``, and makes new tensors with ``type(x)``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.layout import Box, Placement, Tiling
from tilework.mesh import DeviceMesh
from tilework.tiled.tensor import TiledTensor

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
    #: The gradient as it was last asked for.
    _grad: DTensorBase | None = None
    #: Of a leaf with a gradient that is not reduced yet: reduces it, and adds it to ``grad``.
    _deferred_grad: Callable[[], None] | None = None
    #: The base of a copied view, and how to keep both in step.
    _view_of: View | None = None
    #: Of a view: the tensor whose memory it shares.
    _viewed: Viewed | None = None
    #: The memory, unless this is a view; made by ``memory_of``. For ``data``, a separate count.
    _memory: Memory | None = None
    #: The tensors that stand for this tensor: as the base of copied views, and as it was before it
    #: was given other data or other dims. See ``anchor_in`` and ``base_then``.
    _stand_ins: tuple[DTensorBase, ...] = ()
    #: The provenance digest; None: the digest of the contents. See ``dtensor.provenance``.
    _digest: int | None = None
    #: Of a view: how it was made of what it shows, which then counts too.
    _made: int | None = None
    #: Of a leaf: the number of backward passes when the gradient was last cleared.
    _cleared: int = 0
    #: Of a gradient: the digest that it was last given, and that of what was written to it.
    _noted: tuple[int, int | None] | None = None
    #: True if it was made while gradients were off, as the results of a user's own Function are;
    #: a record of a view of what requires a gradient.
    _made_without_grad: bool | Ungraded = False
    #: Places in the graph other than the local tensor's, if there are any.
    _places: Places | None = None

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
        before = _fields.__get__(self)
        viewed = fields.get("_viewed")
        while viewed is not None and viewed[0] is not self:
            viewed = viewed[0]._viewed
        if viewed is not None:
            fields.update(_viewed=None, _view_of=None, _memory=before.get("_memory"))
        local = before.get("_local_tensor")
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
        """The local tensor in a list; an empty list outside the mesh."""
        return [self._local_tensor] if self._spec.takes_part else []

    def local_boxes(self) -> list[Box]:
        if self._spec.partial_axes:
            raise TypeError(
                f"{self!r} is not reduced yet, so no rank has values of a part: reduce it first, "
                f"with redistribute(placements=…)"
            )
        return [self._spec.local_box] if self._spec.takes_part else []

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """The full value on every rank; see :meth:`DTensor.full_tensor`. Collective."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._spec.size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._local_tensor.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local_tensor.device


def wrap_as(
    kind: type[DTensorT], local: Tensor, spec: DTensorSpec, digest: int | None = None
) -> DTensorT:
    """The tensor with this local tensor and layout. Unchecked; local.

    Args:
        kind: The class DTensor.
        local: This rank's local tensor.
        spec: The layout.
        digest: The provenance digest; None: the digest of the contents.
    """
    tensor: DTensorT = _make(
        kind,
        spec.size,
        dtype=local.dtype,
        device=local.device,
        requires_grad=local.requires_grad,
    )
    tensor._local_tensor = local
    tensor._spec = spec
    tensor._digest = digest
    if not _grad_enabled():
        tensor._made_without_grad = True
    return tensor


# -- records that a tensor keeps -------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Memory:
    """Counts of writes, and other records, of the memory that a tensor shares with views of it.

    A tensor that is given other data leaves the memory to the views.
    """

    #: The number of writes, those included that torch does not count.
    writes: int = 0
    #: The provenance digest of all writes.
    digest: int = 0
    #: Copied views whose local tensors were handed out.
    handed_out: list[Any] | None = None
    #: Views in the graph of a leaf, or views without elements on some rank.
    graph_views: list[ref[DTensorBase]] | None = None
    #: Autograd's number at the last write that torch counts.
    written_at: int = -1
    #: Views that a user's own Function took.
    taken: list[ref[DTensorBase]] | None = None
    #: A local tensor of it, the numbers of writes to that and of changes of the mode when it was
    #: last hashed, and the digest of that.
    content: tuple[Tensor, int, int, int] | None = None

    def of_other_data(self) -> Memory:
        """The new record for a tensor that is given other data: torch's own count continues."""
        return Memory(written_at=self.written_at, taken=self.taken)


class Alias(NamedTuple):
    """The same local memory as a tensor at a place in the graph where gradients are partial."""

    tensor: Tensor
    #: The local tensor that the alias stands for.
    local: Tensor
    #: The node that had computed ``local`` when the alias was made; None for a leaf. Once ``local``
    #: has another node, the alias is out of date.
    grad_fn: Any


class Place(NamedTuple):
    """A local tensor at a place in the graph, and the layout at that place.

    Attributes:
        local: The local tensor.
        spec: The layout.
    """

    local: Tensor
    spec: DTensorSpec


class Ungraded(NamedTuple):
    """A view that was made without gradients, of a tensor that requires a gradient."""

    #: The local tensor that has the memory.
    local: Tensor
    #: torch's count of writes to ``local`` at the time when the view was made.
    version: int


class Places:
    """The places of a tensor in the graph other than the local tensor's."""

    __slots__ = ("aliases", "before", "gone", "refuses")

    def __init__(self) -> None:
        #: Where gradients are partial, by their axes.
        self.aliases: dict[Ints, Alias] = {}
        #: Of a stand-in: the local tensor that it had before, of the same memory.
        self.before: Tensor | None = None
        #: Of a stand-in: True if the tensor was given other data; and if views made before may
        #: not be used where gradients are recorded.
        self.gone = self.refuses = False


def places_of(tensor: DTensorBase) -> Places:
    """The places of a tensor in the graph other than the local tensor's."""
    if tensor._places is None:
        tensor._places = Places()
    return tensor._places


#: The tensor that a view was made of; the layout that it had then, which forms in place such as
#: ``t_`` change; and the call that made the view, with the tensor as its first argument, or None
#: for the whole tensor. A plain tuple, for views are made in a few microseconds.
Viewed = tuple["DTensorBase", DTensorSpec, Any, tuple[Any, ...], dict[str, Any]]


class ViewedInPlace(Viewed):
    """A tensor that an operator in place made a view of an anchor. For torch it is not a view."""

    __slots__ = ()


def data_of(tensor: Tensor) -> Tensor:
    """The tensor's data: the same memory, whose writes torch does not count."""
    return tensor.data


def owner_of(tensor: DTensorBase) -> DTensorBase:
    """The tensor that owns the memory of a view; the tensor itself if it is not a view.

    If the owner was given other data since, the first view of the memory that is left.
    """
    while (viewed := tensor._viewed) is not None:
        base = viewed[0]
        if base._spec is not viewed[1]:
            then = base_then(tensor)
            if then is None:
                return tensor
            base = then
        tensor = base
    return tensor


def memory_of(tensor: DTensorBase) -> Memory:
    """The memory that a tensor shows."""
    return own_memory(owner_of(tensor))


def own_memory(owner: DTensorBase) -> Memory:
    """The memory record of a tensor that is not a view; made if there is none.

    ``x.data`` has a record of its own, since torch counts writes to it separately.
    """
    if owner._memory is None:
        owner._memory = Memory()
    return owner._memory


def base_then(tensor: DTensorBase) -> DTensorBase | None:
    """The tensor that a view was made of, or the stand-in that keeps the layout of that time.

    None if no other tensor has that layout any more.

    A tensor gets another layout object when dims change in place or when it is given other data. A
    stand-in then keeps the old layout object.
    """
    assert tensor._viewed is not None
    base, spec, *_ = tensor._viewed
    if base._spec is spec:
        return base
    for before in base._stand_ins:
        if before._spec is spec:
            return before
    return None


def anchor_in(tensor: DTensorBase) -> DTensorBase | None:
    """The anchor: the stand-in for a tensor as it is now, as the base of copied views; or None."""
    anchor = tensor._stand_ins[-1] if tensor._stand_ins else None
    if anchor is None or anchor._viewed is None or anchor._viewed[0] is not tensor:
        return None
    return anchor


def without_anchor(tensor: DTensorBase) -> tuple[DTensorBase, ...]:
    """The stand-ins that keep earlier states of a tensor: all except the anchor."""
    return tensor._stand_ins if anchor_in(tensor) is None else tensor._stand_ins[:-1]


def base_in_graph(tensor: DTensorBase) -> DTensorBase | None:
    """The tensor that a view was made of; None for no view, or one that left the graph.

    ``detach()`` and ``data`` give views that are outside of the graph.
    """
    if tensor._viewed is None or tensor._viewed[2] in (Tensor.detach, data_of):
        return None
    return tensor._viewed[0]


def root_in_graph(tensor: DTensorBase) -> DTensorBase:
    """The last base in the graph, following views of views; the tensor itself without a base."""
    while (base := base_in_graph(tensor)) is not None:
        tensor = base
    return tensor


def has_left(stand_in: DTensorBase) -> bool:
    """True if the tensor that a stand-in stands for was given other data."""
    return stand_in._places is not None and stand_in._places.gone


class View:
    """The base of a view whose elements are copies, and how to keep both in step.

    Tensors of one layout that share such a copy share their View.

    Args:
        base: The tensor that it is a view of.
        value: The local tensor of the view.
        redo: Makes the same view of a given tensor, a DTensor or a plain tensor.
        write: Writes the view's value to the elements of the base that the view shows; None: the
            base is gathered for this.
        shares: True if the view shares the base's memory, and the base is a copied view itself.
        apart: How it is cut off the base's graph: by "detach", by "data" (whose writes torch does
            not count either), or not at all.
    """

    __slots__ = (
        *(
            "apart",
            "base",
            "counted",
            "first",
            "graded",
            "joined",
            "local",
            "redo",
            "required",
            "shares",
            "value",
        ),
        *("version", "write", "writes"),
    )

    def __init__(
        self,
        base: DTensorBase,
        value: Tensor,
        redo: Redo,
        write: Write | None = None,
        shares: bool = False,
        apart: str = "",
    ) -> None:
        self.base, self.value, self.redo, self.write = base, value, redo, write
        self.shares, self.apart = shares, apart
        #: True if the view's gradient goes nowhere: the base requires a gradient only since then.
        self.joined = False
        self.graded = torch.is_grad_enabled()
        self.note()
        self.first = self.version

    def note(self) -> None:
        """Remember that the copy has what the base holds now."""
        self.local = self.base._local_tensor
        self.version = version_of(self.local)
        self.required = self.base_requires_grad
        self.writes = memory_of(self.base).writes
        self.counted = version_of(owner_of(self.base)._local_tensor)

    @property
    def is_stale(self) -> bool:
        """True if the base was written to since."""
        local, places = self.base._local_tensor, self.base._places
        return (
            not (local is self.local or (places is not None and self.local is places.before))
            or version_of(local) != self.version
            or memory_of(self.base).writes != self.writes
            or version_of(owner_of(self.base)._local_tensor) != self.counted
            # Where nothing was written, torch leaves it out of the graph.
            or (not self.required and self.version != self.first and self.base_requires_grad)
        )

    @property
    def base_requires_grad(self) -> bool:
        """True if the tensor that it is a view of in the graph requires a gradient."""
        tensor = self.base
        while (base := base_in_graph(tensor)) is not None and not has_left(base):
            tensor = base
        return tensor._local_tensor.requires_grad

    @property
    def base_joined_graph(self) -> bool:
        """True if the base was made to require a gradient since, and was not written to."""
        return not (self.required or self.apart) and self.base_requires_grad

    @property
    def only_values_changed(self) -> bool:
        """True if no write since has entered the graph: torch counts none to ``data``."""
        local = self.base._local_tensor
        return (
            local is self.local
            and version_of(local) == self.version
            and self.base_requires_grad == self.required
        )


#: A view of a DTensor, and of a plain tensor likewise.
Redo = Callable[[Any], Any]
#: Writes a view's value (the second) to what it is a view of (the first).
Write = Callable[[Any, Any], None]


def version_of(tensor: Tensor) -> int:
    """The number of writes to a tensor so far; 0 for inference tensors, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version
