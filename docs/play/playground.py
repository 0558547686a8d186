"""The playground's run: the engine on a set of settings, with its source as the reader has changed it.

The control plane is loaded from the source files: `LLMEngine` with its `step`, `Scheduler`, `BlockManager`,
`Swapper`, the beam search, the checks of options and requests, the recorder of the trace. Only what computes
is replaced: `StandIn` takes the place of the model, and `WITHOUT_TENSORS` that of the modules that load one.
This file runs under Pyodide (worker.js) and, unchanged, under CPython (the tests).

    python docs/play/playground.py

writes runs.json, the runs of the presets, which the page shows while Python starts.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from io import StringIO
from pathlib import Path
from traceback import extract_tb
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_STEPS, MOST_BLOCKS, MOST_REQUESTS = 2000, 4096, 100  # what a browser draws at ease

DEFAULTS = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
ENGINE: dict[str, Any] = DEFAULTS["engine"]  # options of EngineConfig, for settings that do not name them
REQUEST: dict[str, Any] = DEFAULTS["request"]

Settings = dict[str, Any]
"""The options of ENGINE; "rank", the text of a function of a request, or empty; "requests", a list of dicts
with the fields of REQUEST. One with a beam width above 0 is a beam search."""

# ── the source, with changes ──────────────────────────────────────────────────────────────────────


# Each text is compiled once, so a run with another change compiles one file only.
compiled = lru_cache(maxsize=256)(compile)


class Package:
    """The package `nanopaged` with the reader's changes, beside others of that name.

    Args:
        changes: file, such as nanopaged/scheduler.py → its text.
    """

    def __init__(self, changes: dict[str, str]) -> None:
        self.changes = changes
        self.modules: dict[str, ModuleType] = {}
        for name, contents in WITHOUT_TENSORS.items():
            self.modules[f"nanopaged.{name}"] = module = ModuleType(f"nanopaged.{name}")
            vars(module).update(contents)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As a finder of sys.meta_path."""
        if not is_ours(name):
            return None
        place = ROOT.joinpath(*name.split("."))
        inside = [str(place)] if place.is_dir() else None
        file = place / "__init__.py" if inside else place.with_suffix(".py")
        return spec_from_file_location(name, file, loader=self, submodule_search_locations=inside)

    def create_module(self, spec: ModuleSpec) -> None:
        """As a loader: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Run a file of the package, or the text that the reader has put in its place."""
        path = Path(str(module.__file__)).relative_to(ROOT).as_posix()  # nanopaged/swap.py, in tracebacks too
        exec(compiled(text_of(path, self.changes), path, "exec", dont_inherit=True), vars(module))

    @contextmanager
    def imported(self) -> Iterator[None]:
        """Inside, `import nanopaged` is this package."""
        others = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)
            self.modules = {name: sys.modules.pop(name) for name in list(sys.modules) if is_ours(name)}
            sys.modules.update(others)


@lru_cache(maxsize=4)
def package(changes: frozenset[tuple[str, str]]) -> Package:
    """The package with these changes: runs with the same ones load it once."""
    return Package(dict(changes))


def is_ours(name: str) -> bool:
    return name.partition(".")[0] == "nanopaged"


def text_of(path: str, changes: dict[str, str]) -> str:
    return changes[path] if path in changes else (ROOT / path).read_text(encoding="utf-8")


# ── in place of the model ─────────────────────────────────────────────────────────────────────────

WORDS = """the a and of in my his your good sweet old new king queen night day heart hand eye world love sword
crown time speaks comes goes sees knows gives takes dreams""".split()  # noqa: SIM905
assert len(WORDS) == sha256().digest_size


class Tokenizer:
    """Each word is a token. A word that was not seen before gets the next number."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        for word in text.split():
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
        return [self.ids[word] for word in text.split()]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"{self.words[token_id]} " for token_id in token_ids)


class StandIn:
    """Takes the place of the model: it draws the next word from WORDS, by a hash of all words before it.

    So a text goes on in the same way however it is scheduled, and the samples of a request differ.
    """

    def __init__(self, tokenizer: Tokenizer, num_blocks: int, num_host_blocks: int) -> None:
        self.tokenizer, self.word_ids = tokenizer, tokenizer.encode(" ".join(WORDS))
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks

    def execute(self, batch: Any) -> Any:
        """As `ModelRunner.execute`."""
        from nanopaged.sequence import StepResult

        return StepResult([self.samples(seq) if seq.needs_sample else [] for seq in batch.sequences])

    def samples(self, seq: Any) -> list[Any]:
        """A word for each output; of a beam, the words with the smallest bytes of the hash as candidates."""
        from nanopaged.sequence import Sample

        request, text = seq.request, self.tokenizer.decode(seq.token_ids)
        if request.is_beam_search:
            drawn = sha256(text.encode()).digest()
            best = sorted(range(len(WORDS)), key=drawn.__getitem__)[: request.num_candidates]
            return [Sample(self.word_ids[i], -drawn[i] / 32) for i in best]
        indices = range(request.width) if request.awaits_fork else [seq.index]
        drawn = [sha256(f"{index} {text}".encode()).digest()[0] for index in indices]
        return [Sample(self.word_ids[byte % len(WORDS)], -1.0) for byte in drawn]


MODEL = SimpleNamespace(share=lambda _: None)  # in place of a model's config; `prepare` sets what a run needs
WITHOUT_TENSORS: dict[str, dict[str, Any]] = {  # module that needs torch → what engine.py imports from it
    "model": {"__path__": []},
    "model.checkpoint": {
        "find_model": lambda *_, **__: Path("a stand-in for the model"),
        "load_tokenizer": lambda _: MODEL.tokenizer,
        "read_eos_token_ids": lambda *_: frozenset(),
    },
    "model.model_config": {"read_model_config": lambda _: MODEL},
    "memory": {"usual_budget": lambda _: 2048},
    "model_runner": {"ModelRunner": None},
    "parallel": {"start_ranks": None},
}

# ── a run ─────────────────────────────────────────────────────────────────────────────────────────


def run(
    settings: Settings, changes: dict[str, str], tell: Callable[[int, str], object] = lambda step, text: None
) -> dict[str, Any]:
    """Serve the requests to their ends, and check the invariants after each step.

    Args:
        changes: file → text, as for `Package`.
        tell: is called before each step, with its number and what was added to the trace since the last call.

    Returns:
        page: the trace, up to the step that ended the run; None if there was no step.
        failure: None, or why the run did not end well: {"kind", "message", "step"}. The kinds are "settings",
            "invariant", "steps" (too many), and "source", an exception, which also has "file" and "line".
        printed: what the source printed.
    """
    printed = StringIO()
    failure = None
    step = clock = 0
    doing = "settings"
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(printed):
        page = Path(folder) / "run.html"
        try:
            with package(frozenset(changes.items())).imported():
                engine, arrivals = prepare(settings, page)
                with page.open(encoding="utf-8") as added:
                    while arrivals or engine.requests:
                        if step == MOST_STEPS:
                            failure = {
                                "kind": "steps",
                                "message": f"The run ends here, after {step:,} steps.",
                            }
                            break
                        step += 1
                        clock += 1
                        tell(step, added.read())
                        if not engine.requests:  # steps in which nothing runs are left out
                            clock = max(clock, int(arrivals[0].arrival_time))
                        while arrivals and arrivals[0].arrival_time < clock + 1:
                            request = arrivals.pop(0)
                            engine.requests[request.request_id] = request
                            engine.scheduler.add(request)  # `engine.queue` would take the time
                        doing = "source"
                        engine.step()
                        doing = "invariant"
                        engine.check_invariants()
        except BaseException as error:  # the reader's source may raise SystemExit
            failure = explain(error, changes, doing)
        text = page.read_text(encoding="utf-8") if step else None
    return {
        "page": text,
        "failure": failure and failure | {"step": step},
        "printed": printed.getvalue()[:20_000],
    }


def prepare(settings: Settings, page: Path) -> tuple[Any, list[Any]]:
    """The engine, and the requests in the order of arrival. That is a step, so a run can be repeated.

    Raises:
        TypeError, ValueError: a setting is wrong, or a request can never be served.
    """
    from nanopaged import EngineConfig
    from nanopaged.engine import LLMEngine

    options = filled(settings, ENGINE | {"rank": "", "requests": []})
    rank = str(options.pop("rank")).strip()
    rows = options.pop("requests")
    for name, least in (("num_blocks", 1), ("block_size", 1), ("num_host_blocks", 0)):
        at_most(name, options[name], MOST_BLOCKS, least)
    if options["preemption"] == "auto":
        raise ValueError("preemption is 'auto', which measures a model: choose swap or recompute")
    at_most("the number of requests", len(rows), MOST_REQUESTS)
    if not rows:
        raise ValueError("there is no request: add one")

    tokenizer = Tokenizer()
    runner = StandIn(tokenizer, options["num_blocks"], options["num_host_blocks"])
    asked = []
    for number, row in enumerate(rows, start=1):
        with naming(number):
            row = filled(row, REQUEST)
            asked.append((row["arrival"], tokenizer.encode(str(row["prompt"])), params_of(row)))
    longest = max(len(token_ids) + params.max_tokens for _, token_ids, params in asked)
    config = EngineConfig(trace=page, **options)
    budget = config.max_num_batched_tokens
    if not config.enable_chunked_prefill and budget < longest:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but without chunked prefill a text must fit in one step, "
            f"and the longest here has {longest} tokens: raise it, or switch chunked prefill on"
        )
    MODEL.tokenizer = tokenizer
    MODEL.vocab_size = len(tokenizer.words)
    MODEL.max_position_embeddings = longest
    engine = LLMEngine(config, runner)
    engine.prompts.tokenizer = None  # prompts come as tokens, and nothing is detokenised
    requests = []
    for number, (arrival, token_ids, params) in enumerate(asked, start=1):
        with naming(number):
            request = engine.prompts.make_request(f"request {number}", token_ids, params)
        request.arrival_time = arrival + number / 1000
        requests.append(request)
    if rank:
        engine.scheduler.rank = eval(compile(rank, "rank", "eval"), {})
        if not callable(engine.scheduler.rank):
            raise ValueError(
                f"rank is {engine.scheduler.rank!r}, but must be a function: "
                "lambda request: request.arrival_time"
            )
    return engine, sorted(requests, key=lambda request: request.arrival_time)


def params_of(row: dict[str, Any]) -> Any:
    """`SamplingParams`, or `BeamSearchParams` if the request has a beam width. Raises as `prepare`."""
    from nanopaged import BeamSearchParams, SamplingParams

    at_most("arrival", row["arrival"], MOST_STEPS, least=1)
    at_most("max_tokens", row["max_tokens"], MOST_STEPS, least=1)
    if row["beam_width"] == 0:
        return SamplingParams(n=row["n"], max_tokens=row["max_tokens"], ignore_eos=True)
    if row["n"] != 1:
        raise ValueError(f"n is {row['n']}, but a beam search has n = 1: set beam_width to 0, or n to 1")
    at_most("beam_width", row["beam_width"], len(WORDS) // 2)  # each beam proposes twice as many
    return BeamSearchParams(beam_width=row["beam_width"], max_tokens=row["max_tokens"], ignore_eos=True)


def filled(given: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The defaults with what is given. Raises ValueError for an unknown name and for an empty value."""
    for name, value in given.items():
        if name not in defaults:
            raise ValueError(f"there is no setting {name!r}, but {', '.join(defaults)}")
        if value is None:
            raise ValueError(f"{name} is empty: give it a value")
    return defaults | given


def at_most(name: str, value: Any, most: int, least: int = 0) -> None:
    """Raise TypeError or ValueError unless this is a whole number that the playground can show."""
    from nanopaged.config import check_int

    if check_int(name, value, least) > most:
        raise ValueError(f"{name} is {value:,}, but the playground allows at most {most:,}")


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Name the request in the errors of its settings."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"request {number}: {error}") from error


def explain(error: BaseException, changes: dict[str, str], kind: str) -> dict[str, Any]:
    """The failure for an exception, with the line of the changed source that raised it or called what did."""
    trace = [(frame.filename, frame.lineno or 0) for frame in extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        trace.append((error.filename or "", error.lineno or 0))
    theirs = [place for place in trace if place[0] in changes or place[0] == "rank"]
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    file, line = trace[-1]
    if not message and file.startswith("nanopaged/"):  # an assert without a sentence
        message = text_of(file, changes).splitlines()[line - 1].strip()
    if kind == "invariant" or (kind == "settings" and not theirs):
        return {"kind": kind, "message": message}
    message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if theirs and theirs[-1] != (file, line):
        message += f" (raised in {file}, line {line})"
    file, line = (theirs or trace)[-1]
    return {"kind": "source", "message": message, "file": file, "line": line}


def record_presets() -> dict[str, list[str]]:
    """Preset → the lines of its pictures' traces, as text; the times are left out."""
    runs = {}
    for preset in DEFAULTS["presets"]:
        sides = [preset["settings"] | its for its in ({}, preset.get("beside")) if its is not None]
        pages = [run(settings, {})["page"].partition('id="steps">\n')[2] for settings in sides]
        runs[preset["name"]] = [re.sub(r'"time":[^,}]+,?', "", text) for text in pages]
    return runs


if __name__ == "__main__":
    text = json.dumps(record_presets(), indent=0, ensure_ascii=False)
    Path(__file__).with_name("runs.json").write_text(text + "\n", encoding="utf-8")
