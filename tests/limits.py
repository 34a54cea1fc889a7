"""How long tests wait."""

from __future__ import annotations

#: In seconds. What is to end within it takes less than one on an idle machine; groups and stores
#: wait for longer, so a call that ends by its timeout is told from a call that ends at once.
PROMPTLY = 10.0
