"""The memory under tensors."""

from __future__ import annotations

import torch

from tilework.comm.backends.tensor_memory import as_bytes


def test_one_element_of_any_stride() -> None:
    element = torch.arange(6.0).view(1, 6).t()[2:3]
    assert element.is_contiguous()
    assert element.stride() == (1, 6)
    assert as_bytes(element).tolist() == as_bytes(torch.tensor([2.0])).tolist()


def test_memory_is_shared() -> None:
    tensor = torch.zeros(2, 3)
    as_bytes(tensor).fill_(255)
    assert tensor.isnan().all()
    assert as_bytes(torch.empty(0, 3)).shape == (0,)
