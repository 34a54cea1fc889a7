"""Pipelines beside one process: losses, gradients, arguments, bad input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.pipelines.models import (
    Listed,
    Net,
    alone,
    assert_equal,
    batch,
    piped,
    seeded,
    stages_of,
    together,
)
from tilework.checkpoint import load, save
from tilework.parallel import Schedule
from tilework.parallel.clip_grad import clip_grad_norm_
from tilework.testing import run_ranks

one_f_one_b = Schedule.one_forward_one_backward


@pytest.mark.parametrize("make", [Schedule.gpipe, one_f_one_b, Schedule.interleaved])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 9), (3, 2), (4, 4)])
def test_a_step_has_the_bits_of_one_process(make: Any, ranks: int, microbatches: int) -> None:
    losses, grads = piped(make(ranks, microbatches))
    loss, expected = alone(microbatches)
    assert losses == {loss}
    assert_equal(grads, expected)


def test_the_last_microbatch_may_be_shorter() -> None:
    losses, grads = piped(one_f_one_b(2, 4), rows=11)
    loss, expected = alone(4, rows=11)
    assert losses == {loss}
    assert_equal(grads, expected)


def test_modules_may_be_listed_in_another_order_than_they_run_in() -> None:
    plan = one_f_one_b(2, 2)
    _, grads = piped(plan, Net, ["layers.5"], example=(batch(2)[0],))
    assert_equal(grads, alone(2, Net)[1])
    with pytest.raises(RuntimeError, match="last is in stage 0, and the model calls it in stage 1"):
        piped(plan, Net, ["layers.5"])


class Repeating(Listed):
    """A parameter is used after a module that runs twice."""

    def __init__(self) -> None:
        super().__init__(2)
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.layers[0](self.layers[0](self.first(x))) + self.shift
        result: Tensor = self.last(self.layers[1](x))
        return result


def test_a_parameter_of_the_model_is_in_the_stage_that_uses_it_first() -> None:
    _, grads = piped(one_f_one_b(2, 2), Repeating, ["layers.1"], example=(batch(2)[0],))
    assert_equal(grads, alone(2, Repeating)[1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x + self.shift)))))


class TiedBackwards(Tied):
    """The modules are listed in another order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        a, b = self.a, self.b
        del self.a, self.b
        self.b, self.a = b, a


def trained(kind: Any, plan: Schedule | None, split: Any = "even", clip: float = 0) -> list[Any]:
    """Losses, norms and parameters after three steps, piped or (without a plan) in one process."""

    def program(rank: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
        model = seeded(kind)
        stages: Any = model if plan is None else stages_of(model, plan, split)
        optimizer = torch.optim.SGD([{"params": stages.parameters()}], lr=0.1, momentum=0.9)
        (x, target), losses, norms = batch(), [], []
        for number in range(3):
            if number != 1:  # gradients of two steps add up
                optimizer.zero_grad()
            if plan is None:
                loss = F.mse_loss(model(x), target)
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                loss = stages.step(x, target=target, loss=F.mse_loss)
            norms += [clip_grad_norm_(stages.parameters(), clip).item()] if clip else []
            losses.append(loss.item())
            optimizer.step()
        named = stages.named_parameters(remove_duplicate=False)
        return losses, norms, {name: p.detach() for name, p in named}

    outcomes = run_ranks(plan.ranks if plan else 1, program)
    return [outcomes[-1][0], outcomes[0][1], together(each for *_, each in outcomes)]


@pytest.mark.parametrize("split", [["b"], ["b", "c"]])
def test_tied_parameters_get_the_gradients_of_all_their_stages(split: list[str]) -> None:
    got = trained(Tied, one_f_one_b(len(split) + 1, 3), split, clip=0.1)
    torch.testing.assert_close(got, trained(Tied, None, clip=0.1))


def test_a_step_that_raises_keeps_the_gradients_of_tied_parameters() -> None:
    def program(rank: int) -> bool:
        stages = stages_of(seeded(Tied), one_f_one_b(2, 2), ["b"])
        x, target = batch(4)
        stages.step(x, target=target, loss=F.mse_loss)
        shared = next(p for n, p in stages.named_parameters() if n in ("a.weight", "b.weight"))
        before = shared.grad
        with pytest.raises(ValueError, match="rows"):
            stages.step(x, target=target[:3], loss=F.mse_loss)
        return before is not None and shared.grad is before

    assert run_ranks(2, program) == [True, True]


def _through_checkpoint(kind: Any, ranks: int, does: Callable[..., Any], path: Path) -> set[float]:
    """Save or load momenta of twos; the momenta of all ranks."""

    def program(rank: int) -> set[float]:
        part: Any = seeded(kind)
        if ranks:
            plan, cuts = one_f_one_b(ranks, 2), ["b", "c"][: ranks - 1]
            part = stages_of(part, plan, cuts, example=batch(2)[:1])
        optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
        for p in part.parameters():
            optimizer.state[p]["momentum_buffer"] = torch.full_like(p, 2 if does is save else 0)
        does({"model": part, "optimizer": optimizer}, path)
        return {
            x
            for each in optimizer.state.values()
            for x in each["momentum_buffer"].unique().tolist()
        }

    return set().union(*run_ranks(max(ranks, 1), program))


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"),
    [(Tied, 0, 2), (Tied, 1, 3), (Tied, 3, 2), (TiedBackwards, 0, 2), (TiedBackwards, 2, 0)],
)
def test_optimizers_of_tied_parameters_load_with_other_stages(
    kind: Any, saved: int, loaded: int, tmp_path: Path
) -> None:
    _through_checkpoint(kind, saved, save, tmp_path)
    assert _through_checkpoint(kind, loaded, load, tmp_path) == {2}


def test_clipping_takes_the_norm_over_all_stages() -> None:
    got = trained(Listed, one_f_one_b(3, 2), clip=0.5)
    torch.testing.assert_close(got, trained(Listed, None, clip=0.5))


def _frozen() -> nn.Module:
    model = Listed()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("first", "layers.0.", "layers.1.")))
    return model


def test_frozen_stages_get_no_gradients() -> None:
    _, grads = piped(one_f_one_b(4, 3), _frozen)
    assert_equal(grads, alone(3, _frozen)[1])


def test_ranks_evaluate_what_one_process_does() -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        stages = stages_of(seeded(), Schedule.interleaved(2, 2)).eval()
        x, target = batch()
        return stages.evaluate(x), stages.evaluate(x, target=target, loss=F.mse_loss)

    x, target = batch()
    expected = seeded()(x)
    for result, loss in run_ranks(2, program):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(loss, F.mse_loss(expected, target))


LABELS = torch.tensor([0, 1, -100, 1, 1, 0, -100, 1, 1, 1, 0, 1])


def _with_labels(weight: Any) -> list[float]:
    def program(rank: int) -> float:
        options: Any = {"loss": F.cross_entropy, "weight": weight}
        stages = stages_of(seeded(), one_f_one_b(2, 3))
        return stages.step(batch()[0], target=LABELS, **options).item()

    return run_ranks(2, program)


def test_a_function_counts_the_elements_of_a_mean() -> None:
    expected = F.cross_entropy(seeded()(batch()[0]), LABELS).item()
    got = _with_labels(lambda target: (target != -100).sum())
    assert got == pytest.approx([expected] * 2)


@pytest.mark.parametrize(("weight", "text"), [(None, "no mean over rows"), ("mean", "got 'mean'")])
def test_a_loss_that_is_no_mean_over_rows_needs_a_weight(weight: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _with_labels(weight)


def test_a_microbatch_may_have_no_element_of_the_mean() -> None:
    x, target = batch(4)[0], torch.tensor([-100, -100, 1, 0])

    def program(rank: int) -> tuple[float, dict[str, Tensor | None]]:
        stages = stages_of(seeded(), one_f_one_b(2, 2))
        loss = stages.step(x, target=target, loss=_mean_of_known, weight=_known)
        return loss.item(), {name: p.grad for name, p in stages.named_parameters()}

    model = seeded()
    expected = _mean_of_known(model(x), target)
    expected.backward()  # type: ignore[no-untyped-call]
    outcomes = run_ranks(2, program)
    assert [loss for loss, _ in outcomes] == pytest.approx([expected.item()] * 2)
    grads = {name: p.grad for name, p in model.named_parameters()}
    torch.testing.assert_close(together(each for _, each in outcomes), grads)


def _known(target: Tensor) -> Tensor:
    return (target != -100).sum()


def _mean_of_known(result: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(result, target, reduction="sum") / _known(target)


def test_an_evaluated_loss_that_is_no_mean_over_rows_needs_a_weight() -> None:
    def program(rank: int) -> None:
        stages = stages_of(seeded(), one_f_one_b(2, 3))
        stages.evaluate(batch()[0], target=LABELS, loss=F.cross_entropy)

    with pytest.raises(ValueError, match="no mean over rows"):
        run_ranks(2, program)


@dataclass
class Output:
    result: Tensor


class Returning(Listed):
    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.returns(super().forward(x))


def _evaluated(returns: Callable[[Tensor], Any], rows: int = 6, **options: Any) -> list[Any]:
    def program(rank: int) -> Any:
        stages = stages_of(seeded(lambda: Returning(returns)), one_f_one_b(2, 3))
        return stages.evaluate(batch(rows)[0], **options)

    return run_ranks(2, program)


@pytest.mark.parametrize("rows", [1, 7])
def test_results_of_rows_are_joined_and_numbers_weighted(rows: int) -> None:
    def returns(x: Tensor) -> Any:
        return {"rows": x, "none": None, "more": [(x * 2).sum(1), x.mean()]}

    expected = returns(seeded()(batch(rows)[0]))
    torch.testing.assert_close(_evaluated(returns, rows, weight="rows"), [expected] * 2)


@pytest.mark.parametrize(
    ("returns", "text"),
    [
        (Output, "result is Output for 2 rows"),
        (lambda x: (x, x.shape[0]), r"result\[1\] is int for 2 rows"),
        (lambda x: (x, x.t() @ x), r"result\[1\] is \[2, 2\] .* 2 rows, \[2, 2\] .* all 6"),
        (lambda x: {"loss": x.mean()}, r"result\['loss'\] is \[\] .*pass weight="),
        (lambda x: [x, ()], r"result\[1\] is an empty tuple"),
    ],
)
def test_other_results_are_refused_on_all_ranks(returns: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _evaluated(returns)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x": torch.ones(2, 3)}, "2 rows, and the schedule 3 microbatches"),
        ({"x": torch.ones(6, 3), "target": torch.ones(5, 2)}, "equally many rows"),
        ({"x": torch.ones(6, 3), "loss": None}, "the weight must be said"),
        ({"x": torch.ones(6, 3), "loss": None, "weight": "rows"}, "without a scalar loss"),
        ({"x": torch.ones(6, 3), "weight": lambda target: 0}, "counts no element"),
        ({"x": torch.ones(6, 3, requires_grad=True)}, r"inputs require gradients, .* detach\(\)"),
    ],
)
def test_bad_arguments_are_refused_on_all_ranks(arguments: Any, text: str) -> None:
    def program(rank: int) -> None:
        stages = stages_of(seeded(), one_f_one_b(2, 3))
        given = {"target": torch.ones(len(arguments["x"]), 2), "loss": F.mse_loss, **arguments}
        stages.step(given.pop("x"), **given)

    with pytest.raises(ValueError, match=text):
        run_ranks(2, program)


def test_a_loss_that_reads_parameters_of_other_stages_is_refused_on_all_ranks() -> None:
    def program(rank: int) -> None:
        stages = stages_of(seeded(), one_f_one_b(2, 3))
        (x, target), penalty = batch(), next(iter(stages.parameters()))

        def penalised(result: Tensor, target: Tensor) -> Tensor:
            loss: Tensor = F.mse_loss(result, target) + penalty.square().sum()
            return loss

        with pytest.raises(ValueError, match=r"the loss reads first\.weight of group rank 0"):
            stages.step(x, target=target, loss=penalised)

    run_ranks(2, program)


def test_a_step_without_gradients_is_refused() -> None:
    def program(rank: int) -> None:
        stages = stages_of(seeded(), one_f_one_b(2, 3))
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"or evaluate\(\)"):
            stages.step(batch()[0], loss=lambda result: result.mean())

    run_ranks(2, program)


@pytest.mark.parametrize("example", [[torch.ones(2, 3)], torch.ones(2, 3)])
def test_an_example_that_is_neither_tuple_nor_dict_is_refused(example: Any) -> None:
    with pytest.raises(TypeError, match=r"in a tuple or by name in a dict: got (list|Tensor)"):
        run_ranks(2, lambda _: stages_of(seeded(), one_f_one_b(2, 2), example=example))


def test_other_models_on_ranks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"pipeline\(\) needs the same parameters .* rank 1"):
        run_ranks(2, lambda rank: stages_of(Listed(4 + rank), one_f_one_b(2, 2)))
