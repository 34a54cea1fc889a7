import sys

import pytest

# The suite's asserts then show their values; too late once something has imported it.
if "tilework.testing.groups" not in sys.modules:
    pytest.register_assert_rewrite("tilework.testing.groups")
