"""New DTensors: zeros, ones, empty, full, rand, randn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.provenance.digests import TensorText, moving, stable_digest
from tilework.dtensor.random.generator import fill_local, next_key
from tilework.dtensor.random.philox import Distribution, Normal, Uniform
from tilework.dtensor.redistribution.redistribute import redistribute_local
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import DTensor, wrap
from tilework.layout import Placement, Replicate
from tilework.layout.internal import placements_in
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current

_Sizes = int | Sequence[int]


def zeros(
    *size: _Sizes,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of zeros. Local; each rank makes its local tensor.

    Args:
        size: The global shape: as numbers, or as a sequence of numbers.
        requires_grad: True for a leaf with a gradient.
        dtype: None: torch's default dtype.
        layout: torch.strided, the only layout of memory that DTensors have.
        device_mesh: The mesh; None: the innermost of ``with mesh:``.
        placements: The placement along each axis of the mesh; None: replicated.
        order: The axes in the order in which they shard; None: from the first to the last.

    Raises:
        ValueError: Placements do not fit the mesh or the shape.
        RuntimeError: No mesh is given or active.

    Example:
        >>> from tilework.dtensor import Shard, init_device_mesh, zeros
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return zeros(3, 5, device_mesh=mesh, placements=[Shard(0)]).to_local().shape
        >>> run_ranks(2, program)
        [torch.Size([2, 5]), torch.Size([1, 5])]
    """
    spec = _spec(size, layout, device_mesh, placements, order)
    return _filled(torch.zeros, "zeros", spec, dtype, requires_grad)


def ones(
    *size: _Sizes,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of ones. Local; arguments and errors as for :func:`zeros`.

    Example:
        >>> from tilework.dtensor import Partial, init_device_mesh, ones
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return ones(2, device_mesh=mesh, placements=[Partial()]).full_tensor().tolist()
        >>> run_ranks(2, program)
        [[1.0, 1.0], [1.0, 1.0]]
    """
    spec = _spec(size, layout, device_mesh, placements, order)
    return _filled(torch.ones, "ones", spec, dtype, requires_grad)


def empty(
    *size: _Sizes,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor whose values are not set yet. Local; arguments and errors as for :func:`zeros`.

    Example: see :func:`zeros`.
    """
    spec = _spec(size, layout, device_mesh, placements, order)
    return _filled(torch.empty, "empty", spec, dtype, requires_grad)


def full(
    size: _Sizes,
    fill_value: complex,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of one number. Local; arguments and errors as for :func:`zeros`.

    Args:
        fill_value: The number. Without ``dtype``, the kind of number decides the dtype.

    Example: ``full((3,), 7, device_mesh=mesh, placements=[Shard(0)])``; see :func:`zeros`.
    """

    def make(shape: Sequence[int], **kwargs: Any) -> Tensor:
        return torch.full(tuple(shape), fill_value, **kwargs)

    spec = _spec((size,), layout, device_mesh, placements, order)
    return _filled(make, f"full {fill_value}", spec, dtype, requires_grad)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The numbers from ``start`` to ``end``, as by ``torch.arange``. Local.

    Each rank makes all of them, and keeps its part: the positions of a sequence, in any layout.
    Other arguments and errors as for :func:`zeros`.

    Args:
        start: The first number; without ``end``, numbers go from 0 to ``start``.
        end: The end, which is not among the numbers.
        step: The distance between numbers.

    Example:
        >>> from tilework.dtensor import Shard, arange, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = arange(8, device_mesh=mesh, placements=[Shard(0, turns=2)])
        ...     return x.to_local().tolist()
        >>> run_ranks(2, program)
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    first, last = (0, start) if end is None else (start, end)
    every = torch.arange(first, last, step, dtype=dtype)
    spec = _spec((len(every),), torch.strided, device_mesh, placements, None)

    def make(shape: Sequence[int], *, device: str, **_: Any) -> Tensor:
        part = spec.local_part(every) if spec.takes_part else every[:0]
        return part.to(device, copy=True)

    return _filled(make, f"arange {first} {last} {step}", spec, dtype, requires_grad)


def rand(
    *size: _Sizes,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of random numbers from [0, 1), the same on every mesh and in every layout.

    The numbers follow from torch's default generator on the mesh's first rank. Collective over the
    mesh; blocks. Arguments and errors as for :func:`zeros`.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, init_device_mesh, rand
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     torch.manual_seed(0)
        ...     rows = rand(2, 2, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        ...     torch.manual_seed(0)
        ...     return torch.equal(rows, rand(2, 2, device_mesh=mesh).full_tensor())
        >>> run_ranks(2, program)
        [True, True]
    """
    spec = _spec(size, layout, device_mesh, placements, order)
    return _drawn(Uniform(), spec, dtype, requires_grad)


def randn(
    *size: _Sizes,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    order: Sequence[int] | None = None,
) -> DTensor:
    """A DTensor of normally distributed numbers. As :func:`rand` otherwise.

    Example: see :func:`rand`.
    """
    spec = _spec(size, layout, device_mesh, placements, order)
    return _drawn(Normal(), spec, dtype, requires_grad)


def _spec(
    size: Sequence[_Sizes],
    layout: torch.layout,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    order: Sequence[int] | None,
) -> DTensorSpec:
    if layout is not torch.strided:
        raise ValueError(f"layout must be torch.strided, as DTensors are dense, got {layout}")
    mesh = mesh_or_current(device_mesh)
    shape: Any = size
    if len(size) == 1 and not isinstance(size[0], int):
        shape = size[0]
    if min(shape, default=0) < 0:
        raise ValueError(f"sizes must be 0 or more, got {list(shape)}")
    return spec_of(
        mesh,
        (Replicate(),) * mesh.ndim if placements is None else placements_in(placements),
        shape,
        order,
    )


def _filled(
    make: Callable[..., Tensor],
    what: str,
    spec: DTensorSpec,
    dtype: torch.dtype | None,
    requires_grad: bool,
) -> DTensor:
    local = make(spec.local_shape, dtype=dtype, device=spec.mesh.device_type)
    return _wrapped(local, spec, requires_grad, stable_digest(what))


def _drawn(
    distribution: Distribution, spec: DTensorSpec, dtype: torch.dtype | None, requires_grad: bool
) -> DTensor:
    local = torch.empty(spec.local_shape, dtype=dtype, device=spec.mesh.device_type)
    what = stable_digest("drawn", distribution)
    text = TensorText(spec, local.dtype)
    with moving(hash((what, spec.digest)), "a random creation function", text):
        key = next_key(spec.mesh)
    fill_local(local, key, distribution, spec)
    return _wrapped(local, spec, requires_grad, hash((what, key.seed)))


def _wrapped(local: Tensor, spec: DTensorSpec, requires_grad: bool, digest: int) -> DTensor:
    """The DTensor of ``spec`` from a local tensor of ``spec.dual``; ``digest`` names the maker."""
    if spec.takes_part:
        local = redistribute_local(local, spec.dual, spec)
    digest = hash((digest, spec.digest))
    return wrap(local.requires_grad_(requires_grad), spec, digest)
