"""torch's underscored names for methods of meshes, which programs call all the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class TorchMeshNames:
    """Methods of a mesh under the names that they have in torch."""

    def _flatten(self: Any, mesh_dim_name: str | None = None, backend_override: Any = None) -> Any:
        """The same as :meth:`DeviceMesh.flatten`."""
        return self.flatten(mesh_dim_name, backend_override)

    def _unflatten(
        self: Any,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Iterable[str],
        backend_override: Any = None,
    ) -> Any:
        """The same as :meth:`DeviceMesh.unflatten`."""
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override)

    @classmethod
    def _concatenate(cls: Any, device_mesh_list: Sequence[Any]) -> Any:
        """The same as :meth:`DeviceMesh.concatenate`."""
        return cls.concatenate(device_mesh_list)


def backends_of_axes(
    override: Any, names: Sequence[str] | None, ndim: int
) -> tuple[str | None, ...]:
    """The backend of the groups along each axis; None: the default group's backend.

    Args:
        override: A dict of backends by axis (a number or a name); a sequence with a backend or None
            for each axis; or None. A backend is a name, or a pair of a name and options, which are
            ignored.
        names: The names of the axes; None: they have no names.
        ndim: The number of axes.

    Raises:
        ValueError: An axis does not exist or is named twice, or the sequence has another length.
        TypeError: ``override`` or a backend in it has another type.

    Example:
        >>> backends_of_axes({"tp": "gloo"}, ("dp", "tp"), 2)
        (None, 'gloo')
    """
    if override is None:
        return (None,) * ndim
    if isinstance(override, str) or not isinstance(override, dict | list | tuple):
        raise TypeError(
            f"backend_override is a dict of backends by axis, such as {{'tp': 'gloo'}}, or a list "
            f"with a backend or None for each axis, got {override!r}"
        )
    if not isinstance(override, dict):
        if len(override) != ndim:
            raise ValueError(
                f"backend_override has one backend, or None, for each of the mesh's {ndim} axes; "
                f"got {len(override)}"
            )
        override = dict(enumerate(override))
    backends: dict[int, str | None] = {}
    for axis, backend in override.items():
        known = list(names or ())
        number = known.index(axis) if axis in known else axis
        if not isinstance(number, int) or not 0 <= number < ndim or number in backends:
            raise ValueError(
                f"backend_override names axis {axis!r}, which does not exist or is named twice; "
                f"the mesh has the axes {', '.join(known) or f'0 to {ndim - 1}'}"
            )
        backends[number] = _backend_name(backend)
    return tuple(backends.get(number) for number in range(ndim))


def _backend_name(backend: Any) -> str | None:
    name = backend[0] if isinstance(backend, tuple) and backend else backend
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"a backend in backend_override is a name, or a pair of a name and options, got "
            f"{backend!r} of type {type(backend).__name__}"
        )
    return name
