"""DTensors in a line, drawn, and what explain() tells of what moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    show,
)
from tilework.testing import run_ranks


def there(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any, **options: Any) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None, **options)


def test_a_line_for_each_layout() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.zeros(10, 4)
        on = " on cpu mesh dp=2 tp=2"
        lines = {
            "f32[10@dp, 4@tp]": there(x, mesh, Shard(0), Shard(1)),
            "f32[10, 4]": there(x, mesh, Replicate(), Replicate()),
            "bf16[10@tp, 4] partial(sum)@dp": there(x.bfloat16(), mesh, Partial(), Shard(0)),
            "f64[10, 4] partial(max)@dp partial(max)@tp": there(
                x.double(), mesh, Partial("max"), Partial("max")
            ),
            "i64[10@dp@tp, 4]": there(x.long(), mesh, Shard(0), Shard(0)),
            "bool[10@tp@dp, 4]": there(x.bool(), mesh, Shard(0), Shard(0), order=(1, 0)),
            "c64[10@dp(7+3), 4]": there(
                x.to(torch.complex64), mesh, Shard(0, sizes=(7, 3)), Replicate()
            ),
            "u8[] = 1": there(torch.tensor(1, dtype=torch.uint8), mesh, Replicate(), Replicate()),
        }
        for text, tensor in lines.items():
            assert str(tensor) == repr(tensor) == f"DTensor {text}{on}"
        leaf = there(x, mesh, Shard(0), Shard(1)).requires_grad_()
        assert repr(leaf) == f"DTensor f32[10@dp, 4@tp]{on}, requires_grad"
        unnamed = there(x, init_device_mesh("cpu", (4,)), Shard(1))
        assert f"{unnamed}" == "DTensor f32[10, 4@0] on cpu mesh 0=4"
        meta = there(x.to("meta"), mesh, Shard(0), Shard(1))
        assert repr(meta) == "DTensor f32[10@dp, 4@tp] on meta mesh dp=2 tp=2"

    run_ranks(4, program)


def drawn(capsys: pytest.CaptureFixture[str], shape: tuple[int, ...], make: Any) -> str:
    """What one rank shows, alone."""

    def program(rank: int) -> None:
        tensor = make(init_device_mesh("cpu", shape))
        if rank == 0:
            show(tensor)

    run_ranks(torch.Size(shape).numel(), program)
    return capsys.readouterr().out


def test_a_copied_view_shows_no_number_that_is_old() -> None:
    def program(rank: int) -> tuple[str, str]:
        x = there(torch.arange(4.0), init_device_mesh("cpu", (2,)), Shard(0))
        view = x[3]
        before = repr(view)
        x.mul_(10)
        return before, repr(view)

    before, after = run_ranks(2, program)[0]
    assert "f32[] = 3 on" in before
    assert "f32[] on" in after


def test_pictures_say_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    text = drawn(capsys, (2,), lambda mesh: there(torch.zeros(5, 2), mesh, Shard(0)))
    assert text.splitlines()[0] == "DTensor f32[5@0, 2] on cpu mesh 0=2"
    assert "[0:3, 0:2]" in text
    assert "[3:5, 0:2]" in text
    assert "24 B" in text
    assert "┌" in text
    text = drawn(capsys, (2,), lambda mesh: there(torch.zeros(5, 2), mesh, Replicate()))
    assert "0, 1" in text
    text = drawn(capsys, (2,), lambda mesh: there(torch.zeros(5, 2), mesh, Partial()))
    assert "0+1" in text
    text = drawn(capsys, (2, 2), lambda mesh: there(torch.zeros(5), mesh, Partial(), Replicate()))
    assert "(0, 1)+(2, 3)" in text
    text = drawn(capsys, (2,), lambda mesh: there(torch.zeros(0, 2), mesh, Shard(0)))
    assert "0 B" in text
    with pytest.raises(TypeError, match="show\\(\\) takes a DTensor"):
        show(torch.ones(1))  # type: ignore[arg-type]


def test_a_result_of_run_ranks_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> DTensor:
        mesh = init_device_mesh("cpu", (2,))
        return distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])

    show(run_ranks(2, program)[1])
    assert "1 (this)" in capsys.readouterr().out


def test_a_notebook_shows_the_picture_and_asks_no_rank() -> None:
    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("<tp>",))
        x = there(torch.ones(8, 4), mesh, Shard(0))
        return x._repr_html_() if rank == 0 else ""

    html = run_ranks(2, program)[0]
    assert "<b>DTensor f32[8@&lt;tp&gt;, 4] on cpu mesh &lt;tp&gt;=2</b>" in html
    assert '<span style="color:#000;background:#8dd3c7">' in html
    assert "<script" not in html
