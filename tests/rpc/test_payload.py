"""Tensors, as arguments and results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.faults.forked_ranks import Holdings
from tests.rpc.joined_ranks import identity, only, together, until
from tests.tables import each
from tilework import rpc
from tilework.rpc.message import NO_FILE, MessageKind, decode, encode
from tilework.rpc.payload import dump, load
from tilework.rpc.shared_buffers import LEAST_BYTES
from tilework.rpc.transport import MAX_FRAME_BYTES
from tilework.testing.ranks import Kind as RankKind

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
)
LARGE = LEAST_BYTES


def there_and_back(obj: Any) -> Any:
    """What a message does to ``obj``, without a network."""
    frames = encode(MessageKind.CALL, 0, 1, (), dump(obj, _no_refs), NO_FILE)
    data, *buffers = decode([_Frame(frame) for frame in frames]).load(None)
    return load(data, buffers, ())


def _no_refs(ref: object) -> None:
    raise AssertionError("no references here")


class _Frame:
    """What ZeroMQ hands over, as far as it is used."""

    def __init__(self, data: bytes | memoryview) -> None:
        self.buffer = memoryview(bytearray(data))

    @property
    def bytes(self) -> bytes:
        return self.buffer.tobytes()


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def values(numel: int, dtype: torch.dtype) -> Tensor:
    size = numel * dtype.itemsize
    raw = torch.arange(size, dtype=torch.int64).remainder(2 if dtype is torch.bool else 120)
    return raw.to(torch.uint8).view(dtype) if size else torch.empty(0, dtype=dtype)


@each("numel", [1, 100, 40_000])
@each("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype, numel: int) -> None:
    sent = values(numel * 8, dtype).view(8, numel)
    got = together(2, only(0, lambda: rpc.rpc_sync("w1", identity, args=(sent,))))[0]
    assert got.dtype == dtype
    assert got.shape == sent.shape
    assert bits(got) == bits(sent)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Tensors of any strides: permuted, sliced, stepped, expanded."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    base = values(max(1, torch.Size(shape).numel()), torch.float32)[: torch.Size(shape).numel()]
    view = base.view(shape)
    if shape:
        view = view.permute(draw(st.permutations(range(len(shape)))))
        dim = draw(st.integers(0, len(shape) - 1))
        start, step = draw(st.integers(0, 2)), draw(st.integers(1, 3))
        view = view.narrow(dim, min(start, view.shape[dim]), max(0, view.shape[dim] - start))
        view = view[(slice(None),) * dim + (slice(None, None, step),)]
    return view.unsqueeze(0).expand(draw(st.integers(1, 3)), *view.shape)


@settings(deadline=None, max_examples=200)
@given(views(), st.booleans())
def test_any_view_arrives_as_it_is(view: Tensor, requires_grad: bool) -> None:
    sent = view.detach().requires_grad_(requires_grad)
    got = there_and_back({"a": [sent]})["a"][0]
    assert torch.equal(got, sent)
    assert got.requires_grad == requires_grad
    assert got.is_leaf
    assert got.untyped_storage().nbytes() == got.nbytes


def test_dense_tensors_keep_their_strides() -> None:
    sent = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    assert there_and_back(sent).stride() == sent.stride()
    images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert there_and_back(images).is_contiguous(memory_format=torch.channels_last)


def test_only_a_views_elements_travel() -> None:
    _, buffer = dump(torch.zeros(1000, 1000)[3:5], _no_refs)
    assert buffer.nbytes == 8000
    (small,) = dump(torch.zeros(1000, 1000)[3, :10], _no_refs)
    assert small.nbytes < 500


def test_no_history_travels() -> None:
    leaf = torch.ones(3, requires_grad=True)
    got = there_and_back(leaf * 2)
    assert got.is_leaf
    assert got.requires_grad
    assert got.grad_fn is None


def test_other_kinds_of_tensors() -> None:
    meta = there_and_back(torch.empty(3, 4, device="meta", dtype=torch.float16))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", (3, 4), torch.float16)
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(conjugate), conjugate)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(3))
    parameter = there_and_back(torch.nn.Parameter(torch.ones(2)))
    assert type(parameter) is torch.nn.Parameter
    assert there_and_back(torch.Size([1, 2])) == torch.Size([1, 2])


def test_modules_and_their_parameters() -> None:
    module = torch.nn.Linear(40, 50)
    x = torch.ones(3, 40)
    assert torch.equal(there_and_back(module)(x), module(x))


def test_one_tensor_twice_is_one_tensor() -> None:
    x = torch.ones(2)
    a, b = there_and_back((x, x))
    assert a is b


@pytest.mark.parametrize("numel", [3, 10_000], ids=["in the pickle", "apart"])
def test_received_tensors_may_be_written(numel: int) -> None:
    got = there_and_back(torch.zeros(numel))
    assert got.add_(1).sum() == numel


def test_parts_longer_than_a_frame_are_cut_and_joined() -> None:
    sent = torch.arange(MAX_FRAME_BYTES // 4 + 5, dtype=torch.int32)
    parts = dump((sent, b"x" * (MAX_FRAME_BYTES + 3)), _no_refs)
    frames = encode(MessageKind.CALL, 0, 1, (), parts)
    assert max(len(frame) for frame in frames) == MAX_FRAME_BYTES
    got, text = there_and_back((sent, b"x" * (MAX_FRAME_BYTES + 3)))
    assert torch.equal(got, sent)
    assert len(text) == MAX_FRAME_BYTES + 3


# -- shared memory --------------------------------------------------------------------------------


def _is_mapped(tensor: Tensor) -> bool:
    """Whether it lies in a memory file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5) if line.count(" ") > 5 else (line.split()[0], "")
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return "memfd:tilework-rpc" in name
    return False


def _check_mapped(tensor: Tensor) -> tuple[bool, float]:
    return _is_mapped(tensor), float(tensor.add_(1).sum())


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_large_tensors_come_in_shared_memory_and_leave_nothing(kind: RankKind) -> None:
    def act() -> Any:
        rpc.rpc_sync("w1", identity, args=(1,))  # now they know each other
        rpc.rpc_sync("w1", identity, args=(torch.ones(LARGE),))
        before = Holdings.now()
        x = torch.ones(LARGE)
        seen = rpc.rpc_sync("w1", _check_mapped, args=(x,))
        back = rpc.rpc_sync("w1", identity, args=(x,))
        kept = _is_mapped(back), float(back.add_(1).sum()), float(x.sum())
        del back
        until(lambda: Holdings.now().descriptors <= before.descriptors)
        until(lambda: Holdings.now().segments <= before.segments)
        return seen, kept

    seen, kept = together(2, only(0, act), kind)[0]
    assert seen == (True, 2.0 * LARGE)
    assert kept == (True, 2.0 * LARGE, 1.0 * LARGE)  # what is received is a copy


def test_arguments_are_as_they_are_at_the_call() -> None:
    def act() -> list[float]:
        x, sums = torch.zeros(LARGE), []
        for number in range(5):
            x.fill_(number)
            sums.append(rpc.rpc_async("w1", torch.sum, args=(x,)))
        x.fill_(99)
        return [float(future.wait()) / LARGE for future in sums]

    assert together(2, only(0, act))[0] == [0, 1, 2, 3, 4]


def test_without_shared_memory_large_tensors_come_in_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")

    def act() -> Any:
        return rpc.rpc_sync("w1", identity, args=(torch.arange(10 * LARGE),))

    assert torch.equal(together(2, only(0, act))[0], torch.arange(10 * LARGE))


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        st.none()
        | st.integers()
        | st.text()
        | st.binary(max_size=9000)
        | st.integers(0, 9000).map(lambda n: bytearray(n)),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )
)
def test_any_plain_data_arrives_as_it_is(data: Any) -> None:
    assert there_and_back(data) == data
