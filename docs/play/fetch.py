"""Fetch Pyodide, CPython for the browser, from npm: the playground's only dependency.

    python docs/play/fetch.py

puts its files into docs/play/pyodide/VERSION/, and their names and sizes into pyodide/files.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "314.0.7"  # with CPython 3.14
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
FOLDER = Path(__file__).parent / "pyodide"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    fetch(FOLDER)
    total = sum(file.stat().st_size for file in (FOLDER / VERSION).iterdir())
    print(f"{FOLDER / VERSION}: {len(FILES)} files, {total / 1e6:.1f} MB")


def fetch(folder: Path) -> None:
    """Fetch the files, unless they are there. Exits with a sentence if npm is missing or fails."""
    listed = folder / "files.json"  # written last: with it, the files are complete
    if listed.exists() and json.loads(listed.read_text(encoding="utf-8"))["version"] == VERSION:
        return
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("Pyodide comes from npm, and there is no npm here: install Node.js (nodejs.org)")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [npm, "pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", temporary]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"npm cannot fetch pyodide@{VERSION}:\n{done.stderr.strip()}")
        (packed,) = Path(temporary).glob("*.tgz")
        unpacked = Path(temporary) / VERSION
        unpacked.mkdir()
        with tarfile.open(packed) as archive:
            for name in FILES:
                (unpacked / name).write_bytes(archive.extractfile(f"package/{name}").read())
        sizes = {name: (unpacked / name).stat().st_size for name in FILES}
        for old in folder.iterdir():
            if old.is_dir() and old != Path(temporary):
                shutil.rmtree(old)
        unpacked.rename(folder / VERSION)
    listed.write_text(json.dumps({"version": VERSION, "sizes": sizes}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
