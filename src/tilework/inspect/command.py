"""``tilework trace``: the summary of a trace, a file for Perfetto, a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tilework.inspect.events import trace_events
from tilework.inspect.format import TraceError
from tilework.inspect.judging import summarize
from tilework.inspect.page import html_page
from tilework.inspect.timeline import read_timeline


def show_trace(folder: Path, output: Path | None = None, as_json: bool = False) -> int:
    """Print the summary of the trace in ``folder``, perhaps as JSON, and write it for a viewer.

    ``output`` is a ``.json`` for Perfetto, with an HTML page of the same name beside it, or the
    page alone (``.html``). Returns 0; 2 if there is no trace, or the file cannot be written.
    """
    try:
        if output is not None and output.suffix not in (".json", ".html"):
            raise TraceError(
                f"the name of the file must end in .json (for Perfetto, with a page beside it) or "
                f".html (a page), got {str(output)!r}"
            )
        timeline = read_timeline(folder)
        summary = summarize(timeline)
        if output is not None:
            if output.suffix == ".json":
                document = json.dumps(trace_events(timeline), separators=(",", ":"))
                output.write_text(document, encoding="utf-8")
            page = output.with_suffix(".html")
            page.write_text(html_page(timeline, summary), encoding="utf-8")
    except TraceError as error:
        print(f"tilework trace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"tilework trace: cannot write {str(output)!r}: {error.strerror}: name a file in a "
            f"folder that exists",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(summary.json(), indent=2) if as_json else summary)
    if output is not None and not as_json:
        if output.suffix == ".json":
            print(f"{output}: open it at https://ui.perfetto.dev")
        print(f"{output.with_suffix('.html')}: open it in a browser")
    return 0
