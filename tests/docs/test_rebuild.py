"""docs/build/rebuild.py: the blanks are the source's functions; solutions are judged rightly."""

from __future__ import annotations

import ast
import shutil
import sys
from pathlib import Path

import pytest
from doc_pages import ROOT
from programs import environment, run_program
from solutions import RIGHT, WRONG, Pieces

sys.path.append(str(ROOT / "docs" / "build"))
import rebuild  # noqa: E402

STAGES = rebuild.STAGES
for_each_stage = pytest.mark.parametrize("number", STAGES)


def run(*arguments: object, status: int = 0, folder: Path) -> str:
    """What the script prints, started in this folder."""
    script = str(ROOT / "docs" / "build" / "rebuild.py")
    done = run_program([script, *map(str, arguments)], folder, environment(PYTHONPATH=str(ROOT)))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def write(folder: Path, number: int, body: str | None = None) -> None:
    """Write the functions of a stage: all with this body, or as the source has them."""
    for file, name in STAGES[number].functions:
        rebuild.write_body(folder, file, name, body or rebuild.body_of(rebuild.read(ROOT, file), name))


@for_each_stage
def test_a_stage_blanks_functions_of_the_source(number: int, tmp_path: Path) -> None:
    """Signature and docstring stay, the body goes, the file is Python still; the rest is unchanged."""
    printed = run("start", number, tmp_path, folder=tmp_path)
    for file, name in STAGES[number].functions:
        blank = rebuild.read(tmp_path, file)
        assert rebuild.is_blank(blank, name)
        before = rebuild.find_function(rebuild.read(ROOT, file), name)
        after = rebuild.find_function(blank, name)
        assert ast.get_docstring(before) == ast.get_docstring(after)
        assert ast.unparse(before.args) == ast.unparse(after.args)
        assert name in printed
        compile(blank, file, "exec")
    write(tmp_path, number)
    for file, _ in STAGES[number].functions:
        assert rebuild.read(tmp_path, file) == rebuild.read(ROOT, file)


@for_each_stage
def test_a_stage_has_a_page(number: int) -> None:
    stage = STAGES[number]
    page = (ROOT / "docs" / "build" / f"{number}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# Stage {number}: ")
    assert "](../book/" in page
    assert all(name.split(".")[-1] in page for _, name in stage.functions)
    assert all((ROOT / word).exists() for word in stage.suite if word.startswith("tests/"))


def test_from_blank_to_wrong(tmp_path: Path) -> None:
    """The states, the hints and the sentences of a stage, as a reader meets them."""
    file, name = STAGES[2].functions[0]
    run("start", 2, tmp_path, folder=tmp_path)
    assert "not written yet: BlockManager.take" in run("check", 2, status=1, folder=tmp_path)
    first = run("hint", 2, folder=tmp_path)
    second = run("hint", 2, folder=tmp_path)
    assert second.startswith(first)
    assert len(second) > len(first)
    assert "def take(self)" in run("peek", "take", folder=tmp_path)
    rebuild.write_body(tmp_path, file, name, "        pass\n")
    assert "+        pass" in run("diff", 2, folder=tmp_path)
    printed = run("check", 2, status=1, folder=tmp_path).splitlines()
    assert printed[0].startswith("not written yet: BlockManager.share")
    assert len(printed) == 2
    rule = "Each block is given once, and has one reference. 3 blocks of 4: take x."
    assert printed[1].startswith(f"- `take`: {rule} The last one returns NoneType, and not int.")
    assert printed[1].endswith("(+1 more: --all)")
    assert "failing    Stage 2" in run(folder=tmp_path)
    write(tmp_path, 2, "        pass\n")
    kept = run("start", 2, tmp_path, folder=tmp_path)
    assert kept.count("(yours, kept)") == len(STAGES[2].functions)
    more = run("start", 4, tmp_path, folder=tmp_path)
    assert "BlockManager.take (yours, kept: this stage asks more of it)" in more
    (tmp_path / file).write_text("def f(:\n", encoding="utf-8")
    assert "SyntaxError in line 1" in run("check", 2, status=2, folder=tmp_path)


@pytest.mark.slow
def test_one_function_is_judged_while_others_are_blank_or_wrong(tmp_path: Path) -> None:
    """`allocate` calls the wrong `take`, and only `take` is blamed."""
    run("start", 2, tmp_path, folder=tmp_path)
    write(tmp_path, 2)
    file, name = STAGES[2].functions[0]
    rebuild.write_body(tmp_path, file, name, "        return self.free_ids.pop()\n")
    printed = run("check", 2, status=1, folder=tmp_path).splitlines()
    assert [line[:9] for line in printed] == ["- `take`:"]
    rebuild.write_body(tmp_path, file, name, '        raise NotImplementedError("stage 2")\n')
    assert "right, as far as it can be judged alone" in run("check", 2, status=1, folder=tmp_path)


def test_mistakes(tmp_path: Path) -> None:
    for arguments, message in (
        (("check", 12, tmp_path), "which stage? One of 1, 2"),
        (("start", 1, ROOT), "is the engine itself"),
        (("check", 1), "which folder?"),
        (("check", 1, tmp_path), "there is no"),
        (("peek", "BlockManager.tak"), "which function?"),
    ):
        assert message in run(*arguments, status=2, folder=tmp_path)
    (tmp_path / "a file").touch()
    assert "Not a directory" in run("start", 1, "a file", status=1, folder=tmp_path)
    run("start", 1, tmp_path, folder=tmp_path)
    (tmp_path / "rebuild.json").write_text("{", encoding="utf-8")
    assert "rebuild.json is broken: delete it" in run("check", 1, status=2, folder=tmp_path)


@pytest.mark.slow
def test_a_stage_does_not_depend_on_others(tmp_path: Path) -> None:
    """Stage 5 is right, stage 4 is open, and stage 1 is wrong: 5 is done."""
    for number in (1, 4, 5):
        run("start", number, tmp_path, folder=tmp_path)
    write(tmp_path, 5)
    write(tmp_path, 1, "    return 0 * q\n")
    printed = run("check", 5, folder=tmp_path)
    assert "stage 5 is done" in printed
    assert "done       Stage 5" in run(folder=tmp_path)


def judged(number: int, pieces: Pieces, copy: Path) -> list[str]:
    """What the judge says of the source with pieces of its functions replaced."""
    shutil.copytree(ROOT / "nanopaged", copy / "nanopaged", ignore=shutil.ignore_patterns("__pycache__"))
    files = {name: file for file, name in STAGES[number].functions}
    for name, piece, replacement in pieces:
        body = rebuild.body_of(rebuild.read(copy, files[name]), name)
        assert piece in body, f"{name} has no {piece}"
        rebuild.write_body(copy, files[name], name, body.replace(piece, replacement))
    return [sentence for _, sentence in rebuild.judge(number, copy, [])]


@pytest.mark.slow
@pytest.mark.parametrize("number", RIGHT)
def test_a_right_solution_is_taken(number: int, tmp_path: Path) -> None:
    assert judged(number, RIGHT[number], tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "title"), [(number, title) for number in WRONG for title in WRONG[number]]
)
def test_a_wrong_solution_is_told_why(number: int, title: str, tmp_path: Path) -> None:
    sentences = judged(number, WRONG[number][title], tmp_path)
    assert sentences
    for sentence in sentences:
        assert len(sentence) > 40
        assert not sentence.startswith(("assert ", "Traceback", "The tests cannot"))
