"""The c10d document's PythonProcessGroupExtensionTest: backends written in Python by a user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Runner
from tests.comm.dummy_backend import DummyProcessGroup, create_dummy
from tests.comm.test_groups_timeouts import free_port

N = 4


@pytest.fixture
def dummy(processes: Runner) -> Runner:
    """Ranks with the dummy backend registered, told by the environment how to meet."""
    port = free_port()

    def run(n: int, fn: object) -> list[object]:
        def body(rank: int) -> object:
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = str(port)
            dist.Backend.register_backend("dummy", create_dummy)
            assert callable(fn)
            return fn(rank)

        return processes(n, body)

    return run


def test_it_names_itself() -> None:
    assert DummyProcessGroup(0, 1).name() == "Dummy"


def test_registering_makes_an_attribute(dummy: Runner) -> None:
    def body(rank: int) -> None:
        assert dist.Backend.DUMMY == "dummy"  # type: ignore[attr-defined]
        assert dist.Backend.plugins["DUMMY"].creator_fn is create_dummy

    dummy(1, body)


def test_registered_backends_are_available(processes: Runner) -> None:
    def body(rank: int) -> None:
        assert dist.is_ucc_available() == dist.is_backend_available("ucc")
        assert not dist.is_backend_available("dummy")
        dist.Backend.register_backend("dummy", create_dummy)
        assert dist.is_backend_available("dummy")

    processes(1, body)


def test_backend_config(dummy: Runner) -> None:
    meanings = {
        dist.Backend.GLOO: "cpu:gloo,cuda:gloo",
        dist.Backend.NCCL: "cuda:nccl",
        dist.Backend.MPI: "cpu:mpi,cuda:mpi",
        dist.Backend.UCC: "cpu:ucc,cuda:ucc",
        dist.Backend.SHM: "cpu:shm",
        "DUMMY": "cpu:dummy,cuda:dummy",
        "dummy": "cpu:dummy,cuda:dummy",
        "cpu:dummy,cuda:dummy": "cpu:dummy,cuda:dummy",
        "cpu:dummy,cuda:nccl": "cpu:dummy,cuda:nccl",
        "cpu:gloo,cuda:dummy": "cpu:gloo,cuda:dummy",
        "cpu:gloo,cuda:nccl": "cpu:gloo,cuda:nccl",
        "cpu:shm,cuda:nccl": "cpu:shm,cuda:nccl",
    }

    def body(rank: int) -> None:
        for text, meaning in meanings.items():
            assert str(dist.BackendConfig(text)) == meaning
        for wrong in (
            "cpu:gloo,cuda:nccl,",  # a comma too many
            "cpu:gloo,cuda:nccl,cpu:dummy",  # a device twice
        ):
            with pytest.raises(ValueError, match="cpu:"):
                dist.BackendConfig(wrong)

    dummy(1, body)


def test_a_backend_for_each_device(dummy: Runner) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("cpu:dummy,cuda:dummy", rank=rank, world_size=N)
        outputs = [torch.zeros(2, 2) for _ in range(N)]
        dist.all_gather(outputs, torch.ones(2, 2) * 7)
        dist.barrier()
        dist.destroy_process_group()

    dummy(N, body)


def test_collectives(dummy: Runner) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("dummy", rank=rank, world_size=N)
        sevens = torch.ones(2, 2) * 7
        outputs = [torch.zeros(2, 2) for _ in range(N)]
        dist.all_gather(outputs, sevens)
        assert all(output.equal(sevens) for output in outputs)
        dist.all_reduce(sevens)
        assert sevens.equal(torch.ones(2, 2) * 9)
        zeros = torch.zeros(2, 2)
        work = dist.broadcast(zeros, 0, async_op=True)
        assert work is not None
        work.wait()
        assert zeros.equal(torch.ones(2, 2))
        output = torch.zeros(2, 2)
        dist.reduce_scatter(output, [torch.ones(2, 2) for _ in range(N)])
        assert output.equal(torch.ones(2, 2))
        dist.barrier()
        dist.destroy_process_group()

    dummy(N, body)


def test_send_and_recv(dummy: Runner) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("dummy", rank=rank, world_size=N)
        tensor = torch.zeros(2, 2)
        dist.send(tensor, (rank + 1) % N)
        assert tensor.equal(torch.ones(2, 2))
        with pytest.raises(ValueError, match=str(rank)):
            dist.send(tensor, dist.get_rank())
        tensor = torch.zeros(2, 2)
        dist.recv(tensor, (rank + 1) % N)
        assert tensor.equal(torch.ones(2, 2) * 2)
        dist.barrier()
        # Not destroyed, on purpose: not every program does it.

    dummy(N, body)


def test_what_it_lacks_is_said(dummy: Runner, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("dummy", rank=rank, world_size=1)
        with pytest.raises(NotImplementedError, match=r"Dummy.*scatter"):
            dist.scatter(torch.ones(1), [torch.ones(1)])

    dummy(1, body)


def test_the_extended_interface_is_told_everything(processes: Runner) -> None:
    told = []

    def create(options: dist.DistributedBackendOptions, pg_options: object) -> dist.ProcessGroup:
        told.append((options.group_rank, options.group_size, pg_options))
        return DummyProcessGroup(options.group_rank, options.group_size)

    def body(rank: int) -> None:
        dist.Backend.register_backend("told", create, extended_api=True, devices="cpu")
        dist.init_process_group(
            "told", rank=rank, world_size=1, store=dist.HashStore(), pg_options="mine"
        )
        assert told == [(0, 1, "mine")]

    processes(1, body)
