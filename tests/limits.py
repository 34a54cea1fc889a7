"""How long tests wait."""

from __future__ import annotations

#: In seconds: the bound for calls that end within a second on an idle machine, on one that others
#: keep busy. Timeouts of groups and stores are a minute or more, so the bound tells a call that
#: ends at once from a call that times out.
PROMPTLY = 40.0
