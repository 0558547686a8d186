"""Which module of the package may import which. (Not the tests of `model/layers.py`.)"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "nanopaged"

# Each room may import those named here. A wing is one room; within it, every file may import the others, but
# nowhere in a circle. `config` imports only names and sentences, and every room may import it.
MAY_IMPORT = {
    "checks": set(),
    "config": {"checks"},
    # the bookkeeping, which knows no tensor
    "text": {"checks"},
    "sequence": {"text"},
    "block_manager": {"sequence"},
    "swap": {"block_manager", "sequence"},
    "beam_search": {"block_manager", "sequence", "text"},
    "queues": {"sequence"},
    "scheduler": {"block_manager", "swap", "beam_search", "queues", "sequence"},
    "prompts": {"sequence", "text", "checks"},
    "views": {"scheduler", "block_manager", "swap", "sequence", "text"},
    # the tensors, which know no queue
    "kernels": set(),
    "kv_cache": {"kernels"},
    "attention": {"kernels", "kv_cache"},
    "sampling": {"sequence", "kv_cache", "text"},
    "sampler": {"sampling", "sequence", "kv_cache", "text", "checks"},
    "model": {"kernels", "kv_cache", "attention", "sampler", "sequence", "text", "checks"},
    "model_runner": {"model", "attention", "kernels", "kv_cache", "sampler", "sequence", "checks"},
    # where the two meet
    "engine": {
        *("prompts", "scheduler", "block_manager", "sequence", "model_runner", "model", "text", "views"),
        "checks",
    },
    # above the engine, which knows nothing of them
    "threads": {"engine", "sequence", "text", "views", "checks"},
    "llm": {"engine", "prompts", "sequence", "text", "threads", "views", "checks"},
    "trace": {"engine", "block_manager", "sequence", "views"},
    "terminal": set(),  # a script like a user's: it has what `import nanopaged` offers, and no more
    "__main__": {"terminal"},
    "tiny": set(),
}
BOOKKEEPING = {
    "text",
    "sequence",
    "block_manager",
    "swap",
    "beam_search",
    "scheduler",
    "prompts",
    "views",
    "queues",
}
WITHOUT_TORCH = {"config", "checks"} | BOOKKEEPING
WINGS = {
    *("attention", "checks", "kernels", "model", "queues", "sampling", "terminal", "text"),
    *("threads", "tiny", "trace", "views"),
}


def modules() -> dict[str, Path]:
    """Module name, without the package's → file; `attention/__init__.py` is `attention`."""
    files = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    del files[""]
    return files


def imports(file: Path) -> set[str]:
    """Everything the file imports, at any depth and under TYPE_CHECKING too, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(file: Path) -> set[str]:
    """Modules of this package that the file imports."""
    known = modules()
    names = {name.removeprefix("nanopaged.") for name in imports(file) if name.startswith("nanopaged.")}
    return {name for name in names if name in known}


def test_the_front_is_a_dozen_rooms() -> None:
    front = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert front == set(MAY_IMPORT) - WINGS - {"__main__"}
    assert len(front) == 12
    assert {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()} <= WINGS


def test_every_wing_is_installed() -> None:
    """pyproject.toml names the packages of a wheel one by one; an editable install would not miss one."""
    project = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r'^    "(nanopaged[.\w]*)",$', project, flags=re.MULTILINE)
    wings = {f"nanopaged.{file.parent.name}" for file in PACKAGE.glob("*/__init__.py")}
    assert set(named) == {"nanopaged"} | wings


@pytest.mark.parametrize("module", modules())
def test_a_room_imports_only_what_it_may(module: str) -> None:
    room = module.split(".")[0]
    imported = {name.split(".")[0] for name in own_imports(modules()[module])} - {room, "config"}
    assert imported <= MAY_IMPORT[room], f"{module} may not import {imported - MAY_IMPORT[room]}"


@pytest.mark.parametrize("room", sorted(WITHOUT_TORCH))
def test_the_bookkeeping_knows_no_tensors(room: str) -> None:
    for module, file in modules().items():
        if module.split(".")[0] == room:
            assert not {name.split(".")[0] for name in imports(file)} & {"torch", "triton"}


def test_the_bookkeeping_needs_the_standard_library_alone() -> None:
    """Scheduler, block manager, snapshots and the recorder can be loaded where nothing is installed."""
    names = [module for module in modules() if module.split(".")[0] in WITHOUT_TORCH] + ["trace.recorder"]
    names.remove("views.progress")  # tqdm
    script = f"""
import importlib, sys
class StandardLibraryAlone:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in sys.stdlib_module_names | {{"nanopaged"}}:
            raise ImportError(f"{{name}} is not in the standard library")
sys.meta_path.insert(0, StandardLibraryAlone())
for name in {names}:
    importlib.import_module(f"nanopaged.{{name}}")
"""
    env = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_there_is_no_circle() -> None:
    """Not between files either, and not by imports that only type checkers see."""
    graph = {module: own_imports(file) - {module} for module, file in modules().items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_spin_briefly_while_they_wait(given: dict[str, str], spins: str) -> None:
    """The environment is set before torch is imported, and a user's own choice stays."""
    script = "import os, sys, nanopaged; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=inherited | given
    )
    assert done.stdout.split() == [spins, "False"]
