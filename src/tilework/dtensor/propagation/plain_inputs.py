"""Plain tensors among DTensors: each counts as replicated, which is verified at first use."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.layout import Replicate
from tilework.mesh import DeviceMesh
from tilework.tiled.tensor import TiledTensor


def replicated_spec(tensor: Tensor, mesh: DeviceMesh) -> DTensorSpec:
    """The layout of a plain tensor that every rank of the mesh has."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return spec_of(mesh, (Replicate(),) * mesh.ndim, tuple(tensor.shape), None, strides)


def check_same(name: str, tensors: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Raise if plain tensors among ``tensors`` differ between the ranks of the mesh.

    Collective over the mesh if there are any; each kind of call is verified when it first comes.

    Raises:
        ValueError: They differ; on every rank.
    """
    plain = [tensor for tensor in tensors if not isinstance(tensor, TiledTensor)]
    if not plain or mesh.size() == 1 or not mesh.here:
        return
    group = mesh.axes_group(range(mesh.ndim))
    mine = [(tuple(tensor.shape), str(tensor.dtype), content_hash(tensor)) for tensor in plain]
    for rank, theirs in zip(group.global_ranks, agree(lambda: mine, group), strict=True):
        if theirs != mine:
            differing = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0
            )
            raise ValueError(
                f"{name} got a plain tensor beside DTensors, which counts as replicated, but it "
                f"differs between ranks: shape {list(plain[differing].shape)} and other values on "
                f"rank {group.global_ranks[group.rank()]} than on rank {rank}; make it a DTensor "
                f"with DTensor.from_local(tensor, mesh, placements) that say how it lies"
            )


def content_hash(tensor: Tensor) -> str:
    """A hash of the elements; empty for a tensor without memory, or one that is not strided."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return ""
    with torch.no_grad():
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        # Not by way of numpy, after which the memory could not be resized any more.
        raw = ctypes.string_at(data.data_ptr(), data.nbytes) if data.numel() else b""
    return blake2b(raw, digest_size=16).hexdigest()
