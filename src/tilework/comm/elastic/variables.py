"""Environment variables of a job whose ranks come and go."""

from __future__ import annotations

from typing import Final

#: Set for a process in the seat of a rank that died: it joins the existing group.
REJOIN_VARIABLE: Final = "TILEWORK_REJOIN"
#: The fewest ranks that the job may continue with.
MIN_RANKS_VARIABLE: Final = "TILEWORK_MIN_RANKS"
