"""Views of bytes as another dtype, where local tensors lie otherwise than the full one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dtensor.views.test_moved_views import Make, check
from tests.tables import each
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


@each("shape", [(2, 4), (3, 4), (2, 2), (4, 6)])
@each("dtype", [torch.int16, torch.float64, torch.complex64])
def test_contiguous_copies_of_what_is_transposed(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Torch leaves strides of dims with one element, or none, as they were."""
    whole = torch.arange(24.0)[: shape[0] * shape[1]].view(shape)

    def program(make: Make) -> list[Any]:
        x = make(whole).t().contiguous()
        try:
            view = torch.view_as_complex(x) if dtype.is_complex else x.view(dtype)
        except RuntimeError:
            return [x]
        view[0] = 3
        return [x, view, view.stride()]

    check(program)


def test_a_rank_whose_part_lies_at_another_place_has_a_copy() -> None:
    def program(rank: int) -> None:
        for sizes in ((3, 5), (5, 3), (8, 0)):
            mesh = init_device_mesh("cpu", (2,))
            x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0, sizes=sizes)])
            pairs = torch.view_as_complex(x[4:].view(2, 2))
            pairs.mul_(2)
            assert x.full_tensor().tolist() == [0, 1, 2, 3, 8, 10, 12, 14]
            assert torch.view_as_real(pairs).flatten().tolist() == [8, 10, 12, 14]

    run_ranks(2, program)


def test_what_begins_within_an_element_is_refused_on_all_ranks() -> None:
    def program(make: Make) -> list[Any]:
        x = make(torch.arange(16.0))
        with pytest.raises(RuntimeError, match=r"storage_offset\(\) must be divisible by 2"):
            x[1:9].view(torch.float64)
        with pytest.raises(RuntimeError, match="storage_offset divisible by 2"):
            torch.view_as_complex(x[1:5].view(2, 2))
        return [x[2:].view(torch.float64)]

    check(program, 1)
