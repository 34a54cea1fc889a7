"""The examples, as modules and as programs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.warm_python import run_warm

FOLDER = Path(__file__).parents[2] / "examples"


def load(script: Path) -> ModuleType:
    """The script as a module, which finds the modules beside it as Python's command line does."""
    if str(script.parent) not in sys.path:
        sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[script.stem] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def options_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function of flags that gives the script's checked options, as without a launcher."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def parse(*flags: str) -> Any:
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags])
        return module.parse_options(module.make_parser())

    return parse


def check_refused(
    options: Callable[..., Any], capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    """Fail unless these flags end the script with this message, said once."""
    with pytest.raises(SystemExit) as stopped:
        options(*flags.split())
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count(message) == 1


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``command`` as at a shell, without a launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return run_warm(*command, env=kept | {"COLUMNS": "80"})
