"""What torch.distributed offers, called on tilework's groups from Python and from C++."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

import tilework.torch_backend
from tests.jobs import Launcher, Rank
from tilework.comm.forms import Operation

dist: Any = torch.distributed  # which hides many of its names from type checkers
N = 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def test_the_name_is_known() -> None:
    name = tilework.torch_backend.BACKEND_NAME
    assert dist.is_backend_available(name)
    assert dist.Backend("TILEWORK") == name
    # Nothing is chosen for programs that name no backend.
    assert dist.get_default_backend_for_device("cpu") == "gloo"


def reductions(rank: Rank) -> None:
    with rank.joined():
        for dtype in DTYPES:
            x = torch.full((5,), rank.number + 1, dtype=dtype)
            dist.all_reduce(x)
            assert x.tolist() == [6] * 5
        for op, result in (
            (dist.ReduceOp.AVG, 2.0),
            (dist.ReduceOp.PRODUCT, 6.0),
            (dist.ReduceOp.MIN, 1.0),
            (dist.ReduceOp.MAX, 3.0),
            (dist._make_nccl_premul_sum(0.5), 3.0),
        ):
            x = torch.tensor([rank.number + 1.0])
            dist.all_reduce(x, op=op)
            assert x.item() == result, op
        for op, result in (
            (dist.ReduceOp.BOR, 7),
            (dist.ReduceOp.BXOR, 7),
            (dist.ReduceOp.BAND, 0),
        ):
            bits = torch.tensor([1 << rank.number])
            dist.all_reduce(bits, op=op)
            assert bits.item() == result, op
        z = torch.tensor([1 + 2j]) * (rank.number + 1)
        dist.all_reduce(z)
        assert z.item() == 6 + 12j
        last = torch.tensor([1.0])
        dist.reduce(last, dst=2)
        assert last.item() == (3.0 if rank.number == 2 else 1.0)


def means_of_integers(rank: Rank) -> None:
    """The sum divided, without the fraction, as NCCL's."""
    mean = dist.ReduceOp.AVG
    with rank.joined():
        x = torch.tensor([rank.number, -3, -rank.number])
        work = dist.all_reduce(x, op=mean, async_op=True)
        assert work is not None
        assert work.get_future().wait()[0].tolist() == [1, -3, -1]
        assert work.wait()
        dist.all_reduce(x[1:], op=mean)
        last = torch.tensor([4 + rank.number, 1], dtype=torch.uint8)
        dist.reduce(last, 1, op=mean)
        assert last.tolist() == [5 + (rank.number == 2) - (rank.number == 0), 1]
        part = torch.zeros(1, dtype=torch.int32)
        dist.reduce_scatter_tensor(part, torch.arange(3, dtype=torch.int32), op=mean)
        assert x.tolist() + part.tolist() == [1, -3, -1, rank.number]
        with pytest.raises(tilework.errors.CollectiveMismatchError, match="SUM for AVG"):
            dist.all_reduce(x, op=mean if rank.number else dist.ReduceOp.SUM)


def shapes_of_messages(rank: Rank) -> None:
    with rank.joined():
        sent = (torch.tensor(7.0), torch.arange(6.0), torch.arange(6.0).view(3, 2).t())
        received = (torch.zeros(1), torch.zeros(2, 3).t(), torch.zeros(6))
        for x, y in zip(sent, received, strict=True):
            if rank.number == 0:
                dist.send(x, 1)
            elif rank.number == 1:
                dist.irecv(y, 0).wait()
                assert y.flatten().tolist() == x.flatten().tolist()
        if rank.number == 0:
            dist.isend(torch.zeros(6), 1)
        if rank.number == 1:
            with pytest.raises(tilework.errors.CollectiveMismatchError):
                dist.recv(torch.zeros(5), 0)


def writes_that_backward_sees(rank: Rank) -> None:
    with rank.joined():
        w = torch.ones(2, requires_grad=True)
        loss = (w * 3).sum()
        dist.all_reduce(loss)  # for a log: nothing needs the old value
        torch.autograd.backward(loss)
        assert w.grad is not None
        assert w.grad.tolist() == [3.0, 3.0]
        y = torch.relu(w)
        dist.all_reduce(y)
        with pytest.raises(RuntimeError, match=r"all_reduce at .* overwrote the result of Relu"):
            torch.autograd.backward(y.sum())


def moves(rank: Rank) -> None:
    me = float(rank.number)
    with rank.joined():
        x = torch.full((2, 2), me).t()
        dist.broadcast(x, src=1)
        assert x.tolist() == [[1.0, 1.0]] * 2
        parts = [torch.empty(r + 1) for r in range(N)]
        dist.all_gather(parts, torch.full((rank.number + 1,), me))  # of different sizes
        assert [part.tolist() for part in parts] == [[0.0], [1.0] * 2, [2.0] * 3]
        whole = torch.empty(N, 2)
        dist.all_gather_into_tensor(whole, torch.full((2,), me))
        assert whole[:, 0].tolist() == [0.0, 1.0, 2.0]
        out = torch.empty(2)
        dist.reduce_scatter_tensor(out, torch.arange(6.0))
        assert out.tolist() == [6.0 * rank.number, 6.0 * rank.number + 3]
        dist.reduce_scatter(out, [torch.full((2,), float(r)) for r in range(N)])
        assert out.tolist() == [3 * me] * 2
        gathered = [torch.empty(1) for _ in range(N)] if rank.number == 1 else None
        dist.gather(torch.tensor([me]), gathered, dst=1)
        assert gathered is None or torch.cat(gathered).tolist() == [0.0, 1.0, 2.0]
        mine = torch.empty(1)
        sources = [torch.tensor([10.0 + r]) for r in range(N)] if rank.number == 2 else None
        dist.scatter(mine, sources, src=2)
        assert mine.item() == 10 + me
        single = torch.empty(N)
        dist.all_to_all_single(single, torch.arange(3.0) + 10 * me)
        assert single.tolist() == [me, 10 + me, 20 + me]
        uneven = torch.empty(rank.number * N)
        splits = list(range(N))
        dist.all_to_all_single(uneven, torch.full((3,), me), [rank.number] * N, splits)
        assert uneven.tolist() == [float(r) for r in range(N) for _ in range(rank.number)]
        lists = [torch.empty(1) for _ in range(N)]
        dist.all_to_all(lists, [torch.tensor([10 * me + r]) for r in range(N)])
        assert torch.cat(lists).tolist() == [me, 10 + me, 20 + me]


def messages(rank: Rank) -> None:
    with rank.joined():
        after, before = (rank.number + 1) % N, (rank.number - 1) % N
        x, y = torch.tensor([float(rank.number)]), torch.empty(1)
        operations = [dist.P2POp(dist.irecv, y, before), dist.P2POp(dist.isend, x, after)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert y.item() == before
        if rank.number == 0:
            senders = {dist.recv(y) for _ in range(N - 1)}
            assert senders == {1, 2}
        else:
            dist.send(x, 0)
        pair = dist.new_group([1, 2])
        if rank.number == 2:
            dist.send(x, 1, group=pair, tag=7)
        elif rank.number == 1:
            assert dist.recv(y, group=pair, tag=7) == 2  # a global rank
            assert y.item() == 2
        values = [rank.number, "text"] if rank.number == 0 else [None, None]
        dist.broadcast_object_list(values, src=0)
        assert values == [0, "text"]
        everyone = [None] * N
        dist.all_gather_object(everyone, {rank.number})
        assert everyone == [{0}, {1}, {2}]


def groups(rank: Rank) -> None:
    with rank.joined():
        world = dist.group.WORLD
        assert world is not None
        assert (dist.get_backend(), world.name()) == ("tilework", "tilework")
        assert (world.rank(), world.size(), world._device_types) == (
            rank.number,
            N,
            [torch.device("cpu")],
        )
        local = dist.new_group([0, 2], use_local_synchronization=True)
        if rank.number != 1:
            x = torch.ones(1)
            dist.all_reduce(x, group=local)
            assert x.item() == 2
            assert dist.get_process_group_ranks(local) == [0, 2]
        alone, every = dist.new_subgroups(group_size=1)
        assert len(every) == N
        dist.barrier(alone)
        mesh = init_device_mesh("cpu", (N, 1), mesh_dim_names=("a", "b"))
        flat = mesh._flatten()
        x = torch.ones(1)
        dist.all_reduce(x, group=flat.get_group())
        dist.all_reduce(x, group=mesh["a"].get_group())
        dist.all_reduce(x, group=mesh["b"].get_group())
        assert x.item() == N * N
        dist.destroy_process_group(alone)
    with rank.joined():  # torch numbers its groups from the start again
        dist.barrier()


def asynchronous(rank: Rank) -> None:
    with rank.joined():
        x = torch.ones(4)
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        assert work.wait(timedelta(seconds=120))
        assert work.is_completed()
        assert work.is_success()
        assert work.result()[0].tolist() == [3.0] * 4
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        futures = [work.get_future().then(lambda f: f.value()[0] + 1) for work in works if work]
        torch.futures.wait_all(futures)
        assert futures[2].value().tolist() == [82.0] * 4
        # A callback may wait for another operation.
        nested = dist.all_reduce(x, async_op=True)
        assert nested is not None

        def again(done: torch.futures.Future[Any]) -> float:
            inner = dist.all_reduce(done.value()[0], async_op=True)
            assert inner is not None
            return float(inner.get_future().wait()[0][0])

        assert nested.get_future().then(again).wait() == 81 * 9


def coalesced(rank: Rank) -> None:
    with rank.joined():
        a, b = torch.ones(2), torch.ones(3)
        with dist._coalescing_manager():
            dist.all_reduce(a)
            dist.all_reduce(b)
        assert a.tolist() + b.tolist() == [3.0] * 5
        outputs = [torch.empty(N), torch.empty(2 * N)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for output in outputs:
                part = torch.full((len(output) // N,), float(rank.number))
                dist.all_gather_into_tensor(output, part)
        manager.wait()
        assert outputs[1].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        with dist._coalescing_manager():
            dist.reduce_scatter_tensor(a[:1], torch.ones(N))
            dist.reduce_scatter_tensor(b[:1], torch.ones(N))
        assert (a[0].item(), b[0].item()) == (3.0, 3.0)
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(a, 0, async_op=True)
            dist.broadcast(b, 0, async_op=True)
        manager.wait()


def functional_collectives(rank: Rank) -> None:
    with rank.joined():
        world = dist.group.WORLD
        assert world is not None
        x = torch.full((2,), float(rank.number))
        assert functional.all_reduce(x, "sum", world).tolist() == [3.0, 3.0]
        assert functional.all_reduce(x, "avg", world).tolist() == [1.0, 1.0]
        gathered = functional.all_gather_tensor(x, 0, world)
        assert gathered.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
        scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, world)
        assert scattered.tolist() == [3.0 * rank.number] * 2
        assert functional.broadcast(x, 2, world).tolist() == [2.0, 2.0]
        turned = functional.all_to_all_single(torch.arange(3.0), None, None, world)
        assert turned.tolist() == [float(rank.number)] * 3
        both = functional.all_reduce_coalesced([x, x + 1], "max", world)
        assert [y.tolist() for y in both] == [[2.0, 2.0], [3.0, 3.0]]
        many = functional.all_gather_into_tensor_coalesced([x, x], world)
        assert many[1].tolist() == gathered.tolist()
        fewer = functional.reduce_scatter_tensor_coalesced([gathered], "sum", [0], world)
        assert fewer[0].tolist() == scattered.tolist()
        flying = functional.all_reduce(x, "sum", world)  # waited for, and written to
        dist.broadcast(flying, 0)
        dist.all_reduce(flying)
        assert (flying + 0).tolist() == [9.0, 9.0]
        dist.all_gather(parts := [torch.empty(2) for _ in range(N)], flying)
        assert parts[2].tolist() == [9.0, 9.0]
        moved = functional.permute_tensor(x, [1, 2, 0], world)
        assert moved.tolist() == [float((rank.number - 1) % N)] * 2


def compiled(rank: Rank) -> None:
    with rank.joined():
        world = dist.group.WORLD
        assert world is not None

        def step(x: torch.Tensor) -> torch.Tensor:
            y = functional.all_reduce(x * 2, "sum", world)
            return functional.all_gather_tensor(y + 1, 0, world)

        x = torch.ones(2)
        expected = step(x)
        run = torch.compile(step, backend="aot_eager", fullgraph=True)
        assert run(x).tolist() == expected.tolist() == [7.0] * 2 * N

        def in_place(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x + 1

        assert torch.compile(in_place, backend="aot_eager")(x).tolist() == [4.0, 4.0]


def details(rank: Rank) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with rank.joined(timeout=timedelta(seconds=120)):
        group: Any = dist.group.WORLD
        dist.barrier()
        dist.barrier(device_ids=[0])
        dist.barrier(group=dist.new_group(timeout=timedelta(seconds=120)))
        before = group._get_sequence_number_for_group()
        dist.all_reduce(torch.ones(1))
        assert group._get_sequence_number_for_group() == before + 1
        group.monitored_barrier(timedelta(seconds=120))
        x = torch.ones(1)
        for peer in (-1, N):  # as in a ring of rank - 1 and rank + 1
            for call in (dist.broadcast, dist.isend, dist.irecv):
                with pytest.raises(ValueError, match=f"rank {peer} is not part of group"):
                    call(x, peer)
        group.allreduce(x, op=dist.ReduceOp.PRODUCT).wait()
        group.allreduce([x], op=dist.ReduceOp.SUM).wait()
        group.broadcast(x, root=1).wait()
        group.barrier(timeout=timedelta(seconds=120)).wait()
        assert x.item() == N
        group.set_timeout(timedelta(seconds=120))
        dist.all_reduce(torch.ones(1))
        backend = group._get_backend(torch.device("cpu"))
        assert backend.name() == "tilework"
        shared = backend.allocate_tensor(6, dtype=torch.int64, device=torch.device("cpu")).fill_(1)
        dist.all_reduce(shared)
        assert shared.tolist() == [N] * 6
        with pytest.raises(RuntimeError, match="moves cpu tensors, got one on cuda"):
            group._get_backend(torch.device("cuda"))
        with pytest.raises(RuntimeError, match="not safe to split"):  # as on Gloo
            dist.split_group(split_ranks=[[0, 1, 2]])
    dist.set_debug_level(dist.DebugLevel.OFF)


def beside_another(rank: Rank) -> None:
    with rank.joined("cpu:tilework,cuda:gloo"):
        group: Any = dist.group.WORLD
        assert set(group._device_types) == {torch.device("cpu"), torch.device("cuda")}
        engine = group._get_backend(torch.device("cuda"))
        assert isinstance(engine, dist.ProcessGroupGloo)
        x = torch.ones(1)
        dist.all_reduce(x)
        everyone = [None] * N
        dist.all_gather_object(everyone, rank.number)
        assert everyone == [0, 1, 2]


PROGRAMS = (
    reductions,
    means_of_integers,
    shapes_of_messages,
    writes_that_backward_sees,
    moves,
    messages,
    groups,
    asynchronous,
    coalesced,
    functional_collectives,
    compiled,
    details,
    beside_another,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_three_ranks(ranks: Launcher, program: Callable[[Rank], None]) -> None:
    ranks(N, program)


def a_device_of_tilework(rank: Rank) -> tuple[tuple[str, ...], str]:
    os.environ["TILEWORK_BACKEND"] = "cpu:shm,cuda:gloo"  # of this rank's process
    with rank.joined("cpu:tilework,cuda:tilework"):
        whole: Any = dist.group.WORLD
        ours = whole._get_backend(torch.device("cuda"))
        assert whole._get_backend(torch.device("cuda")) is ours
        dist.all_reduce(torch.ones(2))  # the CPU has a group of its own
        group = ours.tilework_record.group
        ours.barrier().wait()
        with pytest.raises(RuntimeError) as caught:
            group.start(Operation("barrier", root=rank.number))
        return group.devices, str(caught.value)


def test_calls_for_a_device_of_tilework_are_compared(ranks: Launcher) -> None:
    for devices, text in ranks(2, a_device_of_tilework):
        assert devices == ("cuda",)
        assert "they differ in root" in text
