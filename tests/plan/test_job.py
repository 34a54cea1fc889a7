"""Pretended jobs do what real ones do."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tilework.distributed as dist
from tests.plan.programs import PROGRAMS, explained, steps
from tilework.capture import capture
from tilework.checkpoint import save
from tilework.comm.world import current_world
from tilework.data import DistributedSampler
from tilework.errors import PretendError
from tilework.inspect import MemoryByUse
from tilework.mesh import init_device_mesh
from tilework.parallel import DistributedDataParallel, clip_grad_norm_, fully_shard
from tilework.plan import pretend
from tilework.testing import run_ranks

Kinds = list[tuple[str, tuple[str, ...], int]]


def pretended(program: Callable[[], Any], ranks: int) -> dict[int, Any]:
    """The results of all ranks of a pretended job."""
    results: dict[int, Any] = {}

    def run() -> None:
        results[dist.get_rank()] = program()

    with pretend(ranks=ranks) as job:
        assert job.run(run, everyone=True).is_good
    return results


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_by_axis_are_those_of_explain(name: str, ranks: int) -> None:
    program = PROGRAMS[name]
    real = run_ranks(ranks, lambda rank: explained(program))
    assert list(pretended(lambda: explained(program), ranks).values()) == real


def calls_of_rank(program: Callable[[], None]) -> list[str]:
    """The names of what a rank calls, by group."""
    program()
    groups = sorted(current_world().records, key=lambda each: each.global_ranks)
    return [entry.what.split()[0] for group in groups for entry in group.flight_entries()]


@pytest.mark.parametrize(
    "name", ["ddp", "sharded", "tensor_parallel", "staged", "functional_calls"]
)
def test_ranks_call_what_real_ranks_call(name: str) -> None:
    program = PROGRAMS[name]
    real = run_ranks(2, lambda rank: calls_of_rank(program))
    assert list(pretended(lambda: calls_of_rank(program), 2).values()) == real


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_counted_peak_is_that_of_a_real_run(name: str) -> None:
    def peak() -> dict[Any, int]:
        with MemoryByUse() as memory:
            PROGRAMS[name]()
        return dict(memory.peak.by_use())

    assert list(pretended(peak, 2).values()) == run_ranks(2, lambda rank: peak())


def test_sums_count_all_ranks() -> None:
    def program() -> list[int]:
        x = torch.arange(3)
        dist.all_reduce(x)
        return x.tolist()

    assert pretended(program, 5)[4] == [0, 5, 10]


@pytest.mark.parametrize("op", ["SUM", "MIN", "MAX", "PRODUCT"])
def test_ranks_that_run_reduce_what_the_others_give(op: str) -> None:
    def reduced() -> list[list[float]]:
        dtypes = torch.int64, torch.float32, torch.bfloat16, torch.bool
        made = [torch.tensor([dist.get_rank() + 1, 2]).to(dtype) for dtype in dtypes]
        for tensor in made:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        return [tensor.tolist() for tensor in made]

    assert list(pretended(reduced, 3).values()) == run_ranks(3, lambda rank: reduced())


def test_ranks_gather_objects_of_other_sizes() -> None:
    def gathered() -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, "x" * dist.get_rank() * 20)
        rows = [torch.empty(len(each), dtype=torch.int64) for each in found]
        dist.all_gather(rows, torch.arange(len(found[dist.get_rank()])))
        return [*found, *(row.tolist() for row in rows)]

    assert list(pretended(gathered, 3).values()) == run_ranks(3, lambda rank: gathered())


def chained(calls: int) -> int:
    x = torch.tensor([dist.get_rank()])
    for _ in range(calls):
        x = x * dist.get_rank() % 97 + 1
        dist.all_reduce(x)
    return int(x)


def test_values_that_depend_on_values_are_those_of_real_ranks() -> None:
    real = run_ranks(3, lambda rank: chained(7))
    assert list(pretended(lambda: chained(7), 3).values()) == real
    with pretend(ranks=3) as job, pytest.raises(PretendError, match="plan fewer steps"):
        job.run(chained, 30)


def test_a_number_written_by_the_program_meets_tensors_without_values() -> None:
    def program() -> None:
        dist.all_gather([torch.empty(2) for _ in range(3)], torch.empty(2))
        dist.all_gather([torch.zeros(1) for _ in range(3)], torch.randn(1))
        dist.all_gather([torch.empty(1) for _ in range(3)], torch.ones(1))

    assert pretended(program, 3)


def test_numbers_without_values_compute_and_print() -> None:
    def program() -> str:
        loss = torch.randn(3).sum()
        return f"{round(2 * loss.item(), 3):.2f}"

    assert pretended(program, 1)[0] == "???"


def test_a_mesh_of_many_ranks_and_hosts_that_do_not_divide() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (16, 16, 16), mesh_dim_names=("pp", "dp", "tp"))
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp"))

    with pretend(ranks=4096, hosts=500) as job:
        report = job.run(program)
    assert report.is_good
    assert report.kinds[-1].rank == 4095
    assert report.kinds[-1].traffic["dp"].nbytes == 2 * 16 * 15 // 16


def test_a_mesh_with_fewer_ranks_than_it_needs_raises() -> None:
    with pretend(ranks=4) as job, pytest.raises(RuntimeError, match="needs 8 ranks"):
        job.run(lambda: init_device_mesh("cpu", (8,)))


def test_programs_may_make_the_default_group() -> None:
    def program() -> int:
        dist.init_process_group()
        return dist.get_world_size()

    assert pretended(program, 3)[2] == 3


@pytest.mark.parametrize("given", [{"memory": "80 potatoes"}, {"ranks": 0}, {"hosts": 9}])
def test_bad_sizes_raise(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"memory must|ranks must|hosts need"):
        pretend(**{"ranks": 2, **given}).__enter__()


def test_too_little_memory_is_reported_with_changes() -> None:
    def program() -> None:
        steps(DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(10, 10))))

    with pretend(ranks=8, memory="1 KB") as job:
        report = job.run(program)
    assert not report.is_good
    assert "fully_shard" in str(report)


def saving() -> None:
    folder = tempfile.mkdtemp()
    save({"model": fully_shard(torch.nn.Linear(8, 8)).state_dict()}, folder)


def captured() -> None:
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    step = capture(lambda x: model(x).sum().backward())
    for _ in range(3):
        step(torch.randn(2, 8))


def data() -> None:
    rows = TensorDataset(torch.randn(20, 8), torch.randint(0, 4, (20,)))
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    for x, y in DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows)):
        F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]


def clipped() -> None:
    model = fully_shard(torch.nn.Linear(8, 8))
    model(torch.randn(2, 8)).sum().backward()
    print(f"{clip_grad_norm_(model.parameters(), 1.0).item():.2f}")


def objects() -> None:
    given = [{"a": 1} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(given, 0)
    assert given == [{"a": 1}]


@pytest.mark.parametrize("program", [saving, captured, data, clipped, objects])
def test_whatever_programs_do(program: Callable[[], None]) -> None:
    pretended(program, 3)


def test_attention_with_dropout_counts_as_on_real_ranks() -> None:
    def program() -> None:
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=0.5).sum().backward()  # type: ignore[no-untyped-call]
        assert q.grad is not None
        dist.all_reduce(q.grad)

    with pretend(ranks=2) as job:
        assert job.run(program).worst.peak.bytes > 8 * 8 * 2 * 4  # the scores
