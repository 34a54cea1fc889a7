"""DTensor, the public class: a tensor whose value lies on the ranks of a mesh."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from tilework.comm import provenance_digest
from tilework.dtensor import serialization
from tilework.dtensor.autograd import gradients, local_graph
from tilework.dtensor.base import (
    HANDLERS,
    DTensorBase,
    Memory,
    data_of,
    grads_of,
    is_moved,
    memory_of,
    wrap_as,
)
from tilework.dtensor.debug import causes
from tilework.dtensor.debug.formatting import headline
from tilework.dtensor.from_local import (
    check_local_tensor,
    checked_shape,
    shape_of_equals,
    spec_from_local,
)
from tilework.dtensor.propagation.strides import like_strides
from tilework.dtensor.provenance.digests import (
    Moved,
    digest_of,
    named_for,
    note_cleared,
    note_gradient,
    stable_digest,
)
from tilework.dtensor.provenance.replicas import note_gradient_from_plain
from tilework.dtensor.rank_part import plain_of
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.show import layout_page
from tilework.dtensor.spec import spec_of
from tilework.dtensor.torch_tensors import (
    awaited_in_graph,
    is_torch_dtensor,
    local_from_torch,
    spec_from_torch,
    torch_from_local,
    torch_placements,
)
from tilework.dtensor.views import moved_views
from tilework.dtensor.views.moved_views import offset_of
from tilework.layout import Placement, Replicate
from tilework.layout.internal import native_placement, placements_in
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current
from tilework.tiled import is_called_within, torch_arguments

#: Runs an operator on DTensors: ``(func, args, kwargs)``. Set by tilework.dtensor.dispatch.
Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class DTensor(DTensorBase):
    """A tensor of a global shape whose value lies on the ranks of a mesh.

    Every operator of torch takes DTensors, together with plain tensors, which count as replicated.
    Each rank's local tensor is a plain tensor with a local autograd graph. Only changes of layout
    communicate, and partial gradients are reduced in backward. A gradient has the layout of the
    tensor, with two exceptions: it is replicated where the tensor is a partial sum, and a partial
    sum where the tensor is partial in another reduction.

    All operators are collective over the mesh. Make one with :meth:`from_local`,
    :func:`~tilework.dtensor.distribute_tensor` or a creation function such as
    :func:`~tilework.dtensor.zeros`.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     x = distribute_tensor(torch.eye(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        ...     return x.to_local().shape, (x @ x).sum().item()
        >>> run_ranks(2, program)[0]
        (torch.Size([2, 4]), 4.0)
    """

    _dispatch: ClassVar[Dispatch]

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor() cannot be called: use DTensor.from_local(tensor, mesh, placements), "
            "distribute_tensor(tensor, mesh, placements), or zeros, ones, rand, …"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = torch_arguments(func, args, kwargs) if kwargs else (args, {})
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        return DTensor._dispatch(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ calls this below autograd in two cases: for tensors that a user's own Function saved,
        # and when the engine adds gradients up. Anywhere else a gradient would be lost.
        if func is torch.ops.aten.detach.default:
            result = wrap(args[0]._local_tensor.detach(), args[0]._spec, args[0]._digest)
            result._made_without_grad = True  # C++ may make a leaf of it, as of nested checkpoints
            return result
        if torch.is_grad_enabled() and not _takes_values(func, args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return DTensor._dispatch(func, args, kwargs or {})

    # -- to and from plain tensors -----------------------------------------------------------

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        order: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
        check: bool = True,
    ) -> DTensor:
        """The DTensor whose local tensor on this rank is ``local_tensor``. Shares memory with it.

        If a mesh axis shards, the ranks compare shapes: the call is collective over the mesh and
        blocks, and shapes that do not fit together raise on all ranks. Local tensors may be uneven.
        If another axis replicates, values are compared as ``verifying`` says. With ``shape``, or if
        no axis shards, the call is local.

        Gradients flow back into ``local_tensor``: the gradient of this rank's shard, or of a
        replicated value the full gradient on each rank.

        Args:
            local_tensor: A plain tensor, the same on all ranks except for values and sizes.
            device_mesh: The mesh; None: the innermost of ``with mesh:``.
            placements: The placement along each axis; None: replicated.
            run_check: Compare also the layout, and the values of replicas. Collective over the
                mesh.
            shape: The global shape.
            stride: Accepted for compatibility with torch, and ignored: strides follow from those
                of the local tensors.
            order: The axes in the order in which they shard; None: from the first to the last.
            grad_placements: The placements that the gradient of ``local_tensor`` is redistributed
                to; by default the tensor's, replicated where it is partial. If each rank along an
                axis computed the replicated part from different values, such as from a shard of a
                tensor, ``Partial()`` gives each rank its share of the gradient.
            check: False: local. Without ``shape``, all local tensors are assumed to have the shape
                of this rank's, and nothing is compared.

        Raises:
            ValueError: Local tensors do not fit together or to ``shape``, or ranks differ.
            CollectiveMismatchError: Replicas have different values.
            TypeError: ``local_tensor`` is not a plain tensor, or another argument has a wrong type.
            RuntimeError: No mesh is given or active.

        Example:
            >>> import torch
            >>> from tilework.dtensor import DTensor, Shard, init_device_mesh
            >>> from tilework.testing import run_ranks
            >>> def program(rank):
            ...     mesh = init_device_mesh("cpu", (2,))
            ...     part = torch.full((rank + 1,), float(rank))
            ...     return DTensor.from_local(part, mesh, [Shard(0)]).full_tensor().tolist()
            >>> run_ranks(2, program)
            [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]
        """
        mesh = mesh_or_current(device_mesh)
        local_tensor = plain_of(local_tensor)
        check_local_tensor(local_tensor)
        shape = checked_shape(shape, stride)
        if run_check and not check:
            raise ValueError("run_check=True compares ranks, check=False does not: leave one out")
        local = on_device(awaited_in_graph(local_tensor), mesh)
        if placements is None:
            placements = (Replicate(),) * mesh.ndim
        placements = [native_placement(placement) for placement in placements_in(placements)]
        if grad_placements is not None:
            grad_placements = [*map(native_placement, placements_in(grad_placements))]
        if not check and shape is None:
            shape = shape_of_equals(local, mesh, placements)
        spec = spec_from_local(local, mesh, placements, shape, order, run_check)
        if not spec.takes_part:
            return wrap(empty_local(local), spec)
        return wrap(gradients.entering(local, spec, grad_placements), spec)

    @staticmethod
    def from_torch(tensor: Any) -> DTensor:
        """Convert a torch.distributed.tensor DTensor to a DTensor of this library. Local.

        Shares memory; gradients flow back. The mesh is :meth:`DeviceMesh.from_torch` of torch's
        mesh. Operators on DTensors convert torch DTensors by themselves.

        Raises:
            TypeError: ``tensor`` is not a torch DTensor, the groups are on torch's backends, or
                this library has no such placement.
            ValueError: torch's DTensor was made of uneven parts, or splits dims otherwise; or
                ranks do not ascend along an axis of the mesh.
        """
        if isinstance(tensor, DTensor):
            return tensor
        if not is_torch_dtensor(tensor):
            raise TypeError(
                f"from_torch takes a DTensor of torch.distributed.tensor, got "
                f"{type(tensor).__name__}"
            )
        spec = spec_from_torch(tensor)
        local = local_from_torch(tensor)
        if not spec.takes_part:
            return wrap(empty_local(local), spec)
        return wrap(gradients.entering(local, spec, None), spec)

    def to_torch(self) -> Any:
        """This tensor as a torch DTensor, in the same memory. Gradients flow back.

        Local, except for the first call on a mesh that did not come from torch: see
        :meth:`DeviceMesh.to_torch`. A write to one of the two shows in the other. torch refuses a
        write that the graph would record, as for the result of torch's ``to_local()``.

        Raises:
            ValueError: torch has no placements for this layout, since torch splits only as
                ``torch.chunk`` does. Or ranks do not ascend along an axis of the mesh, where
                torch's values go wrong.
            RuntimeError: torch.distributed is not initialized. Or this is a view that had to move
                elements: writes to torch's DTensor would not reach the base.
        """
        if is_moved(self):
            raise RuntimeError(
                f"{self!r} is a view that had to move elements, a copy: writes to torch's DTensor "
                f"would not reach the base. Convert the base, or a clone() of the view"
            )
        spec = self._spec
        placements, mesh = torch_placements(spec), spec.mesh.to_torch()
        return torch_from_local(self.to_local(), spec, mesh, placements)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's local tensor, a plain tensor, at the same place in the autograd graph.

        Local; not collective. Shares memory. The gradient of the result becomes this tensor's.

        Args:
            grad_placements: The placements of the gradient that will come in; by default this
                tensor's, replicated where it is partial. If each rank along an axis computes a
                partial gradient of a replicated tensor, pass Partial() there.

        Raises:
            ValueError: Gradients of these placements cannot become this tensor's.
        """
        moved_views.hand_out(self)
        if grad_placements is None:
            return local_graph.local_of(self)
        given = [*map(native_placement, placements_in(grad_placements))]
        return gradients.local_with_grad(self, given)

    def local_tiles(self) -> list[Tensor]:
        """The local tensor in a list; an empty list outside the mesh. Local.

        Where blocks are dealt in turns, views of the local tensor: a block each.

        Raises:
            RuntimeError: It is a view that had to move elements, and the base was written to since.
        """
        return [tile for local in self.local_memory() for tile in self._spec.tiles_of(local)]

    def local_memory(self) -> list[Tensor]:
        if self._view_of is not None:
            moved_views.check_fresh(self)
        moved_views.hand_out(self)
        return super().local_memory()

    @property
    def is_snapshot(self) -> bool:
        """True if this is a view that had to move elements: a copy that may be written through."""
        return is_moved(self)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The full value as a plain tensor on every rank. Collective; blocks; differentiable.

        Args:
            grad_placements: As for :meth:`to_local`, of the replicated tensor.
        """
        with named_for("full_tensor"):
            full = self.redistribute(placements=self._spec.replicated.placements)
        local = full.to_local(grad_placements=grad_placements)
        if grad_placements is None:
            note_gradient_from_plain(full, local)
        return local

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        order: Sequence[int] | None = None,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same value in another layout. Collective over the mesh; blocks; differentiable.

        Runs the cheapest sequence of collectives, which
        :func:`~tilework.dtensor.plan_redistribution` shows beforehand. Shares memory if the layout
        is the same. The gradient is redistributed back to the old layout.

        Args:
            device_mesh: This tensor's, or None.
            placements: The new placement along each axis.
            order: The axes in the order in which they shard; None: from the first to the last.
            async_op: Return before the last step is done, if that step takes long enough; the first
                use of the result waits for it.
            forward_dtype: The dtype of the result; the tensor is cast before it moves. None: this
                tensor's.
            backward_dtype: The dtype in which the gradient moves back, before it is cast to this
                tensor's; None: this tensor's.

        Raises:
            ValueError: Placements do not fit, or ``device_mesh`` is another mesh.
        """
        source = self._spec
        if isinstance(device_mesh, (list, tuple, Placement)):
            placements = [device_mesh] if isinstance(device_mesh, Placement) else list(device_mesh)
            raise TypeError(
                f"redistribute() takes placements after the mesh, or by name: "
                f"redistribute(placements={placements})"
            )
        if placements is not None:
            placements = placements_in(placements)
        if device_mesh is not None and mesh_or_current(device_mesh) != source.mesh:
            raise ValueError(
                f"a tensor on {source.mesh} cannot go to {device_mesh}: redistribute() changes its "
                f"placements; for another mesh, distribute_tensor(x.full_tensor(), mesh, …)"
            )
        if placements is None:
            if order is None:
                raise ValueError("redistribute() needs placements, a placement for each mesh axis")
            placements = source.placements
        target = spec_of(source.mesh, placements, source.shape, order)
        local = local_graph.local_of(self)
        dtypes = None
        if forward_dtype is not None or backward_dtype is not None:
            dtypes = (forward_dtype or local.dtype, backward_dtype or local.dtype)
        if target == source:
            if dtypes is not None and dtypes[0] != local.dtype:
                return cast(DTensor, self.to(dtypes[0]))
            return moved_views.same_memory(self, local)
        if causes.watchers:
            causes.begin_operator("redistribute")
        # Within an operator the program does not get the result, so that no plain tensor can give
        # it a gradient.
        of = Moved(digest_of(self), "redistribute", handed_out=not provenance_digest.digest())
        local = redistribute_local(local, source, target, async_op=async_op, of=of, dtypes=dtypes)
        if causes.watchers:
            causes.tag_gradient(local)
        digest = hash((of.digest, target.digest))
        return wrap(local, target, hash((digest, stable_digest(dtypes))) if dtypes else digest)

    # -- parts of complex numbers: torch asks nobody about writes to them ------------------------

    @property
    def real(self) -> Tensor:
        """The real parts, a view; the tensor itself where numbers are real."""
        return torch.real(self)

    @real.setter
    def real(self, value: Tensor | complex) -> None:
        _set_values(torch.real(self), value)

    @property
    def imag(self) -> Tensor:
        """The imaginary parts of complex numbers, a view."""
        return torch.imag(self)

    @imag.setter
    def imag(self, value: Tensor | complex) -> None:
        _set_values(torch.imag(self), value)

    # -- gradients ---------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        return local_graph.in_graph(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        local_graph.local_of(self).requires_grad_(requires_grad)
        local_graph.mirror_requires_grad(self)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return local_graph.in_graph(self).is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return local_graph.grad_fn_of(self)

    @property
    def grad(self) -> DTensor | None:
        grads = grads_of(self)
        if grads.deferred is not None:
            grads.deferred()
        local = self._local_tensor.grad
        if local is None:
            return None
        known: DTensor | None = grads.shown
        if known is None or known._local_tensor is not local:
            local = gradients.seen_grad(self, local)
            if known is None or known._local_tensor is not local:
                known = grads.shown = wrap(local, self._spec.grad_spec)
        note_gradient(self, known)
        return known

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            del self.grad
        else:
            grads_of(self).deferred = None
            gradients.set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        note_cleared(self)
        self._local_tensor.grad = None

    @property
    def data(self) -> DTensor:
        if self._view_of is not None:
            moved_views.check_fresh(self)
        return moved_views.same_memory(self, self._local_tensor.data, data_of)

    @data.setter
    def data(self, value: Tensor) -> None:
        gradients.set_data(self, value)

    def set_(self, *source: Any, **named: Any) -> DTensor:  # torch offers it to no interception
        """Show the memory of another DTensor from now on. Returns this tensor. Local.

        Raises:
            TypeError: ``source`` is not a DTensor, or sizes and strides are given, too.
            RuntimeError: ``source`` has another dtype, or gradients are recorded.
        """
        gradients.set_memory(self, *source, *named.values())
        return self

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        """Accumulate gradients in all leaves that this tensor depends on, as in torch. Collective.

        Args:
            gradient: The gradient with respect to this tensor; None for a single element.
        """
        gradients.autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with the gradient, a DTensor, when it is known."""
        return gradients.register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this tensor when ``grad`` was accumulated into."""
        return gradients.register_post_accumulate_grad_hook(self, hook)

    def retain_grad(self) -> None:
        local_graph.in_graph(self).retain_grad()

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local_tensor.retains_grad

    # -- Python's own ------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return headline(self)

    def _repr_html_(self) -> str:
        return layout_page(self).html()

    def __copy__(self) -> DTensor:
        """A leaf of the same memory. torch counts writes to the leaf apart from writes to this."""
        copied = self.data
        copied.requires_grad_(self.requires_grad)
        for name, value in vars(self).items():
            if name not in _OWN:
                setattr(copied, name, value)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        known = memo.get(id(self))
        if known is not None:
            return cast(DTensor, known)
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of the graph can be copied deeply: detach() first"
            )
        local = local_graph.local_of(self)
        is_param = isinstance(self, Parameter)
        if is_param:  # torch's deep copies of parameters never share memory with each other
            digest = self._digest if self._made is None else digest_of(self)
            spec = self._spec.with_strides(like_strides(self._spec.shape, self._spec.strides))
            copied = wrap(local.detach().clone(), spec, digest)
        else:
            copied = _deep_copy(self, memo)
        copied.requires_grad_(local.requires_grad)
        if not is_param and local.grad is not None:
            copied._local_tensor.grad = copy.deepcopy(local.grad, memo)
        memo[id(self)] = copied
        for name, value in vars(self).items():
            if name not in _OWN:
                setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        attributes = {name: value for name, value in vars(self).items() if name not in _OWN}
        local = serialization.compact(local_graph.local_of(self))
        layout = serialization.layout_to_save(self)
        return _rebuild, (local, *layout, self.requires_grad, attributes)

    def numpy(self, *, force: bool = False) -> Any:
        """The full value as an array, on every rank. Collective; blocks.

        The array is read-only: the ranks that hold the elements would not see a write.

        Args:
            force: True to accept a tensor that requires a gradient, as in torch.
        """
        with named_for("numpy"):
            array = self.full_tensor().numpy(force=force)
        array.flags.writeable = False
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        return array.copy() if copy else array


def _deep_copy(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """A copy that requires no gradient. Copies in one ``memo`` share memory as the originals do."""
    known: Any = memo
    copies = known.setdefault("tilework", {})
    root, moved = memory_of(tensor), is_moved(tensor)
    first, was_moved = copies.setdefault(root, (None, moved))
    if first is not None and (moved or was_moved):
        raise RuntimeError(
            f"{tensor!r} is copied deeply together with a tensor of the same memory, and one of "
            f"them is a view that had to move elements: the copies would not share memory. Copy a "
            f"clone() of the view"
        )
    digest = tensor._digest if tensor._made is None else digest_of(tensor)
    copied = wrap(copy.deepcopy(tensor._local_tensor.detach(), memo), tensor._spec, digest)
    if first is None:
        copied._memory = Memory()
        copies[root] = copied._memory, moved
    else:
        copied._memory, copied._made, copied._digest = Memory(first), digest, None
    moved_views.note_start(copied, offset_of(tensor))
    return copied


def _set_values(tensor: Tensor, value: Tensor | complex) -> None:
    """Write a tensor, or a number everywhere, to a tensor. Collective."""
    if isinstance(value, Tensor):
        tensor.copy_(value)
    else:
        tensor.fill_(value)


def _takes_values(func: Any, args: Sequence[Any]) -> bool:
    """True for calls by which torch reads a number, or copies a tensor without the graph."""
    aten = torch.ops.aten
    if func is aten._local_scalar_dense.default:
        return True
    return func is aten._to_copy.default and not (
        args[0].requires_grad or is_called_within("_functorch")
    )


#: The fields of an instance. A copy does not take them over.
_OWN = set(DTensorBase.__annotations__)


def _rebuild(
    local: Tensor,
    mesh: serialization.Mesh,
    layout: serialization.Layout,
    coordinate: tuple[int, ...] | None,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> DTensor:
    """The saved tensor, on this rank's mesh."""
    spec = serialization.spec_of_saved(local, mesh, layout, coordinate)
    tensor = wrap(local.requires_grad_(requires_grad), spec)
    for name, value in attributes.items():
        setattr(tensor, name, value)
    return tensor


# torch.load accepts it with weights_only=True.
torch.serialization.add_safe_globals([_rebuild])


def on_device(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The tensor on the mesh's kind of device; a meta tensor as it is."""
    if tensor.device.type in (mesh.device_type, "meta"):
        return tensor
    return tensor.to(mesh.device_type)


def empty_local(tensor: Tensor) -> Tensor:
    """The local tensor of a rank outside the mesh: no elements, the dtype of ``tensor``."""
    return torch.empty(
        0, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
    )


#: The DTensor with this local tensor and layout. Unchecked; local.
wrap: Callable[..., DTensor] = functools.partial(wrap_as, DTensor)
