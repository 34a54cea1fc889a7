"""Forward-mode differentiation on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad
from torch.func import hessian, jvp

import tilework.distributed as dist
from tilework.testing import run_ranks

forward_ad: Any = torch.autograd.forward_ad  # without types


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # which torch imports for forward mode
def test_ranks_are_in_forward_mode_by_turns() -> None:
    def program(rank: int) -> None:
        x, one = torch.tensor(rank + 1.0), torch.tensor(1.0)
        for _ in range(20):
            assert jvp(torch.sin, (x,), (one,))[1] == x.cos()
            assert hessian(lambda x: x**3)(x) == 6 * x
            with forward_ad.dual_level():
                sine = forward_ad.make_dual(x, one).sin()
                assert forward_ad.unpack_dual(sine).tangent == x.cos()

    run_ranks(3, program)


def test_a_rank_that_communicates_in_forward_mode_is_named() -> None:
    def program(rank: int) -> None:
        with forward_ad.dual_level():
            dist.barrier()

    with pytest.raises(RuntimeError, match=r"communicates \(barrier .* kind='processes'"):
        run_ranks(2, program)
    run_ranks(2, program, kind="processes")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_rank_that_communicates_in_jvp_is_named() -> None:
    def program(rank: int) -> None:
        one = torch.tensor(1.0)
        jvp(lambda x: x * dist.barrier(), (one,), (one,))

    with pytest.raises(RuntimeError, match=r"communicates \(barrier .* kind='processes'"):
        run_ranks(2, program)
