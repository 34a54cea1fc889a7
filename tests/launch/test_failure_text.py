"""Tracebacks as the launcher prints them: the program's own frames, the others in a line."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch import nn

from tilework.launch.failure_report import describe
from tilework.launch.failure_text import folded


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def raised_in_a_layer() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        nn.Linear(2, 2)(torch.ones(3))
    return caught.value


def test_frames_of_torch_are_a_line() -> None:
    text = folded(text_of(raised_in_a_layer()), {})
    assert "in raised_in_a_layer" in text
    assert "frames of torch, to linear.py:" in text
    assert "torch/nn/modules" not in text
    assert text.splitlines()[-1].startswith("RuntimeError: ")


def test_all_frames_can_be_asked_for() -> None:
    text = text_of(raised_in_a_layer())
    assert folded(text, {"TILEWORK_TRACEBACK": "full"}) == text


def test_an_error_without_a_frame_of_the_program_stays_whole() -> None:
    lines = text_of(raised_in_a_layer()).split("\n")
    ours = [n for n, line in enumerate(lines) if "torch/nn" in line]
    text = "\n".join(lines[ours[0] :])
    assert folded(text, {}) == text


def test_the_hint_stands_once_in_a_chain_of_errors() -> None:
    try:
        try:
            raise raised_in_a_layer()
        except RuntimeError as cause:
            raise raised_in_a_layer() from cause
    except RuntimeError as error:
        text = folded(text_of(error), {})
    assert text.count("frames of torch") == 2
    assert text.count("TILEWORK_TRACEBACK") == 1


def test_the_site_is_the_programs_own() -> None:
    error = raised_in_a_layer()
    line = raised_in_a_layer.__code__.co_firstlineno + 2
    assert describe(error, 1).site == f"tests/launch/test_failure_text.py:{line}"
