"""Sums between hosts in few bytes: exact within each host, bfloat16 or 8-bit integers between them.

As collectives of the ``hybrid`` backend: the ranks of a host add up in shared memory, each carries
a share of the sum to other hosts, in a *lane* of a rank on each host, and the ranks of a host hand
the result round. Only the lanes send rounded numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilework.comm.backends.internal import ROW, Rounding
from tilework.comm.backends.machine import host_identity
from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.groups import new_group
from tilework.comm.operations.internal import (
    agree_equal,
    all_gather,
    all_gather_into_tensor,
    all_to_all_single,
    reduce_scatter,
)
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.bucket import DeferredFuture, GradBucket
from tilework.parallel.comm_hooks.hooks import BucketFuture, group_or_default


class SlowLinks:
    """Settings and memory of :func:`slow_links_hook`, and sums of other tensors.

    Making it is collective over the group.

    What rounding lost of a tensor is added to the next sum of a tensor with the same key, so that
    no part of a gradient is lost for good.

    Args:
        process_group: The ranks; None: the default group.
        sent: What is sent between hosts: ``torch.bfloat16`` (half the bytes of float32) or
            ``torch.int8`` (a quarter, and 1.6 %).
        error_feedback: False: forget what rounding has lost.
        hosts: The ranks of each host, as numbers in the group; None: as they share hosts.

    Raises:
        ValueError: Ranks differ in an argument; ``sent`` is another dtype, or ``hosts`` does not
            have each rank once.
    """

    def __init__(
        self,
        process_group: AnyGroup = None,
        sent: torch.dtype = torch.bfloat16,
        error_feedback: bool = True,
        hosts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        group = self._group = group_or_default(process_group)
        #: The number of ranks.
        self.size = group.size()
        self._rounding, self._feedback = Rounding(sent), error_feedback
        given = None if hosts is None else [list(ranks) for ranks in hosts]
        facts = agree_equal(
            lambda: {"sent": str(sent), "hosts": given, "host": host_identity()},
            group,
            "all ranks must make the same SlowLinks:",
            own=("host",),
        )
        names = [each["host"] for each in facts]
        by_name: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            by_name.setdefault(name, []).append(rank)
        self._hosts = list(by_name.values()) if given is None else given
        if sorted(rank for ranks in self._hosts for rank in ranks) != list(range(group.size())):
            raise ValueError(f"hosts must have each of {group.size()} ranks once, got {given}")
        self._lanes = min(map(len, self._hosts))
        own = next(ranks for ranks in self._hosts if group.rank() in ranks)
        self._at = own.index(group.rank())
        self._host = self._part(own)
        lane = [ranks[self._at] for ranks in self._hosts] if self._at < self._lanes else []
        self._lane = self._part(lane) if lane else None
        #: What rounding has lost, by key and turn.
        self._lost: dict[tuple[object, int], Tensor] = {}

    def _part(self, ranks: Sequence[int]) -> ProcessGroup:
        global_ranks = [self._group.global_ranks[rank] for rank in ranks]
        made = new_group(global_ranks, use_local_synchronization=True)
        assert isinstance(made, ProcessGroup)
        return made

    @torch.no_grad()
    def sum(self, tensor: Tensor, key: object = 0) -> Tensor:
        """The sum of the ranks' tensors, the same bits on all of them. Collective; blocks.

        Args:
            tensor: The same shape on all ranks. It is added up in float32, and stays as it is.
            key: Names the tensor: what rounding loses is kept under it for the next call.
        """
        flat = tensor.detach().reshape(-1).float()
        flat = pad(flat, (0, -flat.numel() % (ROW * self._lanes * len(self._hosts))))
        shares = list(flat.tensor_split(self._lanes))
        shares += [flat[:0]] * (self._host.size() - self._lanes)
        own = torch.empty_like(shares[self._at])
        reduce_scatter(own, shares, ReduceOp.SUM, self._host)
        if self._lane is not None and self._lane.size() > 1:
            own = self._across(own, key, self._lane)
        all_gather(shares, own, self._host)
        return flat[: tensor.numel()].view(tensor.shape).to(tensor.dtype)

    def _across(self, own: Tensor, key: object, lane: ProcessGroup) -> Tensor:
        """The sum of a share over the hosts, in their order."""
        count = lane.size()
        if count == 2:  # each sends the whole share, as two rounds would
            return self._shared(own, (key, 0), lane).view(count, -1).sum(0)
        sent = self._encoded(own, (key, 0))
        all_to_all_single(parts := torch.empty_like(sent), sent, group=lane)
        piece = self._rounding.decoded(parts, own.numel()).view(count, -1).sum(0)
        return self._shared(piece, (key, 1), lane)

    def _shared(self, flat: Tensor, key: tuple[object, int], lane: ProcessGroup) -> Tensor:
        """The numbers of all ranks of the lane, as all of them read what was sent."""
        sent = self._encoded(flat, key)
        all_gather_into_tensor(parts := sent.new_empty(lane.size() * len(sent)), sent, lane)
        return self._rounding.decoded(parts, lane.size() * flat.numel())

    def _encoded(self, flat: Tensor, key: tuple[object, int]) -> Tensor:
        """The bytes to send for ``flat``, with what rounding lost before."""
        lost = self._lost.get(key) if self._feedback else None
        if lost is not None and lost.shape == flat.shape:
            flat = flat + lost
        sent = self._rounding.encoded(flat)
        if self._feedback:
            # Infinite gradients, which a scaler skips, are no reason to be wrong later.
            rounded = self._rounding.decoded(sent, flat.numel())
            self._lost[key] = (flat - rounded).nan_to_num_(0.0, 0.0, 0.0)
        return sent


def slow_links_hook(links: SlowLinks, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket, rounded between hosts only. Collective."""
    buffer = bucket.buffer()

    def average() -> Tensor:
        total = links.sum(buffer, bucket.index())
        return buffer.copy_(total.div_(links.size))

    return DeferredFuture(average)
