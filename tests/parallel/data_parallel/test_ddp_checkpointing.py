"""Replicas whose layers are recomputed in backward, once or more often, with shared weights."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.data_parallel.models import WIDTH, compare_training, seeded
from tilework.testing import run_ranks

VIEWS = pytest.mark.parametrize("view", [False, True], ids=["copied", "view"])
REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
TWICE = "Expected to mark a variable ready only once"


class Layers(nn.Module):
    """Runs two layers, some of them checkpointed.

    Args:
        steps: For each forward pass in turn, the numbers of the layers to run; a negative one is
            not checkpointed.
        shared: True: the layers have one weight.
        unused: True: there is a layer that never runs.
    """

    def __init__(
        self,
        *steps: tuple[int, ...],
        shared: bool = False,
        unused: bool = False,
        reentrant: bool = False,
    ) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if shared:
            self.l1.weight = self.l2.weight
        self.unused = nn.Linear(WIDTH, WIDTH) if unused else None
        self.steps, self.reentrant, self.count = steps, reentrant, 0

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.steps[self.count % len(self.steps)]
        self.count += 1
        for number in numbers:
            layer = self.l1 if abs(number) == 1 else self.l2
            x = layer(x) if number < 0 else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def train(model: nn.Module, **settings: Any) -> None:
    run_ranks(2, lambda rank: compare_training(rank, 2, model, **settings))


def layers(*steps: tuple[int, ...], **settings: Any) -> nn.Module:
    return seeded(lambda: Layers(*steps, **settings))


@VIEWS
@REENTRANT
@pytest.mark.parametrize("static", [False, True])
def test_one_layer_once(view: bool, reentrant: bool, static: bool) -> None:
    model = layers((-1, 2), reentrant=reentrant)
    train(model, gradient_as_bucket_view=view, static_graph=static)


@VIEWS
def test_static_graphs_need_no_search_for_unused_parameters(view: bool) -> None:
    model = layers((-1, 2), reentrant=True)
    train(model, gradient_as_bucket_view=view, static_graph=True, find_unused_parameters=True)


@VIEWS
def test_searching_for_unused_parameters_fails_with_reentrant_checkpoints(view: bool) -> None:
    model = layers((-1, 2), reentrant=True)
    with pytest.raises(RuntimeError, match=TWICE) as error:
        train(model, gradient_as_bucket_view=view, find_unused_parameters=True)
    assert "l2." in str(error.value)
    assert "Linear" in str(error.value)


@VIEWS
@REENTRANT
def test_unused_layers_beside_checkpoints(view: bool, reentrant: bool) -> None:
    model = layers((-1, 2), reentrant=reentrant, unused=True)
    train(
        model,
        gradient_as_bucket_view=view,
        find_unused_parameters=True,
        static_graph=reentrant,
    )


@VIEWS
def test_one_layer_twice(view: bool) -> None:
    train(layers((-1, 2, 2)), gradient_as_bucket_view=view)
    train(layers((-1, 2, 2)), gradient_as_bucket_view=view, find_unused_parameters=True)


@VIEWS
@pytest.mark.parametrize("find", [False, True])
def test_one_layer_twice_in_reentrant_checkpoints(view: bool, find: bool) -> None:
    model = layers((-1, 2, 2), reentrant=True)
    with pytest.raises(RuntimeError, match=TWICE):
        train(model, gradient_as_bucket_view=view, find_unused_parameters=find)
    train(model, gradient_as_bucket_view=view, static_graph=True)


@VIEWS
def test_nothing_but_a_layer_twice_in_reentrant_checkpoints(view: bool) -> None:
    """The first of the two makes all gradients ready, and the second must not be lost."""
    model = layers((2, 2, 1), reentrant=True)
    with pytest.raises(RuntimeError, match=TWICE):
        train(model, gradient_as_bucket_view=view)


@VIEWS
def test_layers_by_turns(view: bool) -> None:
    model = layers((1,), (2,))
    train(model, gradient_as_bucket_view=view, find_unused_parameters=True)
    model = layers((1,), (2,), shared=True)
    train(model, gradient_as_bucket_view=view, find_unused_parameters=True)


@VIEWS
def test_layers_by_turns_in_reentrant_checkpoints(view: bool) -> None:
    model = layers((1,), (2,), reentrant=True)
    with pytest.raises(RuntimeError, match=TWICE):
        train(model, gradient_as_bucket_view=view, find_unused_parameters=True)


@VIEWS
@REENTRANT
@pytest.mark.parametrize("static", [False, True])
def test_the_replica_itself_is_checkpointed(view: bool, reentrant: bool, static: bool) -> None:
    model = layers((-1, -2), shared=True)

    def run(each: nn.Module, x: Tensor) -> Tensor:
        result = checkpoint(each, x, use_reentrant=reentrant)
        assert isinstance(result, Tensor)
        return result

    def program(rank: int) -> None:
        compare_training(rank, 2, model, run=run, gradient_as_bucket_view=view, static_graph=static)

    run_ranks(2, program)


@VIEWS
def test_shared_weights_twice_in_reentrant_checkpoints(view: bool) -> None:
    model = layers((-1, 2, 2), shared=True, reentrant=True)
    train(model, gradient_as_bucket_view=view, static_graph=True)


def test_a_static_graph_that_changes() -> None:
    model = layers((-1, 2), (-1, 2, 2), reentrant=True)
    with pytest.raises(RuntimeError, match="more often than in the first backward pass"):
        train(model, static_graph=True)
