"""Which part may know which: an AST walk over the sources, and planted violations that prove the walk sees them."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from moe_ep.dispatch import registry

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("moe_ep", "kernels", "recipes", "tools")
FOLDERS = {
    *("moe_ep", "moe_ep/dispatch", "moe_ep/replica", "moe_ep/integrations", "moe_ep/testing"),
    *("kernels", "recipes", "tools", "tools/results", "docs", "tests", "tests/unit", "tests/ranks", "tests/gpu"),
}
NOT_OURS = {"build", "dist", "runs", "__pycache__"}  # made by commands, ignored by git
PLOT_OR_CLI = {"matplotlib", "seaborn", "plotly", "click", "typer", "tyro", "fire", "rich", "tqdm", "docopt"}
DISPATCHERS = {f"moe_ep.dispatch.{name}" for name in ("local", "all2all", "agrs", "deepep", "nccl_ep", "direct")}
PURE = {
    f"moe_ep.{name}"
    for name in (
        "replica.plan",
        "replica.planners",
        "replica.placed",
        "replica.checks",
        "replica.greedy",
        "replica.reroute",
        "routing",
        "router",
        "load",
        "experts",
        "experts_checks",
        "experts_registry",
        "torch_experts",
        "loop_experts",
        "shared_experts",
        "gemm_experts",
        "grouped_gemm_experts",
        "te_experts",
        "quack_experts",
        "quack_gemms",
        "quack_library",
        "quack_mlp",
    )
}
DOMINO_MODULES = {f"moe_ep.{name}" for name in ("domino", "domino_executor", "domino_checks", "pending")}
CONFIG_MODULES = {f"moe_ep.{name}" for name in ("config", "config_checks", "schema", "bounds")}
HARMLESS = set(sys.stdlib_module_names) - {"subprocess", "multiprocessing", "threading", "socket", "os", "asyncio"}
STREAM_NAMES = {
    *(f"torch.cuda.{name}" for name in ("Stream", "Event", "ExternalStream", "StreamContext", "stream", "set_stream")),
    *("torch.cuda.current_stream", "torch.cuda.default_stream", "torch.cuda.streams", "torch.Stream", "torch.Event"),
}


class Reference(NamedTuple):
    """A dotted name that a source file imports or uses through an import, such as `torch.cuda.Stream`."""

    name: str
    line: int


def module_name(path: str) -> str:
    """moe_ep/dispatch/base.py -> moe_ep.dispatch.base; kernels/ops.py -> moe_ep.kernels.ops, as it is installed."""
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    return ".".join(["moe_ep", *parts] if parts[0] == "kernels" else parts)


def references(path: str, source: str) -> Iterator[Reference]:
    """All imports, wherever they stand, and all attribute chains that start at an imported name."""
    tree = ast.parse(source, path)
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    alias: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                alias[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                yield Reference(name.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for name in node.names:
                alias[name.asname or name.name] = f"{origin}.{name.name}"
                yield Reference(f"{origin}.{name.name}", node.lineno)
    for node in ast.walk(tree):
        chain = dotted(node)
        if chain and chain[0] in alias and len(chain) > 1:
            yield Reference(".".join([alias[chain[0]], *chain[1:]]), node.lineno)
        yield from imported_by_call(node)


def dotted(node: ast.AST) -> list[str]:
    """["a", "b", "c"] of the expression a.b.c, [] of anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return [*head, node.attr] if head else []
    return []


def imported_by_call(node: ast.AST) -> Iterator[Reference]:
    """import_module("x") and __import__("x") with a literal name."""
    if isinstance(node, ast.Call) and dotted(node.func)[-1:] in (["import_module"], ["__import__"]) and node.args:
        name = node.args[0]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            yield Reference(name.value, node.lineno)


def within(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def dispatcher_of(name: str) -> str | None:
    """The dispatcher that a module belongs to, as its file or as one of its helpers: `nccl_ep` of `nccl_ep_sizes`."""
    found = [one for one in DISPATCHERS if within(name, one) or name.startswith(f"{one}_")]
    return max(found, key=len, default=None)


def may_know_streams(module: str) -> bool:
    return within(
        module, "moe_ep.streams", "moe_ep.in_flight", "moe_ep.dispatch", "moe_ep.replica.transport", "moe_ep.kernels"
    )


class Rule(NamedTuple):
    """An arrow that must not exist: `applies` to the module that refers, `forbids(module, name)` what it refers to."""

    text: str
    applies: Callable[[str], bool]
    forbids: Callable[[str, str], bool]


RULES = [
    Rule(
        "kernels must not know moe_ep",
        lambda m: within(m, "moe_ep.kernels"),
        lambda m, n: within(n, "moe_ep") and not within(n, "moe_ep.kernels"),
    ),
    Rule(
        "moe_ep must not know recipes or tools",
        lambda m: within(m, "moe_ep"),
        lambda m, n: within(n, "recipes", "tools"),
    ),
    Rule("the product must not know its tests", lambda m: True, lambda m, n: within(n, "tests", "conftest")),
    Rule(
        "moe_ep must not know a plotting or command-line library",
        lambda m: within(m, "moe_ep"),
        lambda m, n: within(n, *PLOT_OR_CLI),
    ),
    Rule(
        "one dispatcher must not know another",
        lambda m: dispatcher_of(m) is not None,
        lambda m, n: dispatcher_of(n) not in (None, dispatcher_of(m)),
    ),
    Rule(
        "dispatch must not know layer, step, domino or replica",
        lambda m: within(m, "moe_ep.dispatch"),
        lambda m, n: within(n, *DOMINO_MODULES, "moe_ep.layer", "moe_ep.step", "moe_ep.replica"),
    ),
    Rule(
        "domino must not know a concrete dispatcher or torch.distributed",
        lambda m: m in DOMINO_MODULES,
        lambda m, n: within(n, *DISPATCHERS, "torch.distributed"),
    ),
    Rule(
        "planning, routing, routers, load and experts must not know torch.distributed",
        lambda m: within(m, *PURE),
        lambda m, n: within(n, "torch.distributed"),
    ),
    Rule(
        "config must not know anything that runs",
        lambda m: within(m, *CONFIG_MODULES),
        lambda m, n: not within(n, "moe_ep.errors", *CONFIG_MODULES) and n.split(".")[0] not in HARMLESS,
    ),
    Rule(
        "only integrations may know another training framework or an integration",
        lambda m: within(m, "moe_ep") and not within(m, "moe_ep.integrations"),
        lambda m, n: within(n, "megatron", "xtuner", "moe_ep.integrations"),
    ),
    Rule(
        "only streams, work in flight, dispatchers and the replica transport may know CUDA streams and events",
        lambda m: within(m, "moe_ep") and not may_know_streams(m),
        lambda m, n: within(n, *STREAM_NAMES),
    ),
]


def violations(sources: dict[str, str]) -> list[str]:
    """One line for each forbidden reference of the files {path: text}."""
    found = []
    for path, text in sorted(sources.items()):
        module = module_name(path)
        rules = [rule for rule in RULES if rule.applies(module)]
        for ref in sorted(set(references(path, text))):
            found += [f"{path}:{ref.line}: {ref.name}: {r.text}" for r in rules if r.forbids(module, ref.name)]
    return found


def own_sources() -> dict[str, str]:
    files = [file for folder in SOURCE_FOLDERS for file in (ROOT / folder).rglob("*.py")]
    return {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in files}


def stray_folders(root: Path) -> set[str]:
    """Folders of the repository outside the agreed layout; docs/ may have its own."""
    found = set()
    for place, names, _ in os.walk(root):
        names[:] = [n for n in names if not (n[0] == "." or n in NOT_OURS or n.endswith(".egg-info"))]
        found |= {(Path(place) / name).relative_to(root).as_posix() for name in names}
    return {name for name in found if not name.startswith("docs/")} - FOLDERS


def test_no_forbidden_arrow_exists() -> None:
    sources = own_sources()
    assert "moe_ep/config.py" in sources
    assert violations(sources) == []


def test_every_built_in_dispatcher_is_among_the_siblings() -> None:
    modules = {f"moe_ep.dispatch{place}" for place in registry._BUILT_IN.values()}
    assert modules
    assert modules <= DISPATCHERS


def test_a_test_file_that_may_skip_itself_is_imported_only_behind_a_skip() -> None:
    """Who imports one where its package is missing meets half of it: collection fails, and with it the whole run."""
    sources = {file.relative_to(ROOT).as_posix(): file.read_text() for file in (ROOT / "tests").rglob("*.py")}
    skip = "\npytest.importorskip("
    may_skip = {module_name(path) for path, text in sources.items() if skip in text}
    assert "tests.ranks.test_megatron" in may_skip
    fronts = {path: text.partition(skip)[0] for path, text in sources.items()}
    found = {(path, ref.name) for path, text in fronts.items() for ref in references(path, text)}
    assert [(path, name) for path, name in sorted(found) if within(name, *may_skip)] == []


def test_folders_are_the_agreed_ones() -> None:
    assert stray_folders(ROOT) == set()


def test_a_stray_folder_is_seen(tmp_path: Path) -> None:
    for name in ("moe_ep/dispatch/cuda", "benchmarks", "runs/x", ".venv/lib", "docs/img", "moe_ep/__pycache__"):
        (tmp_path / name).mkdir(parents=True)
    assert stray_folders(tmp_path) == {"moe_ep/dispatch/cuda", "benchmarks"}


KERNELS, RECIPES, TESTS, LIBRARY, SIBLING, UPWARD, DOMINO, COLLECTIVE, CONFIG, OTHERS, STREAMS = (
    rule.text for rule in RULES
)
PLANTED = [
    ("kernels/ops.py", "from moe_ep.errors import InputError", KERNELS),
    ("kernels/ops.py", "import moe_ep", KERNELS),
    ("kernels/ops.py", "from ..routing import Routing", KERNELS),
    ("moe_ep/layer.py", "import recipes.model", RECIPES),
    ("moe_ep/replica/plan.py", "def f():\n    from tools import bench_dispatch", RECIPES),
    ("moe_ep/testing/ranks.py", "from tests.conftest import something", TESTS),
    ("recipes/data.py", "import tests.unit", TESTS),
    ("moe_ep/doctor.py", "import typer", LIBRARY),
    ("moe_ep/load.py", "import importlib\nimportlib.import_module('matplotlib.pyplot')", LIBRARY),
    ("moe_ep/dispatch/agrs.py", "from .all2all import exchange", SIBLING),
    ("moe_ep/dispatch/deepep.py", "from moe_ep.dispatch import all2all", SIBLING),
    ("moe_ep/dispatch/nccl_ep_rows.py", "from .deepep_library import load", SIBLING),
    ("moe_ep/dispatch/direct.py", "from .nccl_ep_sizes import rows_of", SIBLING),
    ("moe_ep/dispatch/base.py", "from ..layer import MoELayer", UPWARD),
    ("moe_ep/dispatch/direct.py", "from .. import replica", UPWARD),
    ("moe_ep/domino.py", "from .dispatch.local import LocalDispatcher", DOMINO),
    ("moe_ep/domino_executor.py", "import torch\ntorch.distributed.barrier()", DOMINO),
    ("moe_ep/replica/plan.py", "import torch.distributed as dist", COLLECTIVE),
    ("moe_ep/router.py", "from torch import distributed as d\nd.all_reduce(1)", COLLECTIVE),
    ("moe_ep/experts.py", "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)", COLLECTIVE),
    ("moe_ep/config.py", "import torch", CONFIG),
    ("moe_ep/config.py", "from .router import build_router", CONFIG),
    ("moe_ep/config.py", "import subprocess", CONFIG),
    ("moe_ep/schema.py", "import torch", CONFIG),
    ("moe_ep/config_checks.py", "from .router import build_router", CONFIG),
    ("moe_ep/layer.py", "from megatron.core import parallel_state", OTHERS),
    ("moe_ep/domino.py", "from .integrations.megatron import use_moe_ep", OTHERS),
    ("moe_ep/layer.py", "import torch\ns = torch.cuda.Stream()", STREAMS),
    ("moe_ep/replica/runtime.py", "from torch.cuda import Event", STREAMS),
    ("moe_ep/experts.py", "from torch import cuda\nwith cuda.stream(None):\n    pass", STREAMS),
]


@pytest.mark.parametrize(("path", "text", "rule"), PLANTED)
def test_a_planted_violation_is_seen(path: str, text: str, rule: str) -> None:
    found = violations({path: text})
    assert found
    assert all(line.endswith(rule) for line in found)


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for _, _, rule in PLANTED} == {rule.text for rule in RULES}


def test_legal_references_pass() -> None:
    legal = {
        "kernels/ops.py": "import torch\nfrom . import build\nfrom moe_ep.kernels import build as b",
        "moe_ep/streams.py": "import torch\nimport torch.distributed as dist\ntorch.cuda.Event()",
        "moe_ep/dispatch/all2all.py": "import torch\nfrom .base import Dispatcher\ntorch.cuda.current_stream()",
        "moe_ep/dispatch/registry.py": "from . import all2all, local",
        "moe_ep/dispatch/nccl_ep_rows.py": "from . import nccl_ep_library\nfrom .nccl_ep_sizes import rows_of",
        "moe_ep/replica/transport.py": "import torch\nimport torch.distributed\ntorch.cuda.Stream()",
        "moe_ep/config.py": "from __future__ import annotations\nimport dataclasses\nfrom .errors import RecipeError",
        "moe_ep/experts.py": "import torch\nn = torch.cuda.device_count()",
        "recipes/plots.py": "import matplotlib\nfrom moe_ep.layer import MoELayer",
    }
    assert violations(legal) == []
