"""Any legal order runs, with the values of one process."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.pipelines.models import alone, piped
from tests.parallel.pipelines.orders import legal_rows
from tilework.parallel import Schedule


@pytest.mark.parametrize("seed", range(24))
def test_random_legal_orders_train_like_one_process(seed: int) -> None:
    plan = Schedule.of_actions(legal_rows(seed, split=False))
    losses, grads = piped(plan)
    loss, expected = alone(plan.microbatches)
    assert losses == {loss}
    torch.testing.assert_close(grads, expected)
