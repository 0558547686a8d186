"""The house: which module of the package may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nanopaged"

# Each room imports only rooms that stand before it in its plane; a folder is one room. The control plane
# knows no tensor, and the data plane knows no queue: of the control plane it has what a step is. Both meet in
# the engine. What stands on top may import all that stands before it.
CONTROL = ["terminal", "config", "outputs", "text", "sequence", "block_manager", "prompts", "swap"]
CONTROL += ["beam_search", "scheduler", "snapshot", "trace"]
DATA = ["kernels", "kv_cache", "attention", "parallel", "model", "sampler", "cuda_graphs", "memory"]
DATA += ["model_runner"]
A_STEP = ["terminal", "config", "outputs", "text", "sequence"]
TOP = ["engine", "llm"]
A_SCRIPT = ["__main__"]  # like a user's: what `import nanopaged` offers, no more
PLANES = [  # rooms, and what they may import besides
    (CONTROL, []),
    (DATA, A_STEP),
    (TOP, CONTROL + DATA),
    (A_SCRIPT, ["__init__"]),
]

FILES = {  # module, without the package's name → file; attention/__init__.py is "attention"
    ".".join(file.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
    if file.read_text(encoding="utf-8").strip()
}


def imports(file: Path) -> set[str]:
    """Everything the file imports, at any depth and under TYPE_CHECKING too, as dotted names."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def own_imports(module: str) -> set[str]:
    """Modules of this package that a module imports."""
    names = {name.removeprefix("nanopaged.") for name in imports(FILES[module])}
    return {"__init__" if name == "nanopaged" else name for name in names} & FILES.keys() - {module}


@pytest.mark.parametrize("module", [module for module in FILES if module != "__init__"])
def test_a_room_imports_only_what_it_may(module: str) -> None:
    room = module.split(".")[0]
    [(rooms, besides)] = [plane for plane in PLANES if room in plane[0]]
    allowed = {room, "terminal", *besides, *rooms[: rooms.index(room)]}
    unwanted = {name for name in own_imports(module) if name.split(".")[0] not in allowed}
    assert not unwanted
    assert rooms is not CONTROL or not imports(FILES[module]) & {"torch", "triton"}


def test_there_is_no_circle() -> None:
    """Not between files of a folder either, and not by imports that only type checkers see."""
    TopologicalSorter({module: own_imports(module) for module in FILES.keys() - {"__init__"}}).prepare()


def test_the_control_plane_needs_the_standard_library_alone() -> None:
    """Scheduler, block manager, snapshots and the trace can be loaded where nothing is installed."""
    modules = [f"nanopaged.{name}" for name in CONTROL]
    command = [sys.executable, "-I", "-S", "-c"]  # -S: without what is installed
    script = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); import {', '.join(modules)}"
    subprocess.run([*command, script], check=True)
