"""A plugin, ``-p tests.sanitizers.core``: the core to test is the one at TILEWORK_TEST_CORE.

Loaded before anything imports tilework, so it stands in for the one that is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_spec = importlib.util.spec_from_file_location("tilework._core", os.environ["TILEWORK_TEST_CORE"])
assert _spec is not None
assert _spec.loader is not None
_core = importlib.util.module_from_spec(_spec)
sys.modules["tilework._core"] = _core
_spec.loader.exec_module(_core)
