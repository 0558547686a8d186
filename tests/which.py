"""The tests that concern a file of the package, the ones that find most mistakes in the least time first.

    python tests/which.py nanopaged/scheduler.py          prints them
    python tests/which.py --run nanopaged/scheduler.py    runs them, and stops at the first that fails

These are the test of the same name, then those that import the file's module, themselves or by a helper in
tests/, then the rest of the folder for this part of the package.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"nanopaged": "engine", "attention": "kernels"}  # of the package → of the tests; others are alike


def imports(file: Path, package: str, name: str) -> bool:
    """Whether a test imports this module of the package, or one of its helpers does."""
    text = file.read_text(encoding="utf-8")
    if re.search(rf"\b{package}\.{name}\b|^from {package} import .*\b{name}\b", text, re.MULTILINE):
        return True
    helpers = [ROOT / "tests" / f"{module}.py" for module in re.findall(r"^from (\w+) import", text, re.M)]
    return any(imports(helper, package, name) for helper in helpers if helper.exists())


def tests_of(file: str) -> list[str]:
    """The tests of a file, such as nanopaged/scheduler.py, as paths from the project's folder."""
    path = Path(file).absolute().relative_to(ROOT)
    package = ".".join(path.parent.parts)
    folder = FOLDERS.get(path.parent.name, path.parent.name)
    tests = sorted((ROOT / "tests").glob("*/test_*.py"), key=lambda test: (test.parent.name != folder, test))
    found = [test for test in tests if test.stem == f"test_{path.stem}"]
    found += [test for test in tests if test.parent.name != "docs" and imports(test, package, path.stem)]
    found += [test for test in tests if test.parent.name == folder]
    return [test.relative_to(ROOT).as_posix() for test in dict.fromkeys(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", help="of the package")
    parser.add_argument("--run", action="store_true", help="run the tests, too")
    args = parser.parse_args()
    missing = [file for file in args.files if not Path(file).is_file()]
    if missing:
        parser.error(f"{missing[0]} is no file: name files of nanopaged/")
    tests = list(dict.fromkeys(test for file in args.files for test in tests_of(file)))
    print("\n".join(tests))
    if args.run:
        sys.exit(subprocess.call([sys.executable, "-m", "pytest", "-x", *tests], cwd=ROOT))


if __name__ == "__main__":
    main()
