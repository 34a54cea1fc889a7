"""Point to point: send, recv, isend, irecv, batches."""

from __future__ import annotations

import functools
import time

import torch

import tilework.distributed as dist
from tilework.comm.contract import Capability
from tilework.errors import CollectiveMismatchError
from tilework.testing.groups.base import (
    GroupSuite,
    failure_of,
    needs,
    refused,
    started,
    still_works,
)
from tilework.testing.groups.values import Case, assert_same, pattern

_F32 = torch.float32


class MessageSuite(GroupSuite):
    """Messages between two ranks."""

    def test_send_and_recv(self) -> None:
        def body(rank: int) -> None:
            for case in self.cases():
                if rank == 0:
                    dist.send(case.make(3), dst=1)
                else:
                    tensor = case.blank()
                    assert dist.recv(tensor, src=0) == 0
                    assert_same(tensor, case.value(3), case)

        self.run(2, body)

    def test_isend_and_irecv(self) -> None:
        def body(rank: int) -> None:
            for case in self.cases():
                tensor = case.make(4) if rank == 0 else case.blank()
                transfer = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
                assert started(transfer).wait() is True
                assert_same(tensor, case.value(4), case)

        self.run(2, body)

    def test_a_message_of_many_chunks(self) -> None:
        def body(rank: int) -> None:
            if rank == 0:
                dist.send(pattern(1, (self.large,), _F32), dst=1)
            else:
                tensor = torch.zeros(self.large)
                dist.recv(tensor, src=0)
                assert_same(tensor, pattern(1, (self.large,), _F32))

        self.run(2, body)

    def test_messages_with_one_tag_keep_their_order(self) -> None:
        def body(rank: int) -> None:
            for i in range(20):
                tensor = torch.tensor([float(i)])
                if rank == 0:
                    dist.send(tensor, dst=1)
                else:
                    dist.recv(tensor.zero_(), src=0)
                    assert tensor.item() == i

        self.run(2, body)

    def test_tags_tell_messages_apart(self) -> None:
        def body(rank: int) -> None:
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

        self.run(2, body)

    def test_recv_from_any_says_from_whom(self) -> None:
        def body(rank: int) -> None:
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

        self.run(4, body)

    def test_irecv_from_any_says_from_whom(self) -> None:
        def body(rank: int) -> None:
            tensor = torch.full((2,), 5.0)
            if rank == 2:
                dist.send(tensor, dst=0, tag=9)
            elif rank == 0:
                work = started(dist.irecv(tensor.zero_(), tag=9))
                work.wait()
                assert work.source_rank() == 2
                assert tensor.tolist() == [5.0, 5.0]

        self.run(3, body)

    def test_everyone_sends_to_everyone_at_once(self, n: int) -> None:
        def body(rank: int) -> None:
            peers = [peer for peer in range(n) if peer != rank]
            inbox = {peer: torch.zeros(1000) for peer in peers}
            works = [dist.irecv(tensor, peer) for peer, tensor in inbox.items()]
            works += [dist.isend(pattern(rank, (1000,), _F32), peer) for peer in peers]
            for work in works:
                started(work).wait()
            for peer, tensor in inbox.items():
                assert_same(tensor, pattern(peer, (1000,), _F32))

        self.run(n, body)

    def test_batch_isend_irecv(self, n: int) -> None:
        def body(rank: int) -> None:
            right, left = (rank + 1) % n, (rank - 1) % n
            if n == 1:
                return
            tensor = torch.zeros(4)
            ops = [
                dist.P2POp(dist.isend, pattern(rank, (4,), _F32), right),
                dist.P2POp(dist.irecv, tensor, left),
            ]
            for work in dist.batch_isend_irecv(op for op in ops):
                work.wait()
            assert_same(tensor, pattern(left, (4,), _F32))

        self.run(n, body)

    def test_messages_and_collectives_do_not_mix_up(self) -> None:
        def body(rank: int) -> None:
            outbox, inbox = torch.full((5,), float(rank)), torch.zeros(5)
            sending = started(dist.isend(outbox, 1 - rank))
            still_works(2)
            receiving = started(dist.irecv(inbox, 1 - rank))
            still_works(2)
            sending.wait()
            receiving.wait()
            assert inbox.tolist() == [1.0 - rank] * 5

        self.run(2, body)

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
    def test_a_message_that_does_not_fit_raises_at_the_receiver(self) -> None:
        outboxes = [Case((2,), _F32), Case((3,), torch.int32)]

        def body(rank: int) -> None:
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

        self.run(2, body)

    def test_nobody_writes_to_themselves(self) -> None:
        def body(rank: int) -> None:
            with refused():
                dist.send(torch.ones(1), dst=rank)
            with refused():
                dist.recv(torch.ones(1), src=rank)
            still_works(2)

        self.run(2, body)

    def test_wrong_batches_are_refused(self) -> None:
        def body(rank: int) -> None:
            with refused():
                dist.batch_isend_irecv([])
            with refused():
                dist.P2POp(dist.broadcast, torch.ones(1), 1 - rank)
            with refused("this rank itself"):  # before messages of the batch are sent
                dist.P2POp(dist.irecv, torch.ones(1), rank)
            with refused():
                dist.batch_isend_irecv(["not an operation"])  # type: ignore[list-item]
            still_works(2)

        self.run(2, body)
