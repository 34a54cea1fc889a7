"""What several tests of DTensors need."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.rounding import assert_close
from tilework.comm.world import current_world
from tilework.dtensor import DTensor, Placement, Replicate, distribute_tensor
from tilework.mesh import DeviceMesh


def spread(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Sequence[Placement]] | None = None
) -> Any:
    """A copy of a module whose parameters are DTensors: replicated, or as told by name."""
    made: Any = copy.deepcopy(module)
    for prefix, part in made.named_modules():
        for name, param in list(part._parameters.items()):
            if param is None:
                continue
            full = f"{prefix}.{name}" if prefix else name
            how = (placements or {}).get(full, [Replicate()] * mesh.ndim)
            given = distribute_tensor(param.detach(), mesh, how, src_data_rank=None)
            part._parameters[name] = nn.Parameter(given, requires_grad=param.requires_grad)
    return made


def cut(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    """A copy of a tensor that all ranks have, as a DTensor."""
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return distribute_tensor(copied, mesh, placements, src_data_rank=None)


def full(tensor: Tensor | None) -> Tensor:
    """The whole value, detached."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.full_tensor()


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of the collectives that this rank enters meanwhile, in their order."""
    found: list[str] = []
    start = time.time()
    yield found
    entries = [entry for group in current_world().records for entry in group.flight_entries()]
    entries = [entry for entry in entries if entry.entered >= start]
    found += [entry.what.split()[0] for entry in sorted(entries, key=lambda one: one.entered)]


def same(found: Tensor | None, wanted: Tensor | None) -> None:
    """That a DTensor has the value of a plain tensor."""
    assert wanted is not None
    assert_close(full(found), wanted.detach())
