"""The API's pages: a page for each task, with the public names that serve it.

A name stands on the page that names its module, or its package as a whole. What a package takes
from another public package stands on that one's page alone.
"""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).parents[2] / "src"
#: By package and name: the module and the name of what the package takes from above.
LATE_NAMES = runpy.run_path(str(SOURCES / "tilework/late_names.py"))["LATE_NAMES"]


class ApiPage(NamedTuple):
    """A page: ``package``, or of it the names that come from ``modules`` below tilework."""

    place: str
    title: str
    package: str
    modules: tuple[str, ...] = ()
    #: In place of the package's docstring, where the page has a part of it.
    intro: str = ""


#: By task, as the navigation has them.
API = {
    "Start ranks": [
        ApiPage("launch", "The launcher, from Python", "tilework.launch"),
        ApiPage("rendezvous", "Rendezvous", "tilework.rendezvous"),
        ApiPage("store", "Stores", "tilework.store"),
    ],
    "Groups and collectives": [
        ApiPage(
            "groups",
            "Process groups",
            "tilework.distributed",
            ("comm.groups", "comm.world", "comm.contract.ProcessGroup", "comm.backends.rounding"),
            "Make groups of ranks, ask which rank this is, and leave groups.",
        ),
        ApiPage(
            "collectives",
            "Collectives",
            "tilework.distributed",
            (
                "comm.operations.collectives",
                "comm.operations.coalescing",
                "comm.reduce_op",
                "comm.contract",
            ),
            "Operations on tensors that all ranks of a group call. Names that torch spells with a "
            "leading underscore have none here.",
        ),
        ApiPage(
            "messages",
            "Messages and objects",
            "tilework.distributed",
            ("comm.operations.p2p", "comm.operations.objects"),
            "Messages from one rank to another, and collectives of any Python objects.",
        ),
        ApiPage(
            "distributed.functional", "Functional collectives", "tilework.distributed.functional"
        ),
        ApiPage("mesh", "Meshes", "tilework.mesh"),
        ApiPage(
            "backends",
            "Backends",
            "tilework.distributed",
            ("comm.backend",),
            "Which engine moves the bytes.",
        ),
        ApiPage("torch_backend", "A backend of torch.distributed", "tilework.torch_backend"),
        ApiPage("rpc", "Calls to other ranks (RPC)", "tilework.rpc"),
    ],
    "Tensors": [
        ApiPage(
            "dtensor",
            "DTensor",
            "tilework.dtensor",
            (
                "dtensor.construction",
                "dtensor.like_torch",
                "dtensor.local_map",
                "dtensor.module",
                "dtensor.random",
                "dtensor.redistribution",
                "dtensor.rules",
                "dtensor.tensor",
                "interop",
            ),
            "Make tensors that are laid out over a mesh, change their layouts, reach their parts. "
            "Layouts are made of `Shard`, `Replicate` and `Partial` "
            "([Layouts and plans](layout.md)).",
        ),
        ApiPage(
            "rules",
            "Operators of your own",
            "tilework.dtensor",
            ("dtensor.propagation", "dtensor.register_sharding"),
            "Rules that say how an operator runs on parts.",
        ),
        ApiPage("layout", "Layouts and plans", "tilework.layout"),
        ApiPage("sharded", "ShardedTensor", "tilework.sharded"),
    ],
    "Train": [
        ApiPage("data", "Load data", "tilework.data"),
        ApiPage(
            "data_parallel",
            "Data parallel",
            "tilework.parallel",
            (
                "parallel.data_parallel",
                "parallel.model_averaging",
                "parallel.diloco",
                "parallel.sync_batch_norm",
                "parallel.zero_redundancy",
            ),
            "Replicas of a model, and averages of their gradients or parameters.",
        ),
        ApiPage("parallel.comm_hooks", "Communication hooks", "tilework.parallel.comm_hooks"),
        ApiPage(
            "fully_sharded",
            "Fully sharded",
            "tilework.parallel",
            ("parallel.fully_sharded",),
            "Parameters, gradients and optimizer states in shards.",
        ),
        ApiPage(
            "tensor_parallel",
            "Tensor parallel",
            "tilework.parallel",
            ("parallel.tensor_parallel",),
            "Layers that ranks share, by plans that say how.",
        ),
        ApiPage(
            "pipeline",
            "Pipelines",
            "tilework.parallel",
            ("parallel.pipelines",),
            "Models cut into stages, and schedules that are proven before they run.",
        ),
        ApiPage(
            "gradients",
            "Clipping and activation checkpoints",
            "tilework.parallel",
            ("parallel.activation_checkpoint", "parallel.clip_grad"),
            "The norm of all gradients, and activations that are computed twice to save memory.",
        ),
        ApiPage(
            "resilient",
            "Training that outlives ranks",
            "tilework.parallel",
            ("parallel.resilient",),
            "A training loop that goes on with the ranks that are left.",
        ),
    ],
    "Captured steps": [ApiPage("capture", "Captured steps", "tilework.capture")],
    "Checkpoints": [
        ApiPage("checkpoint", "Checkpoints", "tilework.checkpoint"),
        ApiPage("checkpoint.state_dict", "State dicts", "tilework.checkpoint.state_dict"),
    ],
    "See and diagnose": [
        ApiPage(
            "dtensor.debug",
            "What tensors do",
            "tilework.dtensor",
            (
                "dtensor.debug",
                "dtensor.like_torch.CommDebugMode",
                "dtensor.like_torch.visualize_sharding",
                "dtensor.provenance",
                "dtensor.show",
                "dtensor.verify",
            ),
            "The collectives of a block of a program, comparisons between ranks, and pictures.",
        ),
        ApiPage(
            "diagnose",
            "What ranks do",
            "tilework.distributed",
            (
                "comm.debug",
                "comm.flight",
                "comm.operations.breakpoints",
                "comm.operations.find_stragglers",
                "comm.operations.on_rank",
                "comm.per_call",
            ),
            "Slow ranks, values that differ between ranks, records of collectives, a debugger.",
        ),
        ApiPage("errors", "Errors", "tilework.errors"),
    ],
    "Test": [ApiPage("testing", "Ranks as threads", "tilework.testing")],
}

PAGES = [page for pages in API.values() for page in pages]
PACKAGES = {page.package for page in PAGES}


def names_of(page: ApiPage) -> list[str]:
    """The public names of the page, sorted."""
    return sorted(
        name
        for name, source in public_names(page.package).items()
        if not page.modules or page is _page_of(page.package, source)
    )


def public_names(package: str) -> dict[str, str]:
    """For each name that ``package`` itself publishes, the path that it is imported from.

    Modules are left out.
    """
    folder = SOURCES / package.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    tree = ast.parse(path.read_text())
    published: set[str] = set()
    sources = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tilework"):
            for name in node.names:
                sources[name.asname or name.name] = _defined(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            published |= set(ast.literal_eval(node.value))
    for (owner, name), place in LATE_NAMES.items():
        if f"tilework.{owner}" == package:
            sources[name] = ".".join(place)
    return {
        name: source
        for name, source in sources.items()
        if name in published and not _is_module(source) and not _belongs_elsewhere(source, package)
    }


def _defined(source: str) -> str:
    """The path of a name's definition, for a name that a package's face imports."""
    module, _, name = source.rpartition(".")
    if not module.endswith(".internal"):
        return source
    for node in ast.parse((SOURCES / f"{module.replace('.', '/')}.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and name in {each.name for each in node.names}:
            return f"{node.module}.{name}"
    return source


def _is_module(path: str) -> bool:
    place = SOURCES / path.replace(".", "/")
    return place.is_dir() or place.with_suffix(".py").is_file()


def _belongs_elsewhere(source: str, package: str) -> bool:
    """True if ``source`` is, or is in, a public package that does not hold ``package``."""
    others = (each for each in PACKAGES if each != package and not package.startswith(f"{each}."))
    return any(f"{source}.".startswith(f"{other}.") for other in others)


def _page_of(package: str, source: str) -> ApiPage | None:
    """The page of ``package`` that names the longest beginning of the path ``source``."""
    found = [
        (len(module), page)
        for page in PAGES
        for module in page.modules
        if page.package == package and f"{source}.".startswith(f"tilework.{module}.")
    ]
    return max(found, default=(0, None), key=lambda each: each[0])[1]
