"""Structured output. The oracles: a validator for each text, transformers with a mask, a request alone."""

import json
import random
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from typing import Any

import grammar
import harness
import jsonschema
import pytest
import regex
import torch
from grammar import LLM, NO_SPACES, GrammarEngine, GrammarParams
from harness import SMALL, Oracle, Run, Workload, check_refused, serve
from llguidance import LLMatcher
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.outputs import CompletionOutput

EOS = frozenset({0, 2})  # of the tiny model; token 1 is special, too
TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)
VOCABULARY = grammar.read_vocabulary(TOKENIZER, len(TOKENIZER), EOS)
GREEDY = GrammarParams(temperature=0, max_tokens=40, logprobs=0)
HOT = GrammarParams(temperature=5.0, max_tokens=300)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPTS = [TOKENIZER.encode(text) for text in ("KING HENRY:\n", "Before we proceed, hear me", "ROMEO:\n")]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=1000)


GRAMMARS: list[dict[str, Any]] = [
    {"json_schema": {"type": "integer", "minimum": -7, "maximum": 300}},
    {"json_schema": {"enum": ["a", "ab", 'say "é"', 1, 12, None, "日本\n"]}},
    {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3}},
    {"json_schema": PERSON | {"required": ["age"]}},
    {"regex": "((é|[ab])*|the){1,3}"},
    {"regex": "(日|x y)+[0-9]{2}"},
    {"regex": "[a-z ]*?([0-9]{0,2}b)?"},
]


def fresh_matcher(params: GrammarParams, output: list[int]) -> LLMatcher:
    """The library alone, after the output."""
    if params.regex is not None:
        matcher = LLMatcher(VOCABULARY, LLMatcher.grammar_from_regex(params.regex), log_level=0)
    else:
        text = LLMatcher.grammar_from_json_schema(params.json_schema, defaults=NO_SPACES)
        matcher = LLMatcher(VOCABULARY, text, log_level=0)
    assert matcher.consume_tokens(output)
    return matcher


def check_text(params: Any, got: CompletionOutput) -> None:
    """A complete text fits its grammar, a text that was cut its regex. The validators know no tokens."""
    ended = got.finish_reason == "stop" and got.stop_reason is None
    if params.regex is not None:
        text = got.text.rstrip("\ufffd")
        assert regex.fullmatch(params.regex, text, partial=not ended), (params.regex, got)
    elif params.json_schema is not None and ended:
        jsonschema.validate(json.loads(got.text), json.loads(params.json_schema))


def test_samples_follow_their_grammars(llm: LLM) -> None:
    """At a temperature at which the model says anything, with several grammars in a batch."""
    ends = Counter[int]()
    params = [replace(HOT, seed=i, n=1 + i % 3, **GRAMMARS[i % 7]) for i in range(28)]
    outputs = serve(llm, [PROMPTS[i % 3] for i in range(28)], params)
    for asked, output in zip(params, outputs, strict=True):
        for got in output.outputs:
            check_text(asked, got)
            ends[min(got.token_ids[-1], 3)] += got.finish_reason == "stop"
    assert ends[3] > 20  # by themselves
    assert ends[0] * ends[2] > 0  # by both end-of-sequence tokens


@cache
def reference() -> torch.nn.Module:
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, **options).eval()


@torch.inference_mode()
def greedy(prompt: list[int], params: GrammarParams) -> tuple[list[int], list[float], str]:
    """In each step the logits of the whole text, and a matcher that reads it from the start."""
    output, logprobs = list[int](), list[float]()
    while len(output) < params.max_tokens:
        logits = reference()(torch.tensor([prompt + output])).logits[0, -1].log_softmax(-1)
        allowed = torch.ones(len(logits), dtype=torch.bool)
        if params.regex is not None or params.json_schema is not None:
            allowed = torch.tensor(list(fresh_matcher(params, output).compute_logit_bias())) > 0
            if output and not set(allowed.nonzero().flatten().tolist()) - EOS:  # nothing can follow
                return output, logprobs, "stop"
        output.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        logprobs.append(float(logits[output[-1]]))
        if output[-1] in EOS:
            return output, logprobs, "stop"
    return output, logprobs, "length"


ASKED = [
    replace(GREEDY, json_schema=PERSON),
    replace(GREEDY, regex="[a-z]+(, [a-z]+){3}\\."),
    replace(GREEDY, regex="(yes|no|perhaps)"),
    replace(GREEDY, regex="[A-Z][a-z ]*"),
    GREEDY,
    replace(GREEDY, json_schema={"type": "array", "items": {"enum": ["a", "ab", 12]}, "minItems": 2}),
]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_greedy_is_what_transformers_says_with_a_mask(preemption: str) -> None:
    """Token for token, in chunks, in a pool in which requests are preempted."""
    llm, prompts = LLM(dtype="float32", preemption=preemption, **SMALL), (PROMPTS * 2)[: len(ASKED)]
    reasons = set()
    for params, output in zip(ASKED, serve(llm, prompts, ASKED), strict=True):
        (got,) = output.outputs
        token_ids, logprobs, reason = greedy(output.prompt_token_ids, params)
        assert (got.token_ids, got.finish_reason) == (token_ids, reason)
        scored = [row[token_id].logprob for row, token_id in zip(got.logprobs, token_ids, strict=True)]
        assert scored == pytest.approx(logprobs, abs=1e-4)
        reasons.add(reason)
    assert harness.num_preempted(llm) > 0
    assert reasons == {"stop", "length"}


def with_grammars(seed: int) -> Workload:
    """A random workload in which most samples follow a grammar."""
    workload, rng = harness.draw_workload(seed), random.Random(seed)
    for asked in workload.requests:
        if isinstance(asked.params, SamplingParams) and rng.random() < 0.8:
            options = {field.name: getattr(asked.params, field.name) for field in fields(asked.params)}
            text = rng.choice(["[a-z ]*", "([A-Z][a-z]+[, ])+", "[0-9]{1,9}", "(yes|no|perhaps)"])
            asked.params = GrammarParams(**options | {"regex": text, "stop_token_ids": ()})
    return workload


class GrammarRun(Run):
    engine_class = alone_class = GrammarEngine


def test_random_workloads() -> None:
    """With aborts, faults and preemption, each request says what it says alone."""
    events = ["swap", "recompute", "cache hit", "copy on write", "abort", "fault: update"]
    harness.random_runs(GrammarRun, TINY_MODEL, 9, events, with_grammars)


def say(llm: LLM, **options: Any) -> CompletionOutput:
    return serve(llm, PROMPTS[:1], replace(HOT, **{"max_tokens": 40} | options))[0].outputs[0]


def test_what_ends_a_text(llm: LLM) -> None:
    """Its own end, `min_tokens` and `ignore_eos` as long as more can follow, stop strings and stop tokens."""
    (seven,) = TOKENIZER.encode("7")
    for seed in range(6):
        said = say(llm, regex="yes|no", max_tokens=8, seed=seed)
        assert (said.text in ("yes", "no"), said.finish_reason, said.stop_reason) == (True, "stop", None)
        assert not EOS & set(said.token_ids)
        assert len(say(llm, regex="[0-9]*", min_tokens=6, seed=seed).token_ids) > 6
        said = say(llm, regex="[0-9]{2}", min_tokens=6, seed=seed)  # the grammar has the last word
        assert (len(said.text), said.finish_reason) == (2, "stop")
        said = say(llm, regex="[0-9]*", ignore_eos=True, seed=seed)
        assert (len(said.token_ids), said.finish_reason) == (40, "length")
        said = say(llm, regex="(ab)*", ignore_eos=True, stop_token_ids=[2], seed=seed)
        assert (said.finish_reason, said.stop_reason, 0 in said.token_ids) == ("stop", 2, False)
        for stop, reason in (({"stop": "7"}, "7"), ({"stop_token_ids": [seven]}, seven)):
            said = say(llm, regex="[78]{30}", seed=seed, **stop)
            assert (said.finish_reason, said.stop_reason) == ("stop", reason)
            assert regex.fullmatch("8*", said.text)
    exactly = say(llm, regex="[ab]c", max_tokens=2)  # complete with its last token
    assert (len(exactly.token_ids), exactly.finish_reason) == (2, "stop")


BAD = [
    ({"regex": "(a"}, r"regex '\(a' cannot be used: .*unclosed group"),
    ({"regex": ""}, "regex '' cannot be used: it allows no text"),
    ({"regex": r"[^\s\S]"}, "it allows no text"),
    ({"regex": "(a{1000}){1000}"}, "cannot be used: it is too large"),
    ({"json_schema": {"not": {}}}, "json_schema .* cannot be used: Unimplemented keys"),
    ({"json_schema": "{"}, r"json_schema '\{' cannot be used: EOF while parsing"),
]


def test_a_bad_grammar_is_refused(llm: LLM) -> None:
    for options, message in BAD:
        asked = {"request_id": "bad", "prompt": "x", "params": GrammarParams(**options)}
        check_refused(llm.engine.add_request, [(asked, f"(?s){message}")])
    assert not llm.engine.has_unfinished_requests()


def test_options_and_models(llm: LLM, qwen3: Oracle) -> None:
    assert GrammarParams(json_schema=PERSON) == GrammarParams(json_schema=json.dumps(PERSON))
    table = [
        ({"json_schema": {}, "regex": "a"}, "give json_schema or regex, not both"),
        ({"regex": {}}, "regex must be a str, got {}"),
    ]
    check_refused(GrammarParams, table)
    asked = {"request_id": "x", "prompt": [1, 2], "params": GrammarParams(regex="a")}
    no_tokenizer = [(asked, "regex needs a tokenizer, and this model has none")]
    check_refused(LLM(qwen3.folder, num_blocks=8).engine.add_request, no_tokenizer)
    assert len(serve(llm, PROMPTS[:1], BeamSearchParams(beam_width=2, max_tokens=5))[0].outputs) == 2
