"""Pages of the site that are not files in docs/: the API's, and those that lie beside docs/.

An API page names a public package; mkdocstrings fills it from its docstrings. Pages elsewhere in
the repository (examples, benchmarks, changelog) are taken in where they are, and links to them,
which leave docs/, are turned into links between the site's pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: The packages that users import from, with their titles.
PACKAGES = {
    "tilework.distributed": "Process groups and collectives",
    "tilework.distributed.functional": "Functional collectives",
    "tilework.mesh": "Meshes",
    "tilework.dtensor": "DTensor",
    "tilework.parallel": "Data and tensor parallelism",
    "tilework.parallel.comm_hooks": "Communication hooks",
    "tilework.data": "Loading data",
    "tilework.checkpoint": "Checkpoints",
    "tilework.sharded": "ShardedTensor",
    "tilework.layout": "Layouts and plans",
    "tilework.rpc": "RPC",
    "tilework.launch": "Starting ranks",
    "tilework.store": "Stores",
    "tilework.rendezvous": "Rendezvous",
    "tilework.testing": "Ranks as threads, for tests",
    "tilework.torch_backend": "A backend of torch.distributed",
    "tilework.errors": "Errors",
}
#: Pages beside docs/, and the site's paths for them.
BESIDE = {
    "examples/README.md": "beside/examples.md",
    "benchmarks/README.md": "beside/benchmarks.md",
    "CONTRIBUTING.md": "beside/contributing.md",
    "CHANGELOG.md": "beside/changelog.md",
}
#: Folders of pages that the navigation lists whole.
LISTED = {"Algorithms": "algorithms", "Decisions": "decisions"}
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s:]+)(#[^)\s]*)?\)")


def api_page(package: str) -> str:
    """The site's path for a package's API."""
    return f"api/{package.removeprefix('tilework.')}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's empty sections."""
    filled: dict[str, list[Any]] = {
        "API": [{title: api_page(package)} for package, title in PACKAGES.items()],
        "Programs": list(BESIDE.values()),
    }
    for title, folder in LISTED.items():
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        filled[title] = [f"{folder}/{page.name}" for page in pages]

    def fill(entries: list[Any]) -> None:
        for entry in entries:
            if isinstance(entry, dict):
                for title, inside in entry.items():
                    if inside == []:
                        entry[title] = filled[title]
                    elif isinstance(inside, list):
                        fill(inside)

    fill(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in docs/."""
    for package, title in PACKAGES.items():
        text = f"# {title}\n\n`import {package}`\n\n::: {package}\n"
        files.append(File.generated(config, api_page(package), content=text))
    for source, place in BESIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links through the repository into links within the site."""
    place = page.file.src_uri
    source = next((path for path, at in BESIDE.items() if at == place), f"docs/{place}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if target in BESIDE:
            inside = BESIDE[target]
        elif target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif target == "README.md":
            inside = "README.md"
        else:  # a source file: the site has no copy of it
            return f"{match[1][1:-1]} (`{target}`)"
        if (ROOT / "docs" / inside).is_dir():
            return match[1][1:-1]
        relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
        return f"{match[1]}({relative}{match[3] or ''})"

    return _LINK.sub(moved, markdown)
