"""Events of a job whose ranks come and go, in its store, for the launcher's report."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, Final

from tilework.comm.elastic.meeting_store import innermost
from tilework.comm.world import get_default_store
from tilework.errors import DistError
from tilework.store import PrefixStore, Store

_PREFIX: Final = "tilework/events"
_KEY: Final = "lines"


def note_event(kind: str, **facts: Any) -> None:
    """Tell the job's store that something has happened, if it is still there."""
    line = json.dumps({"time": time.time(), "kind": kind, **facts})
    with contextlib.suppress(DistError, ValueError):
        PrefixStore(_PREFIX, innermost(get_default_store())).append(_KEY, f"{line}\n")


def noted_events(store: Store) -> list[dict[str, Any]]:
    """The events that ranks have told, in the order in which they did."""
    desk = PrefixStore(_PREFIX, store)
    if not desk.check([_KEY]):
        return []
    return [json.loads(line) for line in desk.get(_KEY).decode().splitlines()]
