"""DTensor itself: a tensor whose value lies on the ranks of a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from tilework.dtensor import gradients
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Placement, Tiling
from tilework.mesh import DeviceMesh
from tilework.sharded.tiled import TiledTensor

_make = Tensor._make_wrapper_subclass

#: Runs an operator on DTensors: ``(func, args, kwargs)``. Set by tilework.dtensor.dispatch.
Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class DTensor(TiledTensor):
    """A tensor of a global shape whose value lies on the ranks of a mesh.

    Every operator of torch takes it, together with others and with plain tensors, which count as
    replicated. Each rank's part is a plain tensor with an autograd graph of its own; only
    changes of layout communicate, and those that have to reduce gradients do so in backward.
    A gradient has its tensor's layout, but is replicated where the tensor is partial.

    All operators are collective over the mesh. Make one with :meth:`from_local`,
    :func:`~tilework.dtensor.distribute_tensor` or a creation function such as
    :func:`~tilework.dtensor.zeros`.
    """

    _local_tensor: Tensor
    _spec: DTensorSpec
    #: What nn.Parameter sets on those that are one.
    _is_param: bool
    #: The gradient as it was last asked for.
    _grad: DTensor | None = None
    #: This rank's part at places in the graph where gradients come in terms; by their axes.
    _aliases: dict[tuple[int, ...], gradients.Alias] | None = None
    _run: ClassVar[Run]

    def __new__(cls, *args: Any, **kwargs: Any) -> DTensor:
        raise TypeError(
            "DTensor() makes none: use DTensor.from_local(tensor, mesh, placements), "
            "distribute_tensor(tensor, mesh, placements), or zeros, ones, rand, …"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DTensor._run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # C++ comes here below autograd: with what a user's own Function saved, and where its
        # engine adds gradients up. Elsewhere a gradient would be lost.
        if func is torch.ops.aten.detach.default:
            return wrap(args[0]._local_tensor.detach(), args[0]._spec)
        if torch.is_grad_enabled():
            return super().__torch_dispatch__(func, types, args, kwargs)
        return DTensor._run(func, args, kwargs or {})

    # -- what it is --------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that it lies on."""
        return self._spec.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each axis of the mesh does to it."""
        return self._spec.placements

    @property
    def tiling(self) -> Tiling:
        return self._spec.tiling

    def local_tiles(self) -> list[Tensor]:
        """This rank's part, in a list; an empty one outside the mesh."""
        return [self._local_tensor] if self._spec.takes_part else []

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
    ) -> DTensor:
        """The DTensor of which ``local_tensor`` is this rank's part."""
        from tilework.dtensor.api import from_local

        return from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            stride=stride,
            order=order,
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part: a plain tensor, at the same place in the autograd graph.

        Local; not collective. Shares memory. Its gradient becomes this tensor's.

        Args:
            grad_placements: How the gradient that will come in lies; by default as this tensor
                does, and replicated where it is partial. If each rank along an axis computes
                another term of the gradient of a replicated tensor, say Partial() there.

        Raises:
            ValueError: Gradients that lie so cannot become this tensor's.
        """
        if grad_placements is None:
            return gradients.local_of(self)
        return gradients.local_with_grad(self, grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole value as a plain tensor on every rank. Collective; blocks; differentiable.

        Args:
            grad_placements: As for :meth:`to_local`, of the replicated tensor.
        """
        whole = self.redistribute(placements=self._spec.replicated.placements)
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        order: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> DTensor:
        """The same value, laid out otherwise. Collective over the mesh; differentiable."""
        from tilework.dtensor.api import redistribute

        return redistribute(self, device_mesh, placements, order=order, async_op=async_op)

    # -- gradients ---------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        return gradients.local_of(self).requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        gradients.local_of(self).requires_grad_(requires_grad)
        gradients.flag(self)
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return gradients.local_of(self).is_leaf

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        return gradients.grad_fn_of(self)

    @property
    def grad(self) -> DTensor | None:
        local = self._local_tensor.grad
        if local is None:
            return None
        known = self._grad
        if known is None or known._local_tensor is not local:
            known = self._grad = wrap(local, self._spec.dual)
        return known

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is None:
            self._local_tensor.grad = self._grad = None
        else:
            gradients.set_grad(self, value)

    @grad.deleter
    def grad(self) -> None:
        self._local_tensor.grad = self._grad = None

    @property
    def data(self) -> DTensor:
        return wrap(self._local_tensor.data, self._spec)

    @data.setter
    def data(self, value: Tensor) -> None:
        gradients.set_data(self, value)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | Tensor | None = None,
    ) -> None:
        """Gradients of all leaves it depends on, as ``torch.Tensor.backward``. Collective.

        Args:
            gradient: Of what with respect to this tensor; None for a single element.
        """
        gradients.autograd_backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """Call ``hook`` with the gradient, a DTensor, when it is known."""
        return gradients.register_hook(self, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """Call ``hook`` with this tensor when ``grad`` was accumulated into."""
        local: Any = self._local_tensor
        return local.register_post_accumulate_grad_hook(lambda _: hook(self))

    def retain_grad(self) -> None:
        gradients.local_of(self).retain_grad()

    @property
    def retains_grad(self) -> bool:  # type: ignore[override]
        return self._local_tensor.retains_grad

    # -- Python's own ------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        from tilework.dtensor.showing import headline

        return headline(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        known = memo.get(id(self))
        if known is not None:
            return cast(DTensor, known)
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that are leaves of the graph can be copied deeply: detach() first"
            )
        made = memo[id(self)] = wrap(copy.deepcopy(self._local_tensor, memo), self._spec)
        for name, value in vars(self).items():
            if name not in _OWN:
                setattr(made, name, copy.deepcopy(value, memo))
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        from tilework.dtensor.saving import reduce

        return reduce(self)

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError(
            f"{self!r} has its elements on several ranks: make it plain with full_tensor(), or "
            f"take this rank's part with to_local()"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.numpy()


#: What an instance has of its own, and a copy makes anew.
_OWN = {"_local_tensor", "_spec", "_grad", "_aliases"}


def wrap(local: Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor of which ``local`` is this rank's part. Unchecked; local."""
    made: DTensor = _make(
        DTensor,
        spec.size,
        dtype=local.dtype,
        device=local.device,
        requires_grad=local.requires_grad,
    )
    made._local_tensor = local
    made._spec = spec
    return made
