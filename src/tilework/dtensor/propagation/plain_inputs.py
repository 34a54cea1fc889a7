"""Plain tensors among DTensors: each counts as replicated, which is verified at first use."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.dtensor.redistribution.redistribute import axes_group
from tilework.mesh import DeviceMesh
from tilework.tiled.tensor import TiledTensor


def check_same(name: str, leaves: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """That plain tensors among ``leaves`` are the same on every rank of the mesh.

    Collective over the mesh if there are any; each kind of call is verified when it first comes.

    Raises:
        ValueError: They are not; on every rank.
    """
    plain = [leaf for leaf in leaves if not isinstance(leaf, TiledTensor)]
    if not plain or mesh.size() == 1 or not mesh.here:
        return
    agree_equal(
        lambda: {f"tensor {i}": _fingerprint(tensor) for i, tensor in enumerate(plain)},
        axes_group(mesh, tuple(range(mesh.ndim))),
        f"{name} got a plain tensor beside DTensors, which counts as replicated, but it differs "
        f"between ranks:",
        hint="; make it a DTensor with DTensor.from_local(tensor, mesh, placements) that say how "
        "it lies",
    )


def _fingerprint(tensor: Tensor) -> str:
    """Shape, dtype and contents, for a person."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} (hash of values {digest(tensor)})"


def digest(tensor: Tensor) -> str:
    """What equal tensors have in common, and others hardly ever."""
    if tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return ""
    with torch.no_grad():
        data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        raw = data.view(torch.uint8) if data.numel() else data
    return blake2b(raw.numpy().tobytes() if raw.numel() else b"", digest_size=16).hexdigest()
