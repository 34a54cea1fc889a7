"""The program of docs/how-to/gpus.md, started as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.world import WORLD_SECONDS, device_type, require_device

require_device()
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_runs(ranks: int, tmp_path: Path) -> None:
    """With two ranks on the CPU, as with one GPU the second rank has none."""
    page = (ROOT / "docs" / "how-to" / "gpus.md").read_text()
    found = re.search(r"```python ranks=2\n(.*?)```", page, re.S)
    assert found is not None
    script = tmp_path / "train.py"
    script.write_text(found[1] + "print(next(model.parameters()).device, loss.item() > 0)\n")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if ranks == 2 or device_type() == "cpu" else {}
    done = subprocess.run(
        [sys.executable, "-m", "tilework.cli", "run", "-n", str(ranks), str(script)],
        env=os.environ | hidden,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WORLD_SECONDS,
    )
    print(done.stdout[-500:], done.stderr[-1500:])
    assert done.returncode == 0
    assert ("cpu True" if hidden else "cuda:0 True") in done.stdout
