"""torch.distributed.distributed_c10d's names: ``tilework.distributed``'s, and underscored ones.

Programs import these from there although they are private; here each is a public name, too::

    from tilework.distributed.distributed_c10d import _get_default_group  # get_default_group
"""

# imported for others

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tilework.comm.contract import Work as _Work
from tilework.comm.contract import make_premul_sum as _make_nccl_premul_sum
from tilework.comm.functional.internal import group_named as _resolve_process_group
from tilework.comm.groups import DEFAULT_TIMEOUT
from tilework.comm.groups import abort_process_group as _abort_process_group
from tilework.comm.operations.internal import CoalescedWork as _CoalescingManager
from tilework.comm.operations.internal import all_gather_into_tensor as _all_gather_base
from tilework.comm.operations.internal import coalescing_manager as _coalescing_manager
from tilework.comm.operations.internal import device_of
from tilework.comm.operations.internal import reduce_scatter_tensor as _reduce_scatter_base
from tilework.comm.world import AnyGroup, NonMember, resolve
from tilework.comm.world import get_default_group as _get_default_group
from tilework.comm.world import get_default_store as _get_default_store
from tilework.comm.world import get_world_size as _get_group_size
from tilework.comm.world import rank_not_in_group as _rank_not_in_group
from tilework.late_names import late_name
from tilework.store import store_based_barrier as _store_based_barrier

if TYPE_CHECKING:
    import torch


__all__ = [
    "_CoalescingManager",
    "_Work",
    "_abort_process_group",
    "_all_gather_base",
    "_coalescing_manager",
    "_compute_bucket_assignment_by_size",  # noqa: F822  # by __getattr__
    "_get_default_group",
    "_get_default_store",
    "_get_default_timeout",
    "_get_group_size",
    "_get_group_size_by_name",
    "_get_object_coll_device",
    "_get_pg_default_device",
    "_get_process_group_name",
    "_make_nccl_premul_sum",
    "_rank_not_in_group",
    "_reduce_scatter_base",
    "_resolve_process_group",
    "_set_pg_timeout",
    "_store_based_barrier",
]


def _get_process_group_name(group: AnyGroup) -> str:
    """The name of ``group``: ``group.group_name``."""
    return resolve(group).group_name


def _get_group_size_by_name(group_name: str) -> int:
    """The number of ranks in this rank's group of the name ``group_name``."""
    return _resolve_process_group(group_name).size()


def _get_default_timeout(backend: str) -> timedelta:
    """The time that operations of any backend wait for other ranks, unless another is given."""
    return DEFAULT_TIMEOUT


def _get_pg_default_device(group: AnyGroup = None) -> torch.device:
    """The device of the tensors that carry the objects of ``group``'s object collectives."""
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        raise ValueError(f"this rank is not in {resolved!r}")
    return device_of(resolved)


_get_object_coll_device = _get_pg_default_device


def _set_pg_timeout(timeout: timedelta, group: AnyGroup = None) -> None:
    """Set how long operations of ``group`` that are called from now on wait: ``set_timeout``."""
    resolved = resolve(group)
    if not isinstance(resolved, NonMember):
        resolved.set_timeout(timeout)


def __getattr__(name: str) -> Any:
    """A name of ``tilework.distributed``, or ``_compute_bucket_assignment_by_size``."""
    if name == "_compute_bucket_assignment_by_size":
        return late_name("distributed", name)
    package = sys.modules["tilework.distributed"]
    if name.startswith("__") or name == "distributed_c10d" or name not in dir(package):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(package, name)
