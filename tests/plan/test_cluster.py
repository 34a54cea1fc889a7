"""Descriptions of clusters, and times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.plan.programs import Block
from tilework.plan import Cluster, measured_here, memory_bytes, pretend
from tilework.plan.cluster import CountedOperator


def test_a_description_is_kept_in_a_file(tmp_path: Path) -> None:
    cluster = Cluster(memory=80 * 10**9, flops=1e14, error=0.1, measured=("operators",))
    cluster.write(tmp_path / "cluster.json")
    assert Cluster.read(tmp_path / "cluster.json") == cluster


def test_a_file_that_describes_nothing_raises(tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text('{"colour": "blue"}')
    with pytest.raises(ValueError, match=r"unknown: colour.*doctor --describe"):
        Cluster.read(tmp_path / "cluster.json")
    with pytest.raises(ValueError, match=r"No such file.*doctor --describe"):
        Cluster.read(tmp_path / "absent.json")


@pytest.mark.parametrize("text", ["", "GB", "-1 GB", "80 gigs"])
def test_unknown_memory_raises(text: str) -> None:
    with pytest.raises(ValueError, match="'80 GB' or '64 GiB'"):
        memory_bytes(text)


def test_measured_rates_have_an_error_and_messages_prices() -> None:
    messages = [("all_gather", 1 << 10, "a", 1e-5), ("all_gather", 1 << 22, "a", 4e-3)]
    cluster = measured_here(messages)
    assert cluster.error is not None
    assert cluster.latency == 1e-5
    assert "messages within the host" in cluster.measured


def test_longer_programs_take_longer_and_estimates_are_called_so() -> None:
    def program(layers: int) -> None:
        nn.Sequential(*(Block() for _ in range(layers)))(torch.randn(4, 10)).sum().backward()

    with pretend(ranks=2) as job:
        short, long = job.run(program, 2), job.run(program, 8)
    assert long.kinds[0].time.seconds > 2 * short.kinds[0].time.seconds
    assert "an estimate" in str(short)


def test_a_measured_operator_takes_the_measured_rate_and_others_the_roofline() -> None:
    cluster = Cluster(flops=1e9, bandwidth=1e9, call_seconds=0.0, operators={"aten::mm": 1e-6})
    known, other = CountedOperator("aten::mm", 1000, 10), CountedOperator("aten::bmm", 1000, 10)
    assert cluster.seconds_of([known]) == pytest.approx(1e-3)
    assert cluster.seconds_of([known, other]) == pytest.approx(1e-3 + 1e-6)


def test_a_cluster_with_measured_operators_is_read_as_written(tmp_path: Path) -> None:
    cluster = Cluster(operators={"aten::mm": 1e-11}, error=0.1)
    cluster.write(tmp_path / "here.json")
    assert Cluster.read(tmp_path / "here.json") == cluster
