"""What a fork of the engine is tested with: a module of its own, that needs no test of the engine.

The oracle is transformers, with small random models. KV caches begin full of NaN. `serve` and `Run` check the
invariants after every step. In a `Run`, requests come and are aborted, the pool is too small for all of them,
and steps fail at any line. Each request must say what it says alone.

conftest.py beside this file makes its fixtures known. int8w/test_int8w.py is a short test that uses them.
"""

import gc
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import getfile, unwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

# The backend "auto" is "torch" here, also where the C++ kernels have been built.
os.environ["NANOPAGED_CACHE"] = str(Path(__file__).with_name("no kernels here"))
os.environ["NANOPAGED_BUILD"] = "0"

import transformers
from tokenizers import Tokenizer, decoders, models

import nanopaged
from nanopaged import LLM, BeamSearchParams, LLMEngine, RequestOutput, SamplingParams
from nanopaged.block_manager import blocks_needed
from nanopaged.kv_cache import KVCache
from nanopaged.outputs import CompletionOutput

Params = SamplingParams | BeamSearchParams

torch.set_num_threads(1)  # the models are so small that a second thread only waits

# ── models, and transformers as the oracle ────────────────────────────────────────────────────────

VOCAB_SIZE = 97
MAX_MODEL_LEN = 160
EOS = 7
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,  # wide, so that greedy choices are clear-cut
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, dict[str, Any]] = {  # the beginning of the names of transformers' classes → its own shape
    "Llama": {"head_dim": 20, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "Qwen2": {"num_attention_heads": 4, "tie_word_embeddings": False},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}


def make_model(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random model of a family, with changes of its config. Biases and norms are random, too."""
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(sum(map(ord, family.lower())))
    model = model_class(config_class(**SHAPE | FAMILIES.get(family, {}) | changes)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


class Oracle:
    """A model of transformers, and the folder of its checkpoint. A subclass may have other `logprobs`."""

    def __init__(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        model.save_pretrained(folder)

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], num_prompt_tokens: int = 0) -> torch.Tensor:
        """[len(token_ids), vocab_size]: row p holds the log-probabilities of the token at p + 1."""
        return self.model(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)

    def check(self, outputs: list[RequestOutput]) -> None:
        """Greedy tokens are the most likely ones here; log-probabilities, if wanted, are the same."""
        for output in outputs:
            prompt, (got,) = output.prompt_token_ids, output.outputs
            text = prompt + got.token_ids
            right = self.logprobs(text, len(prompt))
            assert got.token_ids == right[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert got.finish_reason == "length" or got.token_ids[-1] == EOS
            rows = [*(output.prompt_logprobs or [None] * len(prompt)), *(got.logprobs or [])]
            for position, row in enumerate(rows):
                assert row is None or text[position] in row
                for token_id, ours in (row or {}).items():
                    expected = right[position - 1, token_id].item()
                    assert ours.logprob == pytest.approx(expected, abs=1e-4)


@pytest.fixture(scope="session", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """One for each family."""
    return Oracle(make_model(request.param), tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """For tests that do not depend on the family."""
    return Oracle(make_model("Qwen3"), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(autouse=True)
def memory_that_was_never_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small KV caches begin full of NaN, or of bytes of -1; large ones would take long."""
    allocate = KVCache.__init__

    def fill(cache: KVCache, *args: Any, **options: Any) -> None:
        allocate(cache, *args, **options)
        for blocks in (cache.data, cache.host):
            if blocks.is_cpu and blocks.nbytes < 1 << 25:
                blocks.fill_(math.nan if blocks.is_floating_point() else -1)

    monkeypatch.setattr(KVCache, "__init__", fill)


# ── requests that come together ───────────────────────────────────────────────────────────────────

GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0)
# A pool that is too small for eight random prompts, which are computed in chunks.
SMALL = {"block_size": 4, "num_blocks": 24, "num_host_blocks": 99, "watermark": 0.0}
SMALL |= {"max_num_batched_tokens": 24}


def random_prompts(num: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB_SIZE), k=rng.randint(1, longest)) for _ in range(num)]


def tokens(first: int, num: int) -> list[int]:
    """A prompt that shares nothing with those of another `first`."""
    return [first] + [(first + i) % 90 for i in range(1, num)]


def serve(llm: LLM, prompts: list[Any], params: Params | list[Any]) -> list[RequestOutput]:
    """As `generate`, with the invariants checked after every step. At the end every block is free."""
    engine = llm.engine
    params = params if isinstance(params, list) else [params] * len(prompts)
    requests = []
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        requests.append(engine.prompts.make_request(str(i), prompt, its_params))
    for request in requests:
        engine.queue(request)
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_host_blocks == stats.num_host_blocks
    return [request.output() for request in requests]


def num_preempted(llm: LLM) -> int:
    """How many requests were preempted in the mode that the LLM was made with."""
    return getattr(llm.engine.stats(), f"num_preemptions_{llm.engine.config.preemption}")


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    """The tokens of all completions, in order."""
    return [completion.token_ids for output in outputs for completion in output.outputs]


def check_refused(make: Callable[..., object], table: Iterable[tuple[dict[str, Any], str]]) -> None:
    """Each row of the table has options for `make`, and what the error says of them."""
    for options, message in table:
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=message):
            make(**options)


# ── random workloads ──────────────────────────────────────────────────────────────────────────────

TEXTS = tuple(map(chr, range(33, 33 + 94)))  # of the tokens 0 to 93; the last three have parts of letters


@cache
def tokenizer(names: tuple[str, ...] = (*TEXTS, "Ã", "©", "ª")) -> transformers.PreTrainedTokenizerFast:
    """Makes text of tokens with these names, in the byte alphabet of GPT-2's tokenizer."""
    model = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    model.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


@dataclass(frozen=True)
class Vocabulary:
    """What requests to a model are drawn from.

    Fields:
        tokens, last_tokens: of prompts, and of the ends in which prompts that begin alike differ.
        letters: strings of which each token has one.
        stops, stop_token_ids, beam_ends: a request has one of these tuples.
    """

    tokens: Sequence[int] = range(8, VOCAB_SIZE)
    last_tokens: Sequence[int] = range(8, 11)
    letters: tuple[str, ...] = TEXTS
    stops: tuple[tuple[str, ...], ...] = ((), TEXTS[::9], TEXTS[1::9])
    stop_token_ids: tuple[Sequence[int], ...] = ((), (), range(20))
    beam_ends: tuple[Sequence[int], ...] = ((), range(20))


@dataclass
class Asked:
    """A request, and the steps in which it comes and goes."""

    prompt: list[int]
    params: Params
    arrival: int
    aborted_after: int | None = None
    salt: str | None = None

    def most_blocks(self, block_size: int) -> int:
        """The most blocks that it can need: full blocks of the prompt are shared, other blocks are not."""
        shared = len(self.prompt) // block_size if self.params.width > 1 else 0
        longest = blocks_needed(len(self.prompt) + self.params.max_tokens - 1, block_size)
        return shared + self.params.width * (longest - shared)


@dataclass
class Workload:
    """What one run consists of, a function of its seed.

    Fields:
        options: of the engine.
        is_shuffled: each request has another rank whenever it begins to wait.
        mixes_preemption: some requests are swapped and some recomputed.
        faults: (step, stage, number of a line): an error is raised there, see `FailAtLine`.
    """

    seed: int
    options: dict[str, Any]
    requests: list[Asked]
    is_shuffled: bool = False
    mixes_preemption: bool = False
    faults: list[tuple[int, str, int]] = field(default_factory=list)

    def with_pool(self, block_size: int, spare_blocks: int | None = None, **options: Any) -> "Workload":
        """The same requests in a pool for the largest of them, or a little more, of other blocks."""
        spare_blocks = self.seed % 3 if spare_blocks is None else spare_blocks
        longest = max(len(asked.prompt) + asked.params.max_tokens for asked in self.requests)
        pool = {
            "block_size": block_size,
            "num_blocks": max(asked.most_blocks(block_size) for asked in self.requests) + spare_blocks,
            "max_model_len": longest,
        }
        changed = self.options | pool | options
        if not changed["enable_chunked_prefill"]:
            changed["max_num_batched_tokens"] = max(longest, changed["max_num_batched_tokens"])
        return replace(self, options=changed)


STAGE_LINES = {"schedule": 60, "execute": 150, "update": 60, "queue": 4, "abort_request": 15}
"""Functions of the engine, its scheduler or its runner → lines that they execute in a step, roughly."""


def draw_workload(seed: int, vocabulary: Vocabulary = Vocabulary()) -> Workload:  # noqa: B008
    """Requests of all kinds that often begin alike, in a pool that is just enough for the largest.

    In one of three workloads, all requests have one output. In the others there are families of sequences,
    and outputs that end together, at any token.
    """
    rng = random.Random(seed)
    kinds = (["greedy", "sampled"], ["several", "beams", "sampled"], ["ends", "several"])[seed % 3]
    stems = [rng.choices(vocabulary.tokens, k=rng.randint(4, 16)) for _ in range(2)]
    requests = []
    for _ in range(rng.randint(5, 9)):
        prompt = rng.choice(stems)[: rng.randint(1, 16)]
        prompt = prompt + rng.choices(vocabulary.last_tokens, k=rng.randint(0, 5))
        asked = Asked(prompt, draw_params(rng, rng.choice(kinds), vocabulary), rng.randint(0, 6))
        asked.aborted_after = rng.choice([None, None, rng.randint(0, 25)])
        requests.append(asked)
        if rng.random() < 0.2:  # a twin, sometimes with a salt
            requests.append(replace(asked, aborted_after=None, salt=rng.choice([None, "x", "y"])))
    options = {
        "num_host_blocks": rng.choice([200, 200, 40, 8, 3, 0]),
        "max_num_batched_tokens": rng.choice([rng.randint(2, 8), 40]),
        "enable_chunked_prefill": rng.random() < 0.6,
        "enable_prefix_caching": rng.random() < 0.7,
        "preemption": rng.choice(["swap", "swap", "recompute"]),
        "watermark": rng.choice([0.0, 0.0, 0.3]),
        "max_num_seqs": rng.randint(6, 20),
    }
    workload = Workload(
        seed,
        options,
        requests,
        is_shuffled=rng.random() < 0.3,
        mixes_preemption=options["preemption"] == "swap",
        faults=draw_faults(rng, num_steps=15),
    )
    return workload.with_pool(block_size=rng.choice([1, 2, 2, 3, 4, 5, 8]))


def crowded(seed: int) -> Workload:
    """The same, in a pool so small and with ranks so changeable that many requests are swapped."""
    workload = draw_workload(seed)
    workload.is_shuffled = True
    options = {"num_host_blocks": 300, "preemption": "swap", "watermark": 0.0}
    return workload.with_pool(min(workload.options["block_size"], 3), spare_blocks=0, **options)


def draw_faults(rng: random.Random, num_steps: int) -> list[tuple[int, str, int]]:
    """Up to three. The stage is drawn first, so that short stages fail as often as long ones."""
    faults = []
    for _ in range(rng.randint(0, 3)):
        stage = rng.choice(list(STAGE_LINES))
        faults.append((rng.randint(0, num_steps), stage, 1 + int(rng.expovariate(1 / STAGE_LINES[stage]))))
    return sorted(faults)


def draw_params(rng: random.Random, kind: str, vocabulary: Vocabulary) -> Params:
    """Params that mostly go on until `max_tokens`; of the kind "ends", each token may be the last one."""
    max_tokens = rng.choice([20, rng.randint(1, 20)])
    rules = {"max_tokens": max_tokens, "min_tokens": rng.choice([0, max_tokens // 2])}
    rules["ignore_eos"] = rng.random() < 0.9
    if kind == "beams":
        return BeamSearchParams(
            beam_width=rng.randint(2, 3),
            length_penalty=rng.choice([0.0, 1.0]),
            early_stopping=rng.choice([True, False, "never"]),
            stop_token_ids=rng.choice(vocabulary.beam_ends),
            **rules,
        )
    return SamplingParams(
        n=1 if kind in ("greedy", "sampled") else rng.randint(2, 3),
        temperature=float(kind != "greedy"),
        seed=rng.randint(0, 2),
        stop=vocabulary.letters if kind == "ends" else rng.choice(vocabulary.stops),
        stop_token_ids=rng.choice(vocabulary.stop_token_ids),
        top_k=rng.choice([0, 0, 5]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        presence_penalty=rng.choice([0, 0, 1]),
        logprobs=2 if kind == "greedy" else rng.choice([None, 0]),
        prompt_logprobs=rng.choice([None, None, None, 0]),  # such a prompt must not come from the cache
        **rules,
    )


PACKAGE = str(Path(nanopaged.__file__).parent)
# Not while a step that failed starts over, and not in `step`, which has the only copy of the outputs.
SPARED = {"changing", "start_over", "step"}


class FailAtLine:
    """A context manager that raises at the `number`-th line executed in its blocks, once.

    Args:
        functions: only lines count that these execute or call.
        fork: a class, in whose file lines count, as in the package.
    """

    def __init__(
        self, number: int, functions: Iterable[Callable], fork: type, error: type[BaseException]
    ) -> None:
        self.left, self.codes = number, {unwrap(function).__code__ for function in functions}
        self.files = (PACKAGE, getfile(fork))
        self.error = error
        self.raised: BaseException | None = None

    def __enter__(self) -> None:
        if self.raised is None:
            sys.settrace(self._at_call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _at_call(self, frame: FrameType, event: str, _: Any) -> Any:
        """Python calls it at each call of a function; what it returns is called at each of its lines."""
        code = frame.f_code
        if self.raised is not None or not code.co_filename.startswith(self.files) or code.co_name in SPARED:
            return None
        caller: FrameType | None = frame
        while caller is not None and caller.f_code not in self.codes:
            caller = caller.f_back
        return self._at_line if caller is not None else None

    def _at_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.left -= 1
        if self.left == 0 and self.raised is None:
            sys.settrace(None)
            self.raised = self.error(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            raise self.raised
        return self._at_line


class Run:
    """An engine of a fork that serves one workload. A subclass names the engine, and may count more events.

    Attributes:
        engine_class, options: of the fork's engine, beside those of the workload.
        alone_class, alone_options: of the engine that says what each request says alone; if not given, it is
            a plain one with a large pool.
        tolerance: of log-probabilities.
        errors: one of them is raised by a fault.
        happened: counts of events.
    """

    engine_class: type[LLMEngine] = LLMEngine
    alone_class: type[LLMEngine] = LLMEngine
    options: dict[str, Any] = {}
    alone_options: dict[str, Any] = {}
    tolerance = 1e-4
    errors: tuple[type[BaseException], ...] = (RuntimeError,)

    def __init__(self, folder: Path, workload: Workload) -> None:
        self.folder, self.workload, self.rng = folder, workload, random.Random(workload.seed)
        self.happened: Counter[str] = Counter()
        self.engine: Any = self.make_engine(self.engine_class, workload.options | self.options)
        if workload.is_shuffled:
            self.engine.scheduler.rank = lambda request: self.rng.random()
        self.start_over = self.engine.scheduler.start_over
        self.engine.scheduler.start_over = self.lose_kv_and_start_over
        self.alone = [self.say_alone(asked) for asked in workload.requests]
        self.outputs: dict[int, RequestOutput | None] = {}  # None: a fault in `abort_request` lost it
        self.num_steps, self.faults = 0, list(workload.faults)
        self.arm()

    def make_engine(self, kind: type[LLMEngine], options: dict[str, Any]) -> LLMEngine:
        gc.collect()  # the engine of the last run, with which `Run` makes a circle
        engine = kind(kind.make_config(**{"model": self.folder, "dtype": "float32"} | options))
        engine.prompts.tokenizer = engine.prompts.tokenizer or tokenizer()
        return engine

    def say_alone(self, asked: Asked) -> RequestOutput:
        """What a request says in a large pool, without a prefix cache and other requests."""
        large = {"block_size": MAX_MODEL_LEN, "num_blocks": 16, "enable_prefix_caching": False}
        options = large | {"num_host_blocks": 0, "attention_backend": "torch"} | self.alone_options
        key = (self.alone_class, self.folder, *sorted(options.items()))
        if key not in ALONE:
            ALONE[key] = self.make_engine(self.alone_class, options)
        ALONE[key].add_request("alone", asked.prompt, asked.params)
        outputs: list[RequestOutput] = []
        while ALONE[key].has_unfinished_requests():
            outputs = ALONE[key].step()
        return outputs[0]

    def prompt_of(self, asked: Asked) -> dict[str, Any]:
        """What the fork's engine is given."""
        return {"prompt_token_ids": asked.prompt, "cache_salt": asked.salt}

    def lose_kv_and_start_over(self, requests: Iterable[Any]) -> None:
        """No block is read after a failed step that was written before it."""
        self.lose_kv()
        self.start_over(requests)

    def lose_kv(self) -> None:
        cache = self.engine.runner.kv_cache
        for blocks in (cache.data, cache.host):
            blocks.fill_(math.nan if blocks.is_floating_point() else -1)

    def serve(self) -> None:
        """Serve all requests, and check that all was given back."""
        last = max(asked.arrival + (asked.aborted_after or 0) for asked in self.workload.requests)
        while self.num_steps <= last or self.engine.has_unfinished_requests():
            for i, asked in enumerate(self.workload.requests):
                if asked.arrival == self.num_steps:
                    self.add(i, asked)
                if asked.aborted_after == self.num_steps - asked.arrival:
                    self.abort(i)
            self.step()
            self.num_steps += 1
            assert self.num_steps < 3000, "the engine makes no progress"
        assert self.outputs.keys() == set(range(len(self.alone))), "a request was not reported"
        stats = self.engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert stats.num_running == stats.num_waiting == stats.num_swapped == 0
        assert self.engine.config.enable_prefix_caching or stats.prefix_cache_hits == 0
        self.happened["recompute"] += stats.num_preemptions_recompute
        self.happened["swap"] += stats.num_preemptions_swap
        self.happened["cache hit"] += stats.prefix_cache_hits
        self.happened["copy on write"] += stats.num_blocks_copied

    def add(self, i: int, asked: Asked) -> None:
        while str(i) not in self.engine.requests:  # a fault may come before or after it is queued
            self.attempt(lambda: self.engine.add_request(str(i), self.prompt_of(asked), asked.params))

    def abort(self, i: int) -> None:
        request = self.engine.requests.get(str(i))
        if request is None:
            return
        has_ended = request.finished
        state = ""
        output = None
        while str(i) in self.engine.requests:  # a fault may come before or after it is aborted
            state = "waiting" if request in self.engine.scheduler.waiting else "running"
            state = "swapped" if request.is_swapped else "ended" if request.finished else state
            output = self.attempt(lambda: self.engine.abort_request(str(i)))
        self.happened["abort"] += 1
        self.happened[f"abort while {state}"] += 1
        self.report(i, output)
        if output is not None:
            assert has_ended != any(got.finish_reason == "abort" for got in output.outputs)

    def step(self) -> None:
        if self.workload.mixes_preemption:
            self.engine.scheduler.preemption = self.rng.choice(["swap", "swap", "recompute"])
        sampled = [request for request in self.engine.requests.values() if not request.is_beam_search]
        before = {seq: list(seq.token_ids) for request in sampled for seq in request.sequences}
        outputs = self.attempt(self.engine.step)
        if outputs is None:
            for seq, token_ids in before.items():
                assert seq.token_ids[: len(token_ids)] == token_ids, "a failed step took tokens away"
            left = sorted(self.engine.requests.values(), key=lambda request: not request.finished)
            if left and (left[0].finished or self.rng.random() < 0.3):
                self.abort(int(left[0].request_id))
        for output in outputs or []:
            if output.finished:
                self.report(int(output.request_id), output)
            else:
                self.check_output(output)

    def report(self, i: int, output: RequestOutput | None) -> None:
        assert i not in self.outputs, "reported twice"
        self.outputs[i] = output
        if output is not None:
            assert output.finished
            self.check_output(output)

    def attempt(self, operation: Callable[[], Any]) -> Any:
        """The result, or None if a fault was thrown. Either way everything is consistent afterwards."""
        thrower, result = self.thrower, None
        is_armed = bool(self.faults) and self.faults[0][0] <= self.num_steps
        try:
            with thrower if is_armed else nullcontext():
                result = operation()
        except self.errors as error:
            if error is not thrower.raised:
                raise
        if thrower.raised is not None:
            self.happened[f"fault: {self.faults.pop(0)[1]}"] += 1
            self.happened[f"fault: {thrower.error.__name__}"] += 1
            self.arm()
        self.engine.check_invariants()
        self.check()
        return result

    def arm(self) -> None:
        """Prepare the first of the faults that are left."""
        _, stage, line = self.faults[0] if self.faults else (0, "queue", 0)
        owners = (self.engine, self.engine.scheduler, self.engine.runner)
        functions = [getattr(type(owner), stage) for owner in owners if hasattr(type(owner), stage)]
        self.thrower = FailAtLine(line, functions, type(self.engine), self.rng.choice(self.errors))

    def check(self) -> None:
        """What holds after each operation, beside the invariants."""
        running = self.engine.scheduler.running
        assert sum(request.num_seqs for request in running) <= self.workload.options["max_num_seqs"]

    def check_output(self, output: RequestOutput) -> None:
        """Each text is what it is alone, or a beginning of it; beams that are not finished may change."""
        i = int(output.request_id)
        alone, params = self.alone[i], self.workload.requests[i].params
        is_whole = output.finished and all(got.finish_reason != "abort" for got in output.outputs)
        if is_whole:
            assert len(output.outputs) == len(alone.outputs)
            assert len(output.prompt_logprobs or []) == len(alone.prompt_logprobs or [])
            self.happened["finished"] += 1
            self.happened["prompt scored"] += output.prompt_logprobs is not None
        self.check_logprobs(output.prompt_logprobs, alone.prompt_logprobs)
        if is_whole or not isinstance(params, BeamSearchParams):
            for got in output.outputs:
                self.check_completion(got, alone.outputs[got.index])

    def check_completion(self, got: CompletionOutput, whole: CompletionOutput) -> None:
        num_tokens = len(got.token_ids)
        assert got.token_ids == whole.token_ids[:num_tokens]
        if got.logprobs is not None:
            assert len(got.logprobs) == num_tokens, "one for each token"
        self.check_logprobs(got.logprobs, whole.logprobs)
        if got.finish_reason is None:
            assert whole.text.startswith(got.text)
        elif got.finish_reason == "abort":
            assert got.text == self.engine.prompts.tokenizer.decode(got.token_ids)
        else:
            assert (got.text, got.finish_reason) == (whole.text, whole.finish_reason)
            assert (got.token_ids, got.stop_reason) == (whole.token_ids, whole.stop_reason)
            assert got.score == pytest.approx(whole.score, abs=self.tolerance)
            assert got.cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=10 * self.tolerance)
            self.happened[f"ended by {type(got.stop_reason).__name__}"] += got.finish_reason == "stop"

    def check_logprobs(self, ours: list[Any] | None, theirs: list[Any] | None) -> None:
        """Equal tokens, and equal log-probabilities; `ours` may be shorter."""
        for row, right in zip(ours or [], theirs or [], strict=False):
            row, right = row or {}, right or {}  # the first token of a prompt has none
            assert row.keys() == right.keys()
            for token_id, logprob in row.items():
                assert math.isclose(logprob, right[token_id], abs_tol=self.tolerance)


ALONE: dict[tuple[Any, ...], LLMEngine] = {}  # engines of `Run.say_alone`, by class, model and options


def random_runs(
    run_class: Callable[[Path, Workload], Run],
    folder: Path,
    num: int,
    events: Iterable[str] = (),
    draw: Callable[[int], Workload] = draw_workload,
    first: int = 0,
) -> Counter[str]:
    """Serve `num` random workloads from the seed `first` on, and more until all the events have happened.

    Returns counts of what has happened: "swap", "recompute", "cache hit", "copy on write", "finished",
    "abort", "abort while swapped" (or waiting, running, ended), "ended by str" (or int, NoneType), "fault:
    schedule" (and other stages), and the run's own.
    """
    happened: Counter[str] = Counter()
    for seed in range(first, first + 10 * num):
        if seed >= first + num and all(happened[event] for event in events):
            break
        run = run_class(folder, draw(seed))
        try:
            run.serve()
        except Exception as error:
            raise AssertionError(f"{draw.__name__}({seed}): {error}") from error
        happened += run.happened
        happened["workload"] += 1
    ALONE.clear()
    missing = [event for event in events if not happened[event]]
    assert not missing, f"the workloads do not cover {missing}: {happened}"
    return happened
