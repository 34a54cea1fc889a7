"""Ranks from a notebook's cells, in a real kernel."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from typing import Any

import pytest

CELLS = [
    """
import torch, tilework.distributed as dist
from tilework.launch import spawn
offset = 10
""",
    """
def add(rank):
    dist.init_process_group()
    tensor = torch.tensor([rank + offset])
    dist.all_reduce(tensor)
    print("rank", rank, "has", tensor.item())
spawn(add, nprocs=2)
""",
    """
def fail(rank):
    if rank == 1:
        raise ValueError("bad rows")
    dist.init_process_group()
spawn(fail, nprocs=2)
""",
    "spawn(lambda rank: print('again', end=''), nprocs=1)",
    """
from tilework.launch import ranks
pool = ranks(2)
def build(rank):
    global model
    model = torch.full((1,), rank + offset)
pool.run(build)
""",
    """
def use(rank, factor):
    print("rank", rank, "uses", model.item())
    return model * factor
print([int(result) for result in pool.run(use, 3)])
""",
    "pool.run(fail)",
    """
pool.close()
pool.run(use, 1)
""",
]


# Runs in a separate process: nbclient installs handlers of signals, which would serve other tests.
EXECUTE = """
import json, sys, nbclient, nbformat.v4 as v4
notebook = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in json.load(sys.stdin)])
nbclient.NotebookClient(notebook, timeout=120, allow_errors=True).execute()
json.dump([cell.outputs for cell in notebook.cells], sys.stdout)
"""


@pytest.fixture(scope="module")
def cells() -> list[list[dict[str, Any]]]:
    """The outputs of each cell."""
    if importlib.util.find_spec("nbclient") is None:
        pytest.skip("nbclient is not installed")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    outputs: list[list[dict[str, Any]]] = json.loads(done.stdout)
    return outputs


def text_of(outputs: list[dict[str, Any]]) -> str:
    return "".join(output.get("text", "") for output in outputs)


def test_a_cells_function_runs_on_ranks(cells: list[list[dict[str, Any]]]) -> None:
    lines = text_of(cells[1]).splitlines()
    assert sorted(lines) == ["[0] rank 0 has 21", "[1] rank 1 has 21"]
    assert {output["output_type"] for output in cells[1]} == {"stream", "execute_result"}


def test_an_error_is_shown_once(cells: list[list[dict[str, Any]]]) -> None:
    (error,) = (output for output in cells[2] if output["output_type"] == "error")
    assert error["ename"] == "RankFailedError"
    assert error["evalue"].startswith("rank 1 failed at ")
    assert "ValueError: bad rows" in error["evalue"]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    assert shown.count("Traceback (most recent call last)") == 2  # the cell's, and the rank's
    assert "supervise" not in shown


def test_a_last_line_without_end_is_shown(cells: list[list[dict[str, Any]]]) -> None:
    assert text_of(cells[3]) == "[0] again\n"


def test_what_a_call_made_lives_in_later_cells(cells: list[list[dict[str, Any]]]) -> None:
    lines = sorted(text_of(cells[5]).splitlines())
    assert lines == ["[0] rank 0 uses 10", "[1] rank 1 uses 11", "[30, 33]"]


@pytest.mark.parametrize("cell", [2, 6])
def test_a_traceback_shows_the_cells_source(cells: list[list[dict[str, Any]]], cell: int) -> None:
    (error,) = (output for output in cells[cell] if output["output_type"] == "error")
    assert 'raise ValueError("bad rows")' in error["evalue"]


def test_a_closed_pool_refuses_calls(cells: list[list[dict[str, Any]]]) -> None:
    (error,) = cells[7]
    assert (error["ename"], "closed" in error["evalue"]) == ("ValueError", True)


def test_functions_typed_at_a_prompt_run_on_ranks() -> None:
    program = """
import sys
from tilework.launch import spawn
word = "typed"
def say(rank):
    sys.stdout.write(f"{word} {rank}\\n")  # in one piece: the ranks share the output
spawn(say, nprocs=2)
"""
    done = subprocess.run(
        [sys.executable], input=program, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["typed 0", "typed 1"]
