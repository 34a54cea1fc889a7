"""The report of a step, as numbers, as a table and as a picture."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.parallel.data_parallel.models import batch, mlp
from tilework.parallel import DistributedDataParallel
from tilework.parallel.data_parallel.report import BucketReport, StepReport
from tilework.testing import run_ranks


def one_step(rank: int) -> StepReport:
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
    with pytest.raises(RuntimeError, match="none has run"):
        ddp.report()
    for step in range(2):
        torch.autograd.backward(ddp(batch(1, step)[0]).sum())
    return ddp.report()


def test_every_parameter_is_in_a_bucket() -> None:
    report = run_ranks(2, one_step)[0]
    names = [name for bucket in report.buckets for name in bucket.parameters]
    assert sorted(names) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert report.rebuilt
    for bucket in report.buckets:
        assert 0 <= bucket.ready_ms <= bucket.started_ms <= bucket.reduced_ms
        assert bucket.reduced_ms <= report.backward_ms + report.waited_ms


def test_a_forward_pass_leaves_the_report_as_it_is() -> None:
    """Even one that assigns buckets again, or follows a change of the parameters."""

    def program(rank: int) -> None:
        ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
        for _ in range(2):
            torch.autograd.backward(ddp(batch(1)[0]).sum())
            report = ddp.report()
            ddp(batch(1)[0])
            assert ddp.report() == report
            next(ddp.parameters()).requires_grad_(False)

    run_ranks(1, program)


def fixed(waited: float) -> StepReport:
    buckets = (BucketReport(0, ("w", "b"), 2048, "float32", 2.0, 2.0, 8.0 + waited),)
    return StepReport(buckets, 8.0, waited, True)


def test_the_share_of_communication_that_is_hidden() -> None:
    assert fixed(0.0).hidden == 1.0
    assert fixed(6.0).hidden == 0.5
    assert StepReport((), 1.0, 0.0, False).hidden == 1.0


def test_the_table() -> None:
    text = str(fixed(6.0))
    assert "backward 8.0 ms and 6.0 ms of waiting: 50% of communication hidden" in text
    assert "2,048" in text
    assert "w, b" in text


def test_the_picture(tmp_path: Path) -> None:
    fixed(6.0).timeline(tmp_path / "step.svg")
    root = ElementTree.parse(tmp_path / "step.svg").getroot()
    assert root.tag.endswith("svg")
    assert "bucket 0, 2 KiB" in (tmp_path / "step.svg").read_text()


def test_the_picture_has_an_axis_and_backward_reaches_the_last_gradient() -> None:
    buckets = (BucketReport(0, ("w",), 2048, "float32", 25.0, 25.0, 30.0),)
    report = StepReport(buckets, 3.0, 27.0, True, blocked_ms=22.0)
    assert "(22.0 ms between gradients)" in str(report)
    text = report._repr_svg_()
    backward = re.search(r'class="backward" x="([\d.]+)" y="64" .*width="([\d.]+)"', text)
    ready = re.search(r'class="ready" x="([\d.]+)" y="86"', text)
    assert backward
    assert ready
    assert float(backward[1]) + float(backward[2]) == pytest.approx(float(ready[1]), abs=0.2)
    assert ">0 ms<" in text
    assert ">5<" in text
    assert "waits for reductions" in text
    assert 'style="color:inherit"' in report._repr_html_()  # the notebook's theme, not the system's
