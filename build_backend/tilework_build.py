"""scikit-build-core, with one decision added: whether an editable install rebuilds the core.

scikit-build-core's rebuild runs the ``cmake`` that is on PATH when the core is imported. The CMake
that an isolated build brings along is gone by then, and a virtual environment's is only there
while it is activated; either would make the import fail. So the core is rebuilt on import where
there is a CMake outside of these, and elsewhere ``pip install -e .`` rebuilds it.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import scikit_build_core
from scikit_build_core import build as _backend
from scikit_build_core.build import *  # noqa: F403  (the hooks that need no change)


def _has_lasting_cmake() -> bool:
    """Whether PATH holds a CMake outside of the environments of pip and of this build."""
    own = Path(scikit_build_core.__file__).parents[4]
    # pip's isolated builds have two environments side by side, "overlay" and "normal".
    passing = [Path(sys.prefix), own.parent if own.name == "overlay" else own]
    entries = os.environ.get("PATH", "").split(os.pathsep)
    lasting = [e for e in entries if not any(Path(e).is_relative_to(p) for p in passing)]
    return shutil.which("cmake", path=os.pathsep.join(lasting)) is not None


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, list[str] | str] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660's hook."""
    settings = dict(config_settings or {})
    without_core = (
        os.environ.get("TILEWORK_NO_CORE", "") not in ("", "0") or sys.platform != "linux"
    )
    rebuild = _has_lasting_cmake() and not without_core
    settings.setdefault("editable.rebuild", "true" if rebuild else "false")
    return _backend.build_editable(wheel_directory, settings, metadata_directory)
