"""Point to point: send, recv, isend, irecv, batches."""

from __future__ import annotations

import functools
import time

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.contract import Capability
from tilework.errors import CollectiveMismatchError, DistBackendError
from tilework.testing.groups.base import (
    GroupSuite,
    failure_of,
    inside,
    needs,
    on_ranks,
    started,
    still_works,
)
from tilework.testing.groups.values import Case, assert_same, folded, pattern

_F32 = torch.float32


class MessageSuite(GroupSuite):
    """Messages between two ranks."""

    @on_ranks(2)
    def test_send_and_recv(self, rank: int) -> None:
        for case in (*self.cases(), Case((self.large,), _F32)):
            if rank == 0:
                dist.send(case.make(3), dst=1)
            else:
                tensor = case.blank()
                assert dist.recv(tensor, src=0) == 0
                assert_same(tensor, case.value(3), case)

    @on_ranks(2)
    def test_isend_and_irecv(self, rank: int) -> None:
        for case in self.cases():
            tensor = case.make(4) if rank == 0 else case.blank()
            transfer = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
            assert started(transfer).wait() is True
            assert_same(tensor, case.value(4), case)

    @on_ranks(2)
    def test_messages_with_one_tag_keep_their_order(self, rank: int) -> None:
        for i in range(20):
            tensor = torch.tensor([float(i)])
            if rank == 0:
                dist.send(tensor, dst=1)
            else:
                dist.recv(tensor.zero_(), src=0)
                assert tensor.item() == i

    @on_ranks(2)
    def test_tags_tell_messages_apart(self, rank: int) -> None:
        if rank == 0:
            works = [dist.isend(torch.full((2,), float(t)), 1, tag=t) for t in (1, 2, 3)]
        else:
            inbox = {t: torch.zeros(2) for t in (3, 1, 2)}
            works = [dist.irecv(tensor, 0, tag=t) for t, tensor in inbox.items()]
        for work in works:
            started(work).wait()
        if rank == 1:
            assert {t: tensor.tolist() for t, tensor in inbox.items()} == {
                t: [float(t)] * 2 for t in (1, 2, 3)
            }

    @on_ranks(4)
    def test_recv_from_any_says_from_whom(self, rank: int) -> None:
        if rank != 1:
            dist.send(torch.full((3,), float(rank)), dst=1)
            return
        heard = []
        for _ in range(3):
            tensor = torch.zeros(3)
            source = dist.recv(tensor)
            assert tensor.tolist() == [float(source)] * 3
            heard.append(source)
        assert sorted(heard) == [0, 2, 3]

    @on_ranks(3)
    def test_irecv_from_any_says_from_whom(self, rank: int) -> None:
        tensor = torch.full((2,), 5.0)
        if rank == 2:
            dist.send(tensor, dst=0, tag=9)
        elif rank == 0:
            work = started(dist.irecv(tensor.zero_(), tag=9))
            work.wait()
            assert work.source_rank() == 2
            assert tensor.tolist() == [5.0, 5.0]

    @on_ranks()
    def test_everyone_sends_to_everyone_at_once(self, rank: int, n: int) -> None:
        peers = [peer for peer in range(n) if peer != rank]
        inbox = {peer: torch.zeros(1000) for peer in peers}
        works = [dist.irecv(tensor, peer) for peer, tensor in inbox.items()]
        works += [dist.isend(pattern(rank, (1000,), _F32), peer) for peer in peers]
        for work in works:
            started(work).wait()
        for peer, tensor in inbox.items():
            assert_same(tensor, pattern(peer, (1000,), _F32))

    @on_ranks(2)
    def test_messages_and_collectives_do_not_mix_up(self, rank: int) -> None:
        outbox, inbox = torch.full((5,), float(rank)), torch.zeros(5)
        sending = started(dist.isend(outbox, 1 - rank))
        still_works(2)
        receiving = started(dist.irecv(inbox, 1 - rank))
        still_works(2)
        sending.wait()
        receiving.wait()
        assert inbox.tolist() == [1.0 - rank] * 5

    def test_the_receiver_may_come_first_and_wait(self) -> None:
        def body(rank: int) -> float:
            start = time.monotonic()
            if rank == 0:
                time.sleep(0.1)
                dist.send(torch.ones(1), dst=1)
            else:
                dist.recv(torch.zeros(1), src=0)
            return time.monotonic() - start

        assert self.run(2, body)[1] > 0.08

    @needs(Capability.COMPARISON)
    @on_ranks(2)
    def test_a_message_that_does_not_fit_raises_at_the_receiver(self, rank: int) -> None:
        outboxes = [Case((2,), _F32), Case((3,), torch.int32)]
        for case in outboxes:
            group = dist.new_group()
            if rank == 0:
                # The sender may have handed its bytes over before anyone looked at them.
                dist.isend(case.make(0), 1, group=group)
                dist.barrier()
            else:
                error = failure_of(functools.partial(dist.recv, torch.zeros(3), 0, group))
                assert error.kind is CollectiveMismatchError
                dist.barrier()


class AliasSuite(GroupSuite):
    """Outputs that share memory with inputs: as if the input had been copied first, or refused."""

    @on_ranks()
    def test_all_gather_in_place(self, rank: int, n: int) -> None:
        expected = torch.stack([pattern(r, (50,), _F32) for r in range(n)])
        whole = torch.zeros(n, 50)
        whole[rank] = expected[rank]
        dist.all_gather_into_tensor(whole, whole[rank])
        assert_same(whole, expected)
        parts = [torch.zeros(50) for _ in range(n)]
        parts[rank].copy_(expected[rank])
        dist.all_gather(parts, parts[rank])
        assert_same(torch.stack(parts), expected)

    @on_ranks()
    def test_reduce_scatter_in_place(self, rank: int, n: int) -> None:
        total = folded("SUM", [pattern(r, (n, 50), _F32) for r in range(n)])
        whole = pattern(rank, (n, 50), _F32)
        dist.reduce_scatter_tensor(whole[rank], whole)
        assert_same(whole[rank], total[rank])
        parts = list(pattern(rank, (n, 50), _F32))
        dist.reduce_scatter(parts[rank], parts)
        assert_same(parts[rank], total[rank])

    @on_ranks()
    def test_gather_and_scatter_in_place(self, rank: int, n: int) -> None:
        parts = [pattern(r if r == rank else 9, (50,), _F32) for r in range(n)]
        mine = parts[rank]
        dist.gather(mine, parts if rank == 0 else None, dst=0)
        for r, part in enumerate(parts if rank == 0 else []):
            assert_same(part, pattern(r, (50,), _F32))
        dist.scatter(mine, parts if rank == 0 else None, src=0)
        assert_same(mine, pattern(rank, (50,), _F32))

    @on_ranks()
    def test_all_to_all_in_place(self, rank: int, n: int) -> None:
        for length in (3, self.large // 10):
            whole = pattern(rank, (n, length), _F32)
            parts = list(whole.clone())
            expected = torch.stack([pattern(r, (n, length), _F32)[rank] for r in range(n)])
            dist.all_to_all_single(whole, whole)
            assert_same(whole, expected)
            dist.all_to_all(parts, parts)
            assert_same(torch.stack(parts), expected)

    @on_ranks(2)
    def test_views_that_conjugate_or_negate_lazily(self, rank: int) -> None:
        lazy = torch.tensor([1 + 2j, 3 - 1j]).conj()
        outputs = [torch.zeros(2, dtype=lazy.dtype) for _ in range(2)]
        dist.all_gather(outputs, lazy)
        assert outputs[1 - rank].tolist() == [1 - 2j, 3 + 1j]
        dist.all_reduce(lazy)
        assert lazy.tolist() == [2 - 4j, 6 + 2j]
        negative = lazy.imag
        dist.broadcast(negative, src=0)
        assert negative.tolist() == [-4.0, 2.0]

    @on_ranks(2)
    def test_autograd_notices_what_was_overwritten(self, rank: int) -> None:
        weight = torch.ones(3, requires_grad=True)
        square = (weight * weight).sum()
        with torch.no_grad():
            dist.all_reduce(weight)
        with pytest.raises(RuntimeError, match="inplace"):
            square.backward()  # type: ignore[no-untyped-call]

    @on_ranks(2)
    def test_work_that_outlives_its_group(self, rank: int) -> None:
        group = inside(dist.new_group())
        works = []
        if rank == 0:
            works.append(started(dist.all_reduce(torch.ones(2), group=group, async_op=True)))
            works.append(started(dist.irecv(torch.ones(2), 1, group=group)))
        dist.barrier()
        dist.destroy_process_group(group)
        for work in works:
            with pytest.raises(DistBackendError):
                work.wait()
            assert isinstance(work.exception(), DistBackendError)
        dist.barrier()

    @on_ranks(2)
    def test_messages_that_nobody_fetched_are_no_trouble(self, rank: int) -> None:
        works = [dist.isend(torch.ones(100), 1 - rank, tag=tag) for tag in range(50)]
        dist.barrier()
        del works
        still_works(2)
