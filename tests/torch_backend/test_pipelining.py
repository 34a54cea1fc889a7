"""torch's own pipelines, FSDP1 and state dicts on tilework's groups: one process's values."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as state_dicts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from tests.jobs import Launcher, Rank

WIDTH, ROWS, MICROBATCHES = 4, 8, 4
#: Each schedule with the number of stages of a rank, and whether they lie as a V.
SCHEDULES = (
    ("ScheduleGPipe", 1, False),
    ("Schedule1F1B", 1, False),
    ("ScheduleInterleaved1F1B", 2, False),
    ("ScheduleLoopedBFS", 2, False),
    ("ScheduleInterleavedZeroBubble", 2, False),
    ("ScheduleZBVZeroBubble", 2, True),
    ("ScheduleDualPipeV", 2, True),
)


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = ROWS, WIDTH
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def expected(count: int) -> dict[str, Tensor]:
    """The gradients that one process has, by layer and name."""
    model = layers(count)
    x, target = data()
    for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        backward(mean_of_squares(nn.Sequential(*model)(part), goal) / MICROBATCHES)
    return gradients(dict(enumerate(model)))


def gradients(parts: dict[int, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{number}.{name}": parameter.grad
        for number, part in parts.items()
        for name, parameter in part.named_parameters()
        if parameter.grad is not None
    }


def pipeline(rank: Rank) -> list[str]:
    """The schedules of torch's that ran, each with the gradients of one process."""
    from torch.distributed import pipelining

    passed = []
    with rank.joined():
        group = dist.group.WORLD
        for name, per_rank, as_v in SCHEDULES:
            kind: Any = getattr(pipelining.schedules, name, None)
            if kind is None:  # an older torch
                continue
            count = per_rank * rank.size
            numbers = [rank.number + rank.size * i for i in range(per_rank)]
            if as_v:
                numbers = [rank.number, count - 1 - rank.number]
            model = layers(count)
            parts = {number: model[number] for number in numbers}
            cpu = torch.device("cpu")
            stages: Any = [
                pipelining.PipelineStage(part, number, count, cpu, group=group)
                for number, part in parts.items()
            ]
            schedule = kind(
                stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=mean_of_squares
            )
            x, target = data()
            schedule.step(
                *([x] if 0 in parts else []), **({"target": target} if count - 1 in parts else {})
            )
            wanted = expected(count)
            for key, grad in gradients(parts).items():
                torch.testing.assert_close(grad, wanted[key])
            passed.append(name)
    return passed


def test_pipelines_of_torchs_have_the_gradients_of_one_process(ranks: Launcher) -> None:
    first, second = ranks(2, pipeline)
    assert first == second
    assert {"ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"} <= set(first)


def fsdp_of_torchs(rank: Rank) -> list[float]:
    with rank.joined(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it is about to drop
        model = FullyShardedDataParallel(
            nn.Sequential(*layers(2)), device_id=torch.device("cpu"), use_orig_params=True
        )
        x, target = data()
        backward(mean_of_squares(model(x), target))
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            found = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    return found


def test_fsdp1_of_torchs_has_the_gradients_of_one_process(ranks: Launcher) -> None:
    model = nn.Sequential(*layers(2))
    x, target = data()
    backward(mean_of_squares(model(x), target))
    wanted = [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]
    for found in ranks(2, fsdp_of_torchs):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted))


def whole_state(rank: Rank) -> tuple[list[str], float]:
    with rank.joined():
        mesh = init_device_mesh("cpu", (rank.size,))
        model = nn.Sequential(*layers(2))
        fully_shard(model, mesh=mesh)
        options = state_dicts.StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = state_dicts.get_model_state_dict(model, options=options)
        again = nn.Sequential(*layers(2))
        fully_shard(again, mesh=mesh)
        options = state_dicts.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        state_dicts.set_model_state_dict(again, state, options=options)
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        values = [value for value in state.values() if isinstance(value, Tensor)]
        return sorted(state), sum(float(value.sum()) for value in values)


def test_state_dicts_of_torchs_are_whole_on_the_first_rank(ranks: Launcher) -> None:
    (names, total), (others, _) = ranks(2, whole_state)
    assert names == sorted(nn.Sequential(*layers(2)).state_dict())
    assert others == []
    assert total != 0
