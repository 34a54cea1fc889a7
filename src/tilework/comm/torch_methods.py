"""torch's further names for a group's methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class TorchMethods:
    """A group's methods under the names that programs of torch.distributed call."""

    __slots__ = ()

    # The contract is above this module: ``opts`` are Options, and each returns a Work.

    def _allgather_base(self: Any, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """The same as ``allgather_into_tensor``: torch's name."""
        return self.allgather_into_tensor(output, input, opts)

    def _reduce_scatter_base(self: Any, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """The same as ``reduce_scatter_tensor``: torch's name."""
        return self.reduce_scatter_tensor(output, input, opts)

    def alltoall_base(
        self: Any,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        """The same as ``alltoall_single``: torch's name."""
        sizes = list(output_split_sizes), list(input_split_sizes)
        return self.alltoall_single(output, input, *sizes, opts)

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def allgather_into_tensor_coalesced(
        self: Any,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> Any:
        """``allgather_into_tensor`` of several tensors, as one work."""
        pairs = zip(outputs, inputs, strict=True)
        return self._as_one([self.allgather_into_tensor(*pair, opts) for pair in pairs])

    def reduce_scatter_tensor_coalesced(
        self: Any,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
    ) -> Any:
        """``reduce_scatter_tensor`` of several tensors, as one work."""
        pairs = zip(outputs, inputs, strict=True)
        return self._as_one([self.reduce_scatter_tensor(*pair, opts) for pair in pairs])

    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _as_one(self, works: list[Any]) -> Any:
        """A Work that is done when all of ``works`` are done."""
        raise NotImplementedError

    def _get_backend(self: Any, device: torch.device | str) -> Any:
        """The group that serves tensors on ``device``.

        This is a part of this group if each device type has a separate backend, else this group
        itself.
        """
        by_device = getattr(self, "by_device", {})
        return by_device.get(torch.device(device).type, self)

    def shutdown(self: Any) -> None:
        """The same as ``close``: leave the group. Not collective."""
        self.close()

    @property
    def bound_device_id(self) -> None:
        """None: groups are bound to no device."""
        return None
