"""The examples, as modules and as programs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with ``command`` as at a shell, without a launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return run_warm(*command, env=kept | {"COLUMNS": "80"})
