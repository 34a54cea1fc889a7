"""Pages of the site that are not files in docs/: the API's, and those that lie beside docs/.

An API page (docs/site/api_pages.py) names a public package, or some names of one; mkdocstrings
fills it from docstrings. Pages elsewhere in the repository (examples, benchmarks, changelog) are
taken in where they are, and links to them, which leave docs/, are turned into links between the
site's pages. A program that a page names gets a page with its text.

Where the site has more than plain Markdown, pages are written so that they read well without the
site: tabs are fences one below the other, and admonitions are quotes that begin with ``[!NOTE]``.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from api_pages import API, PAGES, names_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: Packages whose classes show the methods of base classes.
INHERITING = {"tilework.mesh"}
#: Pages beside docs/, and the site's paths for them.
BESIDE = {
    "examples/README.md": "beside/examples.md",
    "benchmarks/README.md": "beside/benchmarks.md",
    "CONTRIBUTING.md": "beside/contributing.md",
    "CHANGELOG.md": "beside/changelog.md",
}
#: The page that lists the package's modules, with links to their text.
SOURCE_PLACE = "source.md"
#: Folders of pages that the navigation lists whole.
LISTED = {"Algorithms": "algorithms", "Decisions": "decisions", "Packages": "architecture"}
#: The site's first page.
HOME_PLACE = "README.md"
#: How search ranks pages: what to do before what was decided.
BOOSTS = (
    ("how-to/first-steps.md", 8.0),
    ("tutorial.md", 3.0),
    ("how-to/launch.md", 6.0),
    ("how-to/notebooks.md", 6.0),
    ("how-to/checkpoints.md", 9.0),
    ("how-to/make-a-step-fast.md", 7.0),
    ("how-to/data-parallel.md", 8.0),
    ("how-to/memory.md", 8.0),
    ("how-to/many-hosts.md", 6.0),
    ("how-to/clusters.md", 6.0),
    ("how-to/left-out.md", 1.0),
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
    "how-to/first-steps.md": "quickstart, quick start, getting started, install",
    "tutorial.md": "tutorial, end to end",
    "how-to/memory.md": "OOM, out of memory, SIGKILL, memory, activation checkpointing",
    "how-to/many-hosts.md": "multi node, cluster, several machines",
    "how-to/clusters.md": "sbatch, srun, kubeflow, PyTorchJob, k8s, mpiexec, scheduler",
    "how-to/gpus.md": "GPU, CUDA, NCCL, device",
    "how-to/debug-a-hang.md": "deadlock, stuck, job hangs, timeout",
    "how-to/make-a-step-fast.md": "torch.compile, Inductor, fullgraph, capture step, speed up",
    "how-to/data-parallel.md": "DDP, FSDP, accumulation, gradient clipping, mixed precision, "
    "freeze parameters, frozen layers",
    "how-to/load-data.md": "DataLoader, DistributedSampler",
    "how-to/lora.md": "LoRA, peft, DoRA, adapters, fine-tuning",
    "how-to/long-sequences.md": "context parallel, ring attention, Ulysses, long context, packing",
    "how-to/launch.md": "torchrun, mpirun, srun, slurm",
    "how-to/elastic.md": "straggler, slow rank, killed ranks, fault tolerance",
    "how-to/notebooks.md": "notebook, Jupyter, IPython, Colab",
    "how-to/checkpoints.md": "save checkpoint, resume training, load, safetensors, DCP, torch.save",
    "errors/README.md": "CollectiveMismatchError, PeerLostError, CollectiveTimeoutError",
    "how-to/hugging-face.md": "transformers, huggingface, Llama, save_pretrained, "
    "export weights, export to Hugging Face, from_pretrained, generate",
}
#: The tests' word for how many ranks run a block; Markdown's would take the fence for text.
_FENCE_OPTIONS = re.compile(r"(?m)^(```python) ranks=\d+$")
#: Fences with nothing but an empty line between them, each with a tab's name after the language.
_TAB = r"^```(\w+) tab=\"([^\"\n]+)\"\n((?:(?!```).*\n)*)```\n"
_TABS = re.compile(rf"(?m)(?:{_TAB}\n?)+")
#: A quote that begins with ``[!NOTE]`` or the like; its first words are in bold, the headline.
_ALERT = re.compile(r"(?m)^> \[!(NOTE|TIP|WARNING)\]\n((?:>.*\n?)+)")
#: A fence, which stays as it is, or a program of the repository by its path.
_FENCE_OR_SOURCE = re.compile(
    r"(?ms)^(?P<fence>```.*?^```$)|(?<![\[`])`(?P<path>(?:examples|benchmarks|tests|src)/[\w/]+\.py)`"
)
_LINK = re.compile(r"(\[[^\]]*\])\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation's empty sections."""
    filled: dict[str, list[Any]] = {
        "API": [
            {task: [{page.title: f"api/{page.place}.md"} for page in pages]}
            for task, pages in API.items()
        ],
        "Programs": list(BESIDE.values()),
    }
    for title, folder in LISTED.items():
        pages = sorted((ROOT / "docs" / folder).glob("*.md"))
        filled[title] = [f"{folder}/{page.name}" for page in pages if page.stem != "README"]

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
    for page in PAGES:
        options = {"inherited_members": True} if page.package in INHERITING else {}
        if page.modules:
            options["members"] = names_of(page)
        text = f"# {page.title}\n\n`import {page.package}`\n\n{page.intro}\n\n::: {page.package}\n"
        text += f"    options: {json.dumps(options)}\n"
        files.append(File.generated(config, f"api/{page.place}.md", content=text))
    for source, place in BESIDE.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    pages = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    pages |= {source: (ROOT / source).read_text() for source in ("README.md", *BESIDE)}
    for path in sorted({path for page, text in pages.items() for path in _sources_in(page, text)}):
        language = "python" if path.endswith(".py") else "text"
        text = f"---\nsearch: {{exclude: true}}\n---\n# {path}\n\n````{language}\n"
        text += (ROOT / path).read_text() + "````\n"
        level = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, f"sources/{path}.md", content=text, inclusion=level))
    files.append(File.generated(config, SOURCE_PLACE, content=_source_page()))
    for path in _modules():
        files.append(
            File.generated(config, f"sources/{path}.txt", content=(ROOT / path).read_text())
        )
    return files


def _modules() -> list[str]:
    """The paths of the package's modules, a package's own before those in it."""
    found = (path.relative_to(ROOT) for path in (ROOT / "src/tilework").rglob("*.py"))
    return [path.as_posix() for path in sorted(found, key=lambda path: (path.parent, path.name))]


def _source_page() -> str:
    """Each module with the first sentence of its docstring, below its package."""
    lines = ["---", "search: {exclude: true}", "---", "# Source", ""]
    for path in _modules():
        folder, name = path.removeprefix("src/").rsplit("/", 1)
        docstring = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
        sentence = " ".join(docstring.split("\n\n")[0].split())
        if name == "__init__.py":
            lines += ["", f"## {folder.replace('/', '.')}", ""]
        lines.append(f"- [`{name}`](sources/{path}.txt): {sentence}")
    return "\n".join(lines)


def _sources_in(page: str, markdown: str) -> set[str]:
    """The paths of the repository's files that a page names or links to and the site has not."""
    named = {match["path"] for match in _FENCE_OR_SOURCE.finditer(markdown) if match["path"]}
    folder = posixpath.dirname(page)
    linked = {
        posixpath.normpath(posixpath.join(folder, link[2])) for link in _LINK.finditer(markdown)
    }
    linked = {path for path in linked if not path.endswith((".md", ".svg"))}
    return {path for path in named | linked if (ROOT / path).is_file()}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links through the repository into links within the site; say what search ranks."""
    place = page.file.src_uri
    if place.startswith("sources/") or place == SOURCE_PLACE:
        return markdown
    markdown = _for_the_site(markdown)
    boost = next((boost for begin, boost in BOOSTS if place.startswith(begin)), None)
    if boost is not None:
        page.meta.setdefault("search", {})["boost"] = boost
    api = next((each for each in PAGES if f"api/{each.place}.md" == place), None)
    if api is not None:
        page.meta["description"] = f"{api.title}: names of {api.package}, each with its contract."
    elif place != HOME_PLACE:  # which has the site's
        page.meta["description"] = _listed(place) or _first_sentence(markdown)
    if place == HOME_PLACE:  # the repository's own page, and below it the list of all pages
        page.meta["hide"] = ["navigation"]
        readme = _for_the_site((ROOT / "README.md").read_text())
        home = _with_links(readme, "README.md", place)
        every_page = _with_links(markdown, "docs/README.md", place).replace("# ", "## ", 1)
        return f"{home}\n\n{every_page}"
    if place in ALIASES:
        page.meta["tags"] = ALIASES[place].split(", ")
    source = next((path for path, at in BESIDE.items() if at == place), f"docs/{place}")
    return _with_links(markdown, source, place)


def _for_the_site(markdown: str) -> str:
    """Tabs and admonitions in place of the fences and quotes that stand for them."""
    markdown = _TABS.sub(_as_tabs, _FENCE_OPTIONS.sub(r"\1", markdown))
    return _ALERT.sub(_as_admonition, markdown)


def _listed(place: str) -> str:
    """What the list of all pages says of a page, as plain text."""
    pages = " ".join((ROOT / "docs" / HOME_PLACE).read_text().split())
    found = re.search(rf"\[([^]]+)\]\({re.escape(place)}\)(?::|,) ((?:[^.;\[]|\.\w)+)", pages)
    return _plain(f"{found[1][0].upper()}{found[1][1:]}: {found[2]}.") if found else ""


def _first_sentence(markdown: str) -> str:
    """The first sentence of a page below its title, as plain text."""
    for paragraph in re.sub(r"(?ms)^( *)```.*?^\1```$", "", markdown).split("\n\n"):
        if paragraph.strip() and not paragraph.lstrip().startswith(("`import", *"#|-!<:=")):
            plain = re.sub(r"^\*\*[^*]+[.:]?\*\*[.:]? ", "", " ".join(paragraph.split()))
            return _plain(re.split(r"(?<=\.) |: \[", plain)[0])[:200]
    return ""


def _plain(markdown: str) -> str:
    return re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", markdown)


def _as_admonition(match: re.Match[str]) -> str:
    text = re.sub(r"(?m)^> ?", "", match[2])
    headline, text = re.fullmatch(r"(?s)\*\*(.+?)\.?\*\*\s+(.+)", text).groups()
    lines = [f"    {line}".rstrip() for line in text.splitlines()]
    return f'!!! {match[1].lower()} "{" ".join(headline.split())}"\n\n' + "\n".join(lines) + "\n"


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
        elif target == "src/tilework":
            inside = SOURCE_PLACE
        elif (ROOT / target).is_file():
            inside = f"sources/{target}.md"
        else:
            return match[1][1:-1]
        if (ROOT / "docs" / inside).is_dir():
            return match[1][1:-1]
        relative = posixpath.relpath(inside, posixpath.dirname(place) or ".")
        return f"{match[1]}({relative}{match[3] or ''})"

    def opened(match: re.Match[str]) -> str:
        path = match["path"]
        if not path or not (ROOT / path).is_file():
            return match[0]
        here = posixpath.dirname(place) or "."
        return f"[`{path}`]({posixpath.relpath(f'sources/{path}.md', here)})"

    return _FENCE_OR_SOURCE.sub(opened, _LINK.sub(moved, markdown))
