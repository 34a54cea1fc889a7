"""What crosses the cuts of a model, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.pipelines.models import alone, assert_equal, batch, piped, seeded, stages_of
from tilework.parallel import Schedule
from tilework.testing import run_ranks

plan = Schedule.one_forward_one_backward(2, 3)


class Chain(nn.Module):
    """Four layers, and a function that calls them."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), Last()
        self.register_buffer("count", torch.zeros(()))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.how(self, x)
        return result


class Last(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


def chain(how: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Chain(how)


def _skips(m: Any, x: Tensor) -> Any:
    a = m.a(x)
    b = m.b(a) * (x.sum(1, keepdim=True) > 0)
    return m.d(m.c(b) + a + x)


@pytest.mark.parametrize("split", [["b"], ["c"], ["d"]])
def test_values_that_skip_stages_go_along(split: list[str]) -> None:
    _, grads = piped(plan, chain(_skips), split)
    assert_equal(grads, alone(3, chain(_skips))[1])


def test_what_crosses_is_printed() -> None:
    def program(rank: int) -> str:
        example = (batch(2)[0],)
        return str(stages_of(seeded(chain(_skips)), plan, ["c"], example=example))

    assert run_ranks(2, program)[0] == (
        "stage 0: a, b\nstage 1: c, d\n"
        "stage 0 to 1: argument 0 of c (2x3 float32), a (2x3 float32): 48 B"
    )


def _twice(m: Any, x: Tensor) -> Any:
    return m.d(m.a(m.c(m.b(m.a(x)))))


def _weight(m: Any, x: Tensor) -> Any:
    return m.d(m.c(m.b(m.a(x))) @ m.a.weight)


def _made_between(m: Any, x: Tensor) -> Any:
    double = m.a(x) * 2
    return m.d(m.c(m.b(double)) + double)


def _branch(m: Any, x: Tensor) -> Any:
    a = m.b(m.a(x))
    return m.d(m.c(a if a.sum() > 0 else -a))


def _sizes(m: Any, x: Tensor) -> Any:
    a = m.b(m.a(x))
    return m.d(m.c(a[a[:, 0] > 0]))


def _draws(m: Any, x: Tensor) -> Any:
    keep = torch.rand(x.shape)
    return m.d(m.c(m.b(m.a(x * keep))) * keep)


def _writes(m: Any, x: Tensor) -> Any:
    a = m.b(m.a(x))
    c = m.c(a)
    a.mul_(2)
    return m.d(c + a)


def _writes_input(m: Any, x: Tensor) -> Any:
    return m.d(m.c(m.a(x.mul_(2))))


def _writes_buffer(m: Any, x: Tensor) -> Any:
    m.count.add_(1)
    return m.d(m.c(m.a(x)))


def _replaces_buffer(m: Any, x: Tensor) -> Any:
    x = m.d(m.c(m.a(x)))
    m.count = m.count + 1
    return x


def _checkpoints(m: Any, x: Tensor) -> Any:
    return m.d(checkpoint(m.c, m.a(x), use_reentrant=False))


def _writes_out(m: Any, x: Tensor) -> Any:
    a, double = m.a(x), torch.empty(x.shape)
    with torch.no_grad():
        torch.mul(a, 2, out=double)
    return m.d(m.c(m.b(a)) + double)


def _ends_later(m: Any, x: Tensor) -> Any:
    m.times = getattr(m, "times", 0) + 1
    return m.a(x) if m.times > 1 else m.d(m.c(m.a(x)))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (_checkpoints, r"call checkpoint\(\) in the modules"),
        (_ends_later, "the model ends in stage 0, and went on for inputs of the same shapes"),
        (_twice, "a is in stage 0, and the model calls it in stage 1"),
        (_weight, "a.weight is in stage 0, and stage 1 uses it, at .*test_stage.py"),
        (_made_between, "makes at .*test_stage.py.* is used in stage 1, and is neither"),
        (_branch, "needs the values of a tensor that stage 0 makes"),
        (_sizes, "needs the values of a tensor that stage 0 makes"),
        (_draws, "draws random numbers before stage 1"),
        (_writes, "writes in stage 1 to a tensor that stage 0 makes"),
        (_writes_out, "writes in stage 0 to a tensor that every stage makes"),
        (_writes_input, "writes to an input"),
        (_writes_buffer, "writes to the buffer count, which every stage has"),
        (_replaces_buffer, "writes to the buffer count, which every stage has"),
    ],
)
def test_what_a_stage_cannot_do_alone_is_refused_by_name(how: Any, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        piped(plan, chain(how), ["c"])


def _recomputes(m: Any, x: Tensor) -> Any:
    return m.d(m.c(checkpoint(m.b, m.a(x), use_reentrant=False)))


def _turns(m: Any, x: Tensor) -> Any:
    a = (m.a(x) * 1).t_()
    return m.d(m.c(a.t()) + torch.ones(a.shape[1], 1))


@pytest.mark.parametrize("how", [_recomputes, _turns])
def test_between_modules_of_a_stage_forward_is_free(how: Any) -> None:
    assert_equal(piped(plan, chain(how), ["c"])[1], alone(3, chain(how))[1])


def test_a_part_is_named_as_the_model_and_cannot_be_called_alone() -> None:
    def program(rank: int) -> None:
        (part,) = stages_of(seeded(chain(_skips)), plan, ["c"]).parts
        assert isinstance(part, Chain)
        assert [*part.state_dict()][:2] == ["count", ("a.weight", "c.weight")[rank]]
        other = part.c if rank == 0 else part.a
        with pytest.raises(RuntimeError, match="call the stages by"):
            other(torch.ones(1, 3))

    run_ranks(2, program)


class Writing(nn.Linear):
    """A layer that writes to its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class Skipped(nn.Module):
    """A value that stage 1 writes to, and stage 2 uses."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), Writing(3, 3), nn.Linear(3, 2)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        a = self.a(x)
        return self.c(self.b(a.view(self.shape) if self.shape else a) + a)


def test_a_stage_may_write_to_received_values() -> None:
    _, grads = piped(Schedule.one_forward_one_backward(3, 3), Skipped, ["b", "c"])
    assert_equal(grads, alone(3, Skipped)[1])


def test_writes_to_one_of_two_values_that_share_memory_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"share memory there, at .*test_stage\.py"):
        piped(plan, lambda: Skipped((-1, 3)), ["b"])


def test_modules_without_parameters_keep_their_modes() -> None:
    def program(rank: int) -> Tensor:
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(), nn.Linear(8, 2)).eval()
        expected = model(batch()[0])
        result: Tensor = stages_of(model, plan, ["2"]).evaluate(batch()[0]) - expected
        return result

    assert all(torch.allclose(x, torch.zeros(()), atol=1e-6) for x in run_ranks(2, program))
