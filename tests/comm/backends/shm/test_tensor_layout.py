"""What the core reads in torch's tensors is what torch says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilework.comm.backends.shm import shm_group, tensor_layout

_core = pytest.importorskip("tilework._core")
needs_registration = pytest.mark.skipif(
    not shm_group._sees_tensors, reason="this torch has no table by which the core reads tensors"
)


@needs_registration
def test_it_is_found_in_this_torch() -> None:
    # Addresses have bits in common by chance, which must not be taken for the flag.
    found = {tensor_layout.find_tensor_layout() for _ in range(20)}
    assert None not in found
    assert len(found) == 1
    assert tensor_layout.tell_core()


DTYPES = [torch.float32, torch.float64, torch.int8, torch.bfloat16, torch.complex64]


@needs_registration
@given(
    dtype=st.sampled_from(DTYPES),
    steps=st.lists(st.sampled_from(["negate", "conj", "view", "slice", "grad", "clone"])),
)
def test_negative_views_are_seen(dtype: torch.dtype, steps: list[str]) -> None:
    tensor = torch.ones(4, dtype=dtype)
    for step in steps:
        tensor = taken(step, tensor)
        assert _core.is_negative(tensor) == tensor.is_neg()


def taken(step: str, tensor: Tensor) -> Tensor:
    if step == "negate":
        return torch._neg_view(tensor)
    if step == "conj":
        return tensor.conj().imag if tensor.is_complex() else tensor
    if step == "grad":
        floating = tensor.is_floating_point() or tensor.is_complex()
        return tensor.detach().requires_grad_(floating)
    return {"view": tensor.view(-1), "slice": tensor[:3], "clone": tensor.clone()}[step]


@needs_registration
@given(bumps=st.integers(0, 5), writes=st.integers(0, 5))
def test_versions_count_as_torchs(bumps: int, writes: int) -> None:
    whole = torch.zeros(4)
    part, parameter = whole[1:], torch.nn.Parameter(torch.zeros(2))
    for _ in range(bumps):
        _core.bump_version(part)
        _core.bump_version(parameter)
    for _ in range(writes):
        whole.add_(1)
    assert whole._version == part._version == bumps + writes
    assert (parameter._version, parameter.detach()._version) == (bumps, bumps)


@needs_registration
def test_a_write_is_seen_by_autograd() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    z = y * y
    _core.bump_version(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()  # type: ignore[no-untyped-call]


@needs_registration
def test_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
        _core.bump_version(tensor)  # as torch does, nothing
        assert tensor.tolist() == [1, 1]
        assert not _core.is_negative(tensor)
