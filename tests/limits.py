"""How long tests wait."""

from __future__ import annotations

#: In seconds: the bound for calls that end within a second on an idle machine. Timeouts of groups
#: and stores are longer, so the bound tells a call that ends at once from a call that times out.
PROMPTLY = 10.0
