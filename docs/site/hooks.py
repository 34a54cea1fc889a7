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
#: The same by subject.
GROUPS = {
    "Groups": [
        "tilework.distributed",
        "tilework.distributed.functional",
        "tilework.mesh",
        "tilework.torch_backend",
        "tilework.rpc",
    ],
    "Models": [
        "tilework.parallel",
        "tilework.parallel.comm_hooks",
        "tilework.dtensor",
        "tilework.sharded",
        "tilework.layout",
    ],
    "Data and checkpoints": ["tilework.data", "tilework.checkpoint"],
    "Jobs and tests": [
        "tilework.launch",
        "tilework.testing",
        "tilework.errors",
        "tilework.store",
        "tilework.rendezvous",
    ],
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
#: The site's first page.
HOME_PLACE = "README.md"
#: How search ranks pages: what to do before what was decided.
BOOSTS = (
    ("how-to/first-steps.md", 8.0),
    ("how-to/launch.md", 6.0),
    ("how-to/notebooks.md", 6.0),
    ("how-to/checkpoints.md", 7.0),
    ("how-to/make-a-step-fast.md", 7.0),
    ("how-to/", 4.0),
    ("errors/README.md", 8.0),
    ("errors/", 3.0),
    ("environment.md", 8.0),
    ("api/", 2.0),
    ("decisions/", 0.2),
    ("coverage.md", 0.1),
    ("beside/changelog.md", 0.1),
    ("algorithms", 0.5),
)
#: Words that people look for and the pages do not have; search finds them with the page's title.
ALIASES = {
    "how-to/first-steps.md": "quickstart, quick start, getting started, install, tutorial",
    "how-to/debug-a-hang.md": "deadlock, stuck, job hangs, timeout",
    "how-to/make-a-step-fast.md": "torch.compile, Inductor, fullgraph, capture step, speed",
    "how-to/data-parallel.md": "DDP, FSDP, accumulation, gradient clipping, mixed precision",
    "how-to/launch.md": "torchrun, mpirun, srun, slurm",
    "how-to/notebooks.md": "notebook, Jupyter, IPython, Colab",
    "how-to/checkpoints.md": "save checkpoint, resume training, load, safetensors, DCP, torch.save",
    "errors/README.md": "CollectiveMismatchError, PeerLostError, CollectiveTimeoutError",
    "how-to/hugging-face.md": "transformers, huggingface, Llama, save_pretrained, export weights",
}
#: The tests' word for how many ranks run a block; Markdown's would take the fence for text.
_FENCE_OPTIONS = re.compile(r"(?m)^(```python) ranks=\d+$")
#: Fences with nothing but an empty line between them, each with a tab's name after the language.
_TAB = r"^```(\w+) tab=\"([^\"\n]+)\"\n((?:(?!```).*\n)*)```\n"
_TABS = re.compile(rf"(?m)(?:{_TAB}\n?)+")
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s:]+)(#[^)\s]*)?\)")


def api_page(package: str) -> str:
    """The site's path for a package's API."""
    return f"api/{package.removeprefix('tilework.')}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's empty sections."""
    filled: dict[str, list[Any]] = {
        "API": [
            {group: [{PACKAGES[package]: api_page(package)} for package in packages]}
            for group, packages in GROUPS.items()
        ],
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
    """Turn links through the repository into links within the site; say what search ranks."""
    place = page.file.src_uri
    markdown = _TABS.sub(_as_tabs, _FENCE_OPTIONS.sub(r"\1", markdown))
    boost = next((boost for begin, boost in BOOSTS if place.startswith(begin)), None)
    if boost is not None:
        page.meta.setdefault("search", {})["boost"] = boost
    if "description" not in page.meta:
        page.meta["description"] = _first_sentence(markdown)
    if place == HOME_PLACE:  # the repository's own page, and below it the list of all pages
        page.meta["hide"] = ["navigation"]
        readme = _FENCE_OPTIONS.sub(r"\1", (ROOT / "README.md").read_text())
        readme = _TABS.sub(_as_tabs, readme)
        home = _with_links(readme, "README.md", place)
        every_page = _with_links(markdown, "docs/README.md", place).replace("# ", "## ", 1)
        return f"{home}\n\n{every_page}"
    if place in ALIASES:
        page.meta["tags"] = ALIASES[place].split(", ")
    source = next((path for path, at in BESIDE.items() if at == place), f"docs/{place}")
    return _with_links(markdown, source, place)


def _first_sentence(markdown: str) -> str:
    """The first sentence of a page below its title, as plain text."""
    for paragraph in markdown.split("\n\n"):
        if not paragraph.lstrip().startswith(("#", "`", ">", "|", "-", "!", "<", ":::")):
            plain = re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return plain.partition(". ")[0][:200]
    return ""


def _as_tabs(match: re.Match[str]) -> str:
    """Neighbouring fences as tabs: elsewhere they are plain blocks, one below the other."""
    tabs = []
    for language, name, text in re.findall(f"(?m){_TAB}", match[0]):
        lines = [f"```{language}", *text.splitlines(), "```"]
        tabs.append(f'=== "{name}"\n\n' + "\n".join(f"    {line}".rstrip() for line in lines))
    return "\n\n".join(tabs) + "\n"


def _with_links(markdown: str, source: str, place: str) -> str:
    """The text of the repository's file ``source`` with links as they are at ``place``."""

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if target in BESIDE:
            inside = BESIDE[target]
        elif target.startswith("docs/"):
            inside = target.removeprefix("docs/")
        elif target in ("README.md", "docs"):
            inside = "README.md"
        else:  # a source file: the site has no copy of it
            return f"{match[1][1:-1]} (`{target}`)"
        if (ROOT / "docs" / inside).is_dir():
            return match[1][1:-1]
        relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
        return f"{match[1]}({relative}{match[3] or ''})"

    return _LINK.sub(moved, markdown)
