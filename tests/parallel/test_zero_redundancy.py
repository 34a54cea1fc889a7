"""Optimizer states spread over ranks: the same steps as the plain optimizer's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.rounding import assert_close
from tilework.errors import CollectiveMismatchError
from tilework.parallel import DistributedDataParallel, Join, ZeroRedundancyOptimizer, comm_hooks
from tilework.testing import run_ranks


def model() -> Any:
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.uniform_(-1, 1, generator=generator)
    return made


def rows(step: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 6])
def test_steps_are_those_of_the_plain_optimizer(
    kind: Any, settings: dict[str, Any], ranks: int
) -> None:
    def program(rank: int) -> int:
        plain, ddp = model(), DistributedDataParallel(model())
        wanted = kind(plain.parameters(), **settings)
        own = ZeroRedundancyOptimizer(ddp.parameters(), kind, **settings)
        for step in range(4):
            for each, optimizer in ((plain, wanted), (ddp, own)):
                optimizer.zero_grad()
                torch.autograd.backward(each(rows(step)).square().mean())
                optimizer.step()
        for mine, other in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert_close(mine, other)
        return 0 if own.optim is None else len(own.optim.state)

    counts = run_ranks(ranks, program)
    assert sum(counts) == 4
    assert ranks == 1 or max(counts) < 4


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_of_matrices() -> None:
    def program(rank: int) -> None:
        results = []
        for spread in (False, True):
            layer = model()[0]
            kind: Any = torch.optim.Muon
            own: Any = (
                ZeroRedundancyOptimizer([layer.weight], kind, lr=0.1)
                if spread
                else kind([layer.weight], lr=0.1)
            )
            torch.autograd.backward(layer(rows(0)).square().mean())
            own.step()
            results.append(layer.weight.detach())
        assert_close(*results)

    run_ranks(2, program)


def test_shares_are_nearly_equal() -> None:
    def program(rank: int) -> list[int]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (9, 1, 5, 4, 1)]
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=1.0)
        return [optimizer.owner_of(parameter) for parameter in parameters]

    assert run_ranks(2, program)[0] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("ranks", [2, 5])
def test_states_are_those_of_the_plain_optimizer(ranks: int) -> None:
    def program(rank: int) -> dict[str, Any] | None:
        plain, other = model(), model()
        wanted = torch.optim.Adam(plain.parameters(), lr=0.01)
        own = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=0.01)
        with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
            own.state_dict()
        for step in range(2):
            for each, optimizer in ((plain, wanted), (other, own)):
                optimizer.zero_grad()
                torch.autograd.backward(each(rows(step)).square().mean())
                optimizer.step()
        own.consolidate_state_dict(to=1)
        if rank != 1:
            with pytest.raises(RuntimeError, match="call consolidate_state_dict"):
                own.state_dict()
            return None
        saved, expected = own.state_dict(), wanted.state_dict()
        assert saved["state"].keys() == expected["state"].keys()
        for at, state in expected["state"].items():
            assert_close(saved["state"][at], state)
        assert saved["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
        return saved

    def resume(rank: int) -> None:
        plain = torch.nn.Sequential(*model())
        wanted = torch.optim.Adam(plain.parameters(), lr=0.5)
        wanted.load_state_dict(copy.deepcopy(saved))
        other = model()
        own = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=0.5)
        own.load_state_dict(saved)
        for each, optimizer in ((plain, wanted), (other, own)):
            torch.autograd.backward(each(rows(9)).square().mean())
            optimizer.step()
        for mine, expected in zip(other.parameters(), plain.parameters(), strict=True):
            assert_close(mine, expected)

    saved: Any = run_ranks(ranks, program)[1]
    run_ranks(2, resume)


def test_a_loaded_state_dict_replaces_all_states_and_fits_the_parameters() -> None:
    def program(rank: int) -> None:
        first = model()
        settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
        new = torch.optim.SGD(first.parameters(), **settings).state_dict()
        own = ZeroRedundancyOptimizer(first.parameters(), torch.optim.SGD, **settings)
        first(rows(0)).sum().backward()
        own.step()
        assert own.optim is not None
        assert own.optim.state
        own.load_state_dict(new)
        assert not own.optim.state
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.5).state_dict()
        with pytest.raises(ValueError, match=r"groups of \[2\] parameters, and this optimizer"):
            own.load_state_dict(other)
        assert own.param_groups[0]["lr"] == 0.1

    run_ranks(2, program)


def test_groups_and_schedulers() -> None:
    def program(rank: int) -> None:
        plain, other = model(), model()
        results = []
        for each, kind in ((plain, torch.optim.SGD), (other, ZeroRedundancyOptimizer)):
            arguments: Any = {} if kind is torch.optim.SGD else {"optimizer_class": torch.optim.SGD}
            optimizer: Any = kind(
                [{"params": each[0].parameters(), "lr": 0.5}], lr=0.1, **arguments
            )
            optimizer.add_param_group({"params": list(each[2].parameters()), "lr": 0.2})
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
            for step in range(3):
                optimizer.zero_grad()
                torch.autograd.backward(each(rows(step)).square().mean())
                optimizer.step()
                schedule.step()
            results.append([p.detach() for p in each.parameters()])
        for mine, wanted in zip(*results, strict=True):
            assert_close(mine, wanted)

    run_ranks(3, program)


def test_misuse() -> None:
    def program(rank: int) -> None:
        with pytest.raises(TypeError, match="must be a subclass of Optimizer, got 5"):
            ZeroRedundancyOptimizer([nn.Parameter(torch.ones(1))], 5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="empty parameter list"):
            ZeroRedundancyOptimizer([], torch.optim.SGD, lr=0.1)

    run_ranks(1, program)


@pytest.mark.parametrize("counts", [(1, 3), (4, 2, 0), (3, 3)])
def test_uneven_inputs(counts: tuple[int, ...]) -> None:
    """Every rank steps on what it owns, with the gradients of those that still have inputs."""

    def program(rank: int) -> list[torch.Tensor]:
        results = []
        for spread in (False, True):
            ddp = DistributedDataParallel(model())
            settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
            own: Any = (
                ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, **settings)
                if spread
                else torch.optim.SGD(ddp.parameters(), **settings)
            )
            with Join([ddp, own] if spread else [ddp]):
                for step in range(counts[rank]):
                    for group in own.param_groups:
                        group["lr"] = 0.1 / (1 + step)
                    own.zero_grad()
                    torch.autograd.backward(ddp(rows(step + 7 * rank)).square().mean())
                    own.step()
            results.append([p.detach() for p in ddp.parameters()])
        for mine, wanted in zip(*results, strict=True):
            assert_close(mine, wanted)
        return results[1]

    first, *others = run_ranks(len(counts), program)
    for other in others:
        assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("megabytes", [0.00005, 25])
@pytest.mark.parametrize(
    "hook", [comm_hooks.allreduce_hook, comm_hooks.quantization_pertensor_hook]
)
@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_steps_within_backward(
    kind: Any, settings: dict[str, Any], hook: Any, megabytes: float
) -> None:
    def program(rank: int) -> None:
        results = []
        for overlap in (False, True):
            ddp = DistributedDataParallel(model(), bucket_cap_mb=megabytes)
            own: Any = ZeroRedundancyOptimizer(
                ddp.parameters(), kind, overlap_with_ddp=overlap, **settings
            )
            reduce = comm_hooks.hook_with_zero_step(hook, ddp, own) if overlap else hook
            ddp.register_comm_hook(None, reduce)
            for step in range(4):
                own.zero_grad()
                torch.autograd.backward(ddp(rows(step + 7 * rank)).square().mean())
                if not overlap:
                    own.step()
            own.consolidate_state_dict(to=0)
            results.append([p.detach() for p in ddp.parameters()])
            if rank == 0:
                assert len(own.state_dict()["state"]) == 4
        assert all(map(torch.equal, *results))

    run_ranks(2, program)


def test_steps_within_backward_replace_step() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(model())
        plain = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(ValueError, match="overlap_with_ddp=True"):
            comm_hooks.hook_with_zero_step(comm_hooks.allreduce_hook, ddp, plain)
        weights = [ddp.module[0].weight]
        own = ZeroRedundancyOptimizer(weights, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        with pytest.raises(RuntimeError, match="use overlap_with_ddp=False within Join"):
            Join([ddp, own]).__enter__()
        hook = comm_hooks.hook_with_zero_step(comm_hooks.allreduce_hook, ddp, own)
        ddp.register_comm_hook(None, hook)
        with pytest.raises(ValueError, match="are not the optimizer's: give it model"):
            torch.autograd.backward(ddp(rows(0)).sum())

    run_ranks(2, program)


class Counting(torch.optim.SGD):
    """Takes a keyword in a step, and counts steps in its groups."""

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for parameter in group["params"]:
                parameter.grad.mul_(scale)
        return super().step(closure)


def test_keywords_of_a_step_and_what_it_adds_to_groups_come_through() -> None:
    def program(rank: int) -> Any:
        plain, ddp = model(), DistributedDataParallel(model())
        wanted = Counting(plain.parameters(), lr=0.1)
        own = ZeroRedundancyOptimizer(ddp.parameters(), Counting, lr=0.1)
        for step in range(2):
            for each, optimizer in ((plain, wanted), (ddp, own)):
                optimizer.zero_grad()
                torch.autograd.backward(each(rows(step)).square().mean())
                optimizer.step(scale=0.5)
        for mine, other in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert_close(mine, other)
        own.consolidate_state_dict(0)
        if rank:
            return own.param_groups[0]["k"]
        own.load_state_dict(own.state_dict())
        own.optim.step()  # type: ignore[union-attr]
        return own.state_dict()["param_groups"][0]["k"], own.optim.param_groups[0]["k"]  # type: ignore[union-attr]

    assert run_ranks(2, program) == [(2, 3), 2]


def test_a_group_that_a_rank_owns_nothing_of_is_saved_as_its_owner_has_it() -> None:
    def program(rank: int) -> Any:
        first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))
        groups = [{"params": [first]}, {"params": [second]}]
        own = ZeroRedundancyOptimizer(groups, Counting, lr=0.1)
        first.grad, second.grad = torch.ones(4), torch.ones(2)
        own.step()
        own.consolidate_state_dict(0)
        return None if rank else [group.get("k") for group in own.state_dict()["param_groups"]]

    assert run_ranks(2, program)[0] == [1, 1]


def test_parameters_that_one_rank_has_written_raise() -> None:
    """Else each rank would send the others a part of its own model."""

    def program(rank: int) -> None:
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if rank == 1:
            model.weight.data.mul_(1.5)
        with pytest.raises(CollectiveMismatchError, match=r"'parameter 0'.* rank 0 and .* rank 1"):
            optimizer.step()

    run_ranks(2, program)
