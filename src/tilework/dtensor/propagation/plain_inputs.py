"""Plain tensors beside DTensors: they count as replicated, and their contents go into digests."""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.dtensor.provenance.content import hash_of
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.layout import Replicate
from tilework.mesh import DeviceMesh


def replicated_spec(tensor: Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """The layout of a plain tensor that counts as replicated on the mesh."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return spec_of(mesh, (Replicate(),) * mesh.ndim, tuple(tensor.shape), None, strides)


def content_hash(tensor: Tensor) -> str:
    """A hash of the elements, as text; "" for a tensor without memory or without strides."""
    digest = hash_of(tensor)
    return f"{digest:016x}" if digest else ""
