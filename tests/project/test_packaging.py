"""The version, and the distributions: what is in them, and that a wheel runs outside the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from doc_pages import ROOT

import nanopaged

# Of the repository alone: for git, and for the machine that runs the tests.
NOT_IN_SDIST = {".gitignore", ".ci/run", ".github/workflows/ci.yml"}
NOT_IN_WHEEL = {"nanopaged/ruff.toml"}
MADE = {"PKG-INFO", "setup.cfg"}  # by setuptools

BUILD = """
import sys
from setuptools.build_meta import build_sdist, build_wheel

folder = sys.argv[1]  # setuptools changes sys.argv
build_sdist(folder)
build_wheel(folder)
"""
GENERATE = """
import nanopaged
from nanopaged import LLM, SamplingParams

(output,) = LLM(num_blocks=64).generate("ROMEO:", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
print(nanopaged.__file__, nanopaged.__version__, len(output.outputs[0].token_ids))
"""


def test_the_changelog_begins_with_this_version() -> None:
    page = (ROOT / "docs" / "records" / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## ([\d.]+) \(\d{4}-\d\d-\d\d\)$", page, re.MULTILINE)[1] == nanopaged.__version__


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints, without the paths that lead to this checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


def tracked(*folders: str) -> set[str]:
    return set(run("git", "ls-files", *folders, cwd=ROOT).splitlines())


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, built from the tracked files by setuptools as pip does, offline."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-c", BUILD, folder, cwd=source)
    return folder


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    """The source distribution, unpacked."""
    (file,) = dist.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
        archive.extractall(dist / "unpacked")
    return dist / "unpacked" / f"nanopaged-{nanopaged.__version__}"


@pytest.mark.slow
def test_the_source_distribution_is_the_repository(sdist: Path) -> None:
    files = {file.relative_to(sdist).as_posix() for file in sdist.rglob("*") if file.is_file()}
    made = {name for name in files if name in MADE or name.startswith("nanopaged.egg-info/")}
    assert files - made == tracked() - NOT_IN_SDIST
    assert tracked() >= NOT_IN_SDIST


@pytest.mark.slow
def test_the_wheel_is_the_package(dist: Path) -> None:
    """With py.typed, the tiny model, the trace's page and the C++ sources; and the licence."""
    (file,) = dist.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        metadata = archive.read(f"nanopaged-{nanopaged.__version__}.dist-info/METADATA").decode()
    assert {name for name in names if ".dist-info/" not in name} == tracked("nanopaged") - NOT_IN_WHEEL
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert f"\nVersion: {nanopaged.__version__}\n" in metadata


@pytest.mark.slow
def test_the_wheel_runs_elsewhere(dist: Path, sdist: Path, tmp_path: Path) -> None:
    """In an empty environment, which reads the dependencies of this one and installs the wheel alone."""
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    where = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    packages = Path(where.strip())
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    run(*install, cwd=tmp_path)
    # Only now, or pip would find the nanopaged that is installed there. Python reads the .pth files of
    # `packages`, but not those of the folders that they name, so an editable nanopaged is not found.
    theirs = {sysconfig.get_path("purelib"), str(Path(torch.__file__).parents[1])}
    (packages / "dependencies.pth").write_text("\n".join(theirs), encoding="utf-8")
    printed = run(python, "-c", GENERATE, cwd=tmp_path).split()
    assert printed == [str(packages / "nanopaged" / "__init__.py"), nanopaged.__version__, "4"]
    # example.py as a user has it: from the source distribution, without the package beside it
    shutil.copy(sdist / "example.py", tmp_path)
    assert "What paging did" in run(python, "example.py", "--max-tokens", "4", cwd=tmp_path)
