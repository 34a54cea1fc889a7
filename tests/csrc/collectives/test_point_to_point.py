"""Point-to-point messages: order, tags, any source, any size, and what goes wrong."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from tests.csrc.core_ranks import Rank, groups, run_threads
from tests.tables import each
from tilework import _core


def message(seed: int, count: int) -> Tensor:
    return torch.randint(0, 1000, (count,), generator=torch.Generator().manual_seed(seed))


@each("count", [0, 1, 5000, 300_000])
def test_send_and_receive(count: int) -> None:
    def program(rank: Rank) -> Tensor:
        tensor = message(1, count) if rank.rank == 0 else torch.zeros(count, dtype=torch.int64)
        (rank.isend if rank.rank == 0 else rank.irecv)(1 - rank.rank, tensor).wait(-1)
        return tensor

    assert torch.equal(run_threads(2, program)[1], message(1, count))


def test_two_ranks_send_long_messages_before_they_receive() -> None:
    def program(rank: Rank) -> bool:
        other = 1 - rank.rank
        sends = [rank.isend(other, message(i, 100_000), tag=i) for i in range(3)]
        kept = [torch.zeros(100_000, dtype=torch.int64) for _ in range(3)]
        receives = [rank.irecv(other, kept[i], tag=i) for i in (2, 0, 1)]
        assert all(completion.wait(-1) for completion in sends + receives)
        return all(torch.equal(kept[i], message(i, 100_000)) for i in range(3))

    assert run_threads(2, program) == [True, True]


def test_without_anybody_waiting_messages_still_move() -> None:
    def program(rank: Rank) -> bool:
        tensor = message(1, 100_000) if rank.rank == 0 else torch.zeros(100_000, dtype=torch.int64)
        completion = (rank.isend if rank.rank == 0 else rank.irecv)(1 - rank.rank, tensor)
        deadline = time.monotonic() + 60
        while not completion.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        return completion.done() and torch.equal(tensor, message(1, 100_000))

    assert run_threads(2, program) == [True, True]


def test_messages_of_a_pair_stay_in_order() -> None:
    def program(rank: Rank) -> list[float]:
        if rank.rank == 0:
            assert all(rank.isend(1, torch.tensor([float(i)])).wait(-1) for i in range(200))
            return []
        kept = [torch.zeros(1) for _ in range(200)]
        completions = [rank.irecv(0, tensor) for tensor in kept]
        assert all(completion.wait(-1) for completion in completions)
        return [tensor.item() for tensor in kept]

    assert run_threads(2, program)[1] == [float(i) for i in range(200)]


def test_a_receive_takes_the_message_with_its_tag() -> None:
    def program(rank: Rank) -> list[float]:
        if rank.rank == 0:
            for tag in (5, 6, 5, 7):
                rank.isend(1, torch.tensor([float(tag)]), tag=tag)
            rank.run("barrier")
            return []
        heard = []
        for tag in (7, 5, 6, 5):
            tensor = torch.zeros(1)
            assert rank.irecv(0, tensor, tag=tag).wait(-1)
            heard.append(tensor.item())
        rank.run("barrier")
        return heard

    assert run_threads(2, program)[1] == [7.0, 5.0, 6.0, 5.0]


def test_a_long_unexpected_message_is_kept() -> None:
    def program(rank: Rank) -> bool:
        if rank.rank == 0:
            completions = [rank.isend(1, message(i, 50_000), tag=i) for i in (1, 2)]
            return all(completion.wait(-1) for completion in completions)
        kept = [torch.zeros(50_000, dtype=torch.int64) for _ in range(2)]
        second = rank.irecv(0, kept[1], tag=2)
        time.sleep(0.05)
        first = rank.irecv(0, kept[0], tag=1)
        assert second.wait(-1)
        assert first.wait(-1)
        return all(torch.equal(kept[i], message(i + 1, 50_000)) for i in range(2))

    assert run_threads(2, program) == [True, True]


def test_receive_from_any_rank_tells_the_source() -> None:
    def program(rank: Rank) -> list[tuple[int, float]]:
        if rank.rank != 0:
            time.sleep(0.05 * rank.rank)
            rank.isend(0, torch.tensor([float(rank.rank)]), tag=3)
            rank.run("barrier")
            return []
        heard = []
        for _ in range(2):
            tensor = torch.zeros(1)
            completion = rank.irecv(-1, tensor, tag=3)
            assert completion.source() == -1
            assert completion.wait(-1)
            heard.append((completion.source(), tensor.item()))
        rank.run("barrier")
        return heard

    assert run_threads(3, program)[0] == [(1, 1.0), (2, 2.0)]


def test_a_rank_may_send_to_itself() -> None:
    with groups(1) as (group,):
        rank, kept = Rank(group, 0, 1), torch.zeros(300_000, dtype=torch.int64)
        send = rank.isend(0, message(4, 300_000))
        assert rank.irecv(0, kept).wait(-1)
        assert send.wait(-1)
        assert torch.equal(kept, message(4, 300_000))


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_another_size_or_dtype_fails_the_receive_only(wrong: Tensor) -> None:
    def program(rank: Rank) -> float:
        if rank.rank == 0:
            assert rank.isend(1, torch.ones(2)).wait(-1)
            assert rank.isend(1, torch.full((2,), 5.0)).wait(-1)
            rank.run("barrier")
            return 0
        with pytest.raises(_core.Fault, match="rank 0 sent 8 bytes of float32") as caught:
            rank.irecv(0, wrong).wait(-1)
        assert caught.value.args[:2] == ("mismatch", (0,))
        good = torch.zeros(2)
        assert rank.irecv(0, good).wait(-1)
        rank.run("barrier")
        return good[1].item()

    assert run_threads(2, program)[1] == 5.0


def test_a_receive_times_out_by_itself() -> None:
    with groups(2) as (group, _):
        tensor = torch.zeros(1)
        completion = Rank(group, 0, 2).irecv(1, tensor, tag=9, timeout=0.05)
        with pytest.raises(_core.Fault) as caught:
            completion.wait(120.0)
        text = "rank 1 did not send a message with tag 9 within 0.05 s"
        assert caught.value.args == ("timeout", (1,), text)


def test_a_send_that_finds_no_room_times_out() -> None:
    with groups(2) as (group, _):
        tensor = torch.zeros(100_000)
        completion = Rank(group, 0, 2).isend(1, tensor, timeout=0.05)
        with pytest.raises(_core.Fault, match="rank 1 did not make room"):
            completion.wait(120.0)
        with pytest.raises(_core.Fault, match="given up half way"):
            Rank(group, 0, 2).isend(1, torch.zeros(1)).wait(120.0)


def test_what_was_sent_before_leaving_still_arrives() -> None:
    with groups(2) as (sender, receiver):
        assert Rank(sender, 0, 2).isend(1, torch.tensor([3.0])).wait(-1)
        sender.close()
        tensor = torch.zeros(1)
        assert Rank(receiver, 1, 2).irecv(0, tensor).wait(-1)
        assert tensor.item() == 3.0
        with pytest.raises(_core.Fault, match="rank 0 left the group"):
            Rank(receiver, 1, 2).irecv(0, tensor).wait(-1)


def test_messages_and_collectives_do_not_disturb_each_other() -> None:
    def program(rank: Rank) -> float:
        kept, total = torch.zeros(40_000, dtype=torch.int64), torch.ones(3000)
        receive = rank.irecv((rank.rank - 1) % 3, kept)
        rank.run("all_reduce", [total], [total], op="sum")
        send = rank.isend((rank.rank + 1) % 3, message(rank.rank, 40_000))
        rank.run("all_reduce", [total], [total], op="sum")
        assert receive.wait(-1)
        assert send.wait(-1)
        assert torch.equal(kept, message((rank.rank - 1) % 3, 40_000))
        return total[-1].item()

    assert run_threads(3, program) == [9.0] * 3


def test_a_foreign_rank_is_refused() -> None:
    with groups(2) as (group, _), pytest.raises(ValueError, match="rank 2 is not in this group"):
        Rank(group, 0, 2).isend(2, torch.zeros(1))
