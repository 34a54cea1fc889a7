"""examples/demo.py: each of the four statements is made, and holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.scripts import FOLDER, load, options_of, run

SCRIPT = FOLDER / "demo.py"
SMALL = ["--steps", "4", "--batch", "7", "--context", "16", "--width", "64", "--layers", "1"]


def test_the_four_statements(tmp_path: Path) -> None:
    tmp_path.joinpath("text.txt").write_text("tiles are owned by ranks; " * 40)
    done = run(str(SCRIPT), "--ranks", "4", "--text", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stderr
    for statement in (
        "\n1. The loss of 4 ranks is the loss of one process, within ",
        "\n2. A captured step, run as one program: 4 losses, equal to the bit\n",
        "\n3. Which rank holds which part of a weight:\nDTensor f32[256@tp@dp, 64] on cpu mesh",
        " ms later all have raised:\nranks 0, 2 and 3 called all_reduce float32 [4] SUM, rank 1 ",
    ):
        assert statement in done.stdout


def test_a_statement_that_does_not_hold_ends_the_program() -> None:
    with pytest.raises(SystemExit, match="statement 2 does not hold"):
        load(SCRIPT).state(2, "Equal losses", holds=False)


@pytest.mark.parametrize("flags", ["--ranks 1", "--capture", "--hook bf16 --parallel ddp"])
def test_flags_that_leave_no_statement_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    demo = load(SCRIPT)
    options_of(demo, monkeypatch)  # as without a launcher
    monkeypatch.setattr("sys.argv", ["demo.py", *flags.split()])
    with pytest.raises(SystemExit):
        demo.read_options(demo.make_parser())
    assert "demo.py: error: --" in capsys.readouterr().err
