"""Random numbers for DTensors: the same global values on every mesh and in every layout.

Each draw has a key. The ranks draw the key from torch's default generator, and agree on it. An
element's value is a function of the key and the element's global index. See
docs/concepts/random.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.operations.internal import agree_equal, broadcast
from tilework.comm.per_call.internal import recorded
from tilework.comm.world import current_world
from tilework.dtensor.provenance.digests import agreeing
from tilework.dtensor.random import philox
from tilework.dtensor.random.philox import Distribution, Key
from tilework.dtensor.spec import DTensorSpec
from tilework.mesh import DeviceMesh
from tilework.mesh.internal import mesh_or_current

#: The lock of the thread that uses torch's default generator.
_default = threading.Lock()


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Call ``torch.manual_seed`` on every rank of a mesh, after a check that all seeds are equal.

    Collective over the mesh; blocks. A call of ``torch.manual_seed`` on all ranks is enough, too:
    only the first rank's generator counts.

    Raises:
        ValueError: Ranks passed different seeds; on every rank, before any generator changes.

    Example:
        >>> from tilework.dtensor import Shard, init_device_mesh, manual_seed, rand
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     manual_seed(7, mesh)
        ...     first = rand(4, device_mesh=mesh, placements=[Shard(0)]).full_tensor()
        ...     manual_seed(7, mesh)
        ...     return bool((rand(4, device_mesh=mesh).full_tensor() == first).all())
        >>> run_ranks(2, program)
        [True, True]
    """
    device_mesh = mesh_or_current(device_mesh)
    if device_mesh.here:
        group = device_mesh.axes_group(range(device_mesh.ndim))
        with agreeing("manual_seed"):
            agree_equal(
                lambda: {"seed": int(seed)},
                group,
                "manual_seed needs one seed on all ranks of a mesh:",
            )
    torch.manual_seed(int(seed))


@recorded
def next_key(mesh: DeviceMesh, generator: torch.Generator | None = None) -> Key:
    """A new key, the same on every rank of the mesh. Collective over the mesh; blocks.

    Every rank draws 64 bits from a generator (None: torch's default), and those of the mesh's first
    rank count. As all ranks draw, generators with the same seed keep the same state.
    """
    if generator is None:
        generator = current_world().generator
    # The key always comes from the CPU's generator, even for numbers on other devices.
    drawn = torch.empty((), dtype=torch.int64)
    if generator is None:
        with _default:  # another rank of this process may have seeded the generator temporarily
            drawn.random_(-(1 << 63), None)
    elif generator.device.type == "cpu":
        drawn.random_(-(1 << 63), None, generator=generator)
    else:
        drawn = drawn.to(generator.device).random_(-(1 << 63), None, generator=generator)
    if mesh.here and mesh.size() > 1:
        drawn = drawn.to(mesh.device_type)
        broadcast(drawn, src=mesh.spec.ranks[0], group=mesh.axes_group(range(mesh.ndim)))
    if (
        carried := provenance_digest.digest()
    ):  # the provenance of the operator that draws: the result depends on the key
        provenance_digest.set_digest(hash((carried, int(drawn))))
    return Key(int(drawn), 0)


def fill_local(local: Tensor, key: Key, distribution: Distribution, spec: DTensorSpec) -> Tensor:
    """Draw this rank's shard of a tensor of layout ``spec`` into ``local``; no graph. Local."""
    if spec.takes_part:
        for tile, box in zip(spec.tiles_of(local), spec.local_boxes, strict=True):
            philox.fill(tile, key, distribution, spec.shape, box.offsets)
    return local


@recorded
def seeded_generator(key: Key, device: torch.device) -> torch.Generator:
    """A new generator, seeded with the key."""
    return torch.Generator(device).manual_seed(key.seed)


@contextmanager
def seeded(key: Key) -> Iterator[torch.Generator]:
    """A generator seeded with the key. Within the block torch's default generator has the seed too.

    For operators that draw by themselves: ranks that compute the same then draw the same. Do not
    communicate within the block: ranks that are threads would wait for each other.
    """
    own = current_world().generator
    used = [torch.default_generator] if own is None else [torch.default_generator, own]
    with _default:
        states = [generator.get_state() for generator in used]
        try:
            for generator in used:
                generator.manual_seed(key.seed)
            yield torch.Generator().manual_seed(key.seed)
        finally:
            for generator, state in zip(used, states, strict=True):
                generator.set_state(state)


@recorded
def draw_alike(mesh: DeviceMesh, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function of full tensors that draws random numbers: the same on every rank.

    Collective over the mesh; blocks. The function must not communicate. A ``generator`` among the
    arguments is replaced by a generator in the same state on all ranks.
    """
    key = next_key(mesh, kwargs.get("generator"))
    with seeded(key) as generator:
        if kwargs.get("generator") is not None:
            kwargs["generator"] = generator
        return function(*args, **kwargs)
