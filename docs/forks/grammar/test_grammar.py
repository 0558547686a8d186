"""Structured output. The oracles: a validator for each text, transformers with a mask, a request alone."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
import regex
import torch
from conftest import Oracle
from faults import FailAtLine
from llguidance import LLMatcher
from random_workloads import Asked, Workload, forked, tiny
from serving import serve
from test_random_runs import Run
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanopaged import LLM, BeamSearchParams, RequestOutput, SamplingParams, prompts
from nanopaged.checks.failures import NoTokenAllowed
from nanopaged.model.checkpoint import TINY_MODEL
from nanopaged.text.grammar import OPTIONS, Grammar, compile_grammar, read_vocabulary
from nanopaged.text.outputs import CompletionOutput

EOS = frozenset({0, 2})  # of the tiny model; token 1 is special, too
TOKENIZER = AutoTokenizer.from_pretrained(TINY_MODEL)
VOCABULARY = read_vocabulary(TOKENIZER, len(TOKENIZER), EOS)
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # GPT-2's alphabet
TEXTS = TOKENIZER.convert_ids_to_tokens(list(range(len(TOKENIZER))))
BYTES = [b"", b"", b""] + [bytes(BYTE_OF[character] for character in text) for text in TEXTS[3:]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=0)
HOT = SamplingParams(temperature=5.0, max_tokens=300)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=1000)


def encode(*texts: str) -> list[list[int]]:
    return [TOKENIZER.encode(text) for text in texts]


PROMPTS = encode("KING HENRY:\n", "First Citizen:\nBefore we proceed any further, hear me", "ROMEO:\n")


def draw_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short."""
    kinds = ["integer", "enum", "boolean", "string"] + ["array", "object", "any"] * (depth > 0)
    kind, low = rng.choice(kinds), rng.randint(-50, 50)
    if kind == "integer":
        return {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 7, 300])}
    if kind == "enum":
        return {"enum": rng.sample(["a", "ab", 'say "é"', 1, 12, None, "日本\n"], k=rng.randint(1, 4))}
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 5)}
    if kind == "array":
        return {"type": "array", "items": draw_schema(rng, depth - 1), "maxItems": rng.randint(1, 3)}
    if kind == "object":
        properties = {name: draw_schema(rng, depth - 1) for name in rng.sample(["a", "b c", "é", "id"], k=2)}
        required = rng.sample(list(properties), k=rng.randint(0, 2))
        rules = {"properties": properties, "required": required, "additionalProperties": False}
        return {"type": "object", **rules}
    if kind == "any":
        return {"anyOf": [draw_schema(rng, depth - 1) for _ in range(2)]}
    return {"type": "boolean"}


def draw_regex(rng: random.Random, depth: int = 4) -> str:
    """A regex whose bytes are a regex of bytes, too."""
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(["a", "b", "(é)", "[ab]", "[0-9]", "the", "x y", "(日)", "[a-z ]"])
    if kind < 0.5:
        return draw_regex(rng, depth - 1) + draw_regex(rng, depth - 1)
    if kind < 0.7:
        return f"({draw_regex(rng, depth - 1)}|{draw_regex(rng, depth - 1)})"
    return f"({draw_regex(rng, depth - 1)})" + rng.choice(["*", "+", "?", "{0,2}", "{1,3}", "{2}", "*?"])


def draw_grammar(rng: random.Random) -> dict[str, Any]:
    """One of the two options of `SamplingParams`."""
    if rng.random() < 0.5:
        return {"json_schema": draw_schema(rng)}
    return {"regex": draw_regex(rng)}


def check_text(params: SamplingParams, completion: CompletionOutput) -> None:
    """A complete text is one of the grammar; another one is the beginning of one.

    The validators know nothing of tokens. Only a beginning of JSON is checked with the library, byte by byte.
    """
    text, ended = completion.text, completion.finish_reason == "stop" and completion.stop_reason is None
    if params.regex is not None:
        assert regex.fullmatch(params.regex, text.rstrip("\ufffd"), partial=not ended), (params.regex, text)
    elif ended:
        jsonschema.validate(json.loads(text), json.loads(params.json_schema))
    elif params.json_schema is not None:
        tokens = [token_id for token_id in completion.token_ids if token_id not in EOS]
        assert fresh_matcher(params).try_consume_tokens(tokens) == len(tokens)


def fresh_matcher(params: SamplingParams) -> LLMatcher:
    """The library alone."""
    name, text = params.grammar
    return LLMatcher(VOCABULARY, getattr(LLMatcher, f"grammar_from_{name}")(text, **OPTIONS[name]))


# ── every text is one of the grammar ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(6))
def test_random_samples_follow_random_grammars(llm: LLM, seed: int) -> None:
    """At a temperature at which the model says anything; several grammars and plain requests in a batch."""
    rng = random.Random(seed)
    params = [replace(HOT, seed=i, n=rng.randint(1, 3), **draw_grammar(rng)) for i in range(12)]
    params += [SamplingParams(seed=1, max_tokens=20), replace(HOT, seed=2, max_tokens=20)]
    outputs = serve(llm, [PROMPTS[i % 3] for i in range(len(params))], params)
    ended = 0
    for asked, output in zip(params, outputs, strict=True):
        for completion in output.outputs if asked.grammar is not None else []:
            check_text(asked, completion)
            ended += completion.finish_reason == "stop"
    assert ended > 15
    whole = [serve(llm, [PROMPTS[i % 3]], params[i])[0] for i in (12, 13)]
    for got, right in zip(outputs[12:], whole, strict=True):  # a mask is for its own row
        assert got.outputs[0].token_ids == right.outputs[0].token_ids
        assert got.outputs[0].cumulative_logprob == pytest.approx(
            right.outputs[0].cumulative_logprob, abs=1e-3
        )


def allowed_by_definition(pattern: str, output: bytes) -> tuple[set[int], bool]:
    """The tokens with which the text is still the beginning of a match, and whether a byte is forced."""
    bytes_pattern = regex.compile(pattern.encode())

    def begins(text: bytes) -> bool:
        return bytes_pattern.fullmatch(text, partial=True) is not None

    allowed = {token_id for token_id in range(3, len(BYTES)) if begins(output + BYTES[token_id])}
    may_end = bytes_pattern.fullmatch(output) is not None
    forced = not may_end and sum(begins(output + bytes([byte])) for byte in range(256)) == 1
    return allowed | (EOS if may_end else set()), forced


def test_the_mask_is_what_the_definition_allows() -> None:
    """By Python's regex on bytes, on random walks. Where a byte is forced, the tokenizer's token is left."""
    rng, seen = random.Random(0), Counter()
    for _ in range(40):
        pattern, output = draw_regex(rng), []
        grammar = Grammar(compile_grammar("regex", pattern, VOCABULARY), [])
        for _ in range(12):
            mask = grammar.follow(output).mask()
            got = {token_id for token_id, allowed in enumerate(mask) if allowed}
            right, forced = allowed_by_definition(pattern, b"".join(BYTES[token_id] for token_id in output))
            assert len(mask) == len(TOKENIZER)
            assert grammar.is_over == (right <= EOS)
            assert got == right or (forced and got and got < right), (pattern, output)
            seen += Counter(forced=forced, over=grammar.is_over, may_end=bool(right & EOS), free=got == right)
            if grammar.is_over:
                break
            output.append(rng.choice(sorted(got - EOS)))
    assert all(seen[state] > 10 for state in ("forced", "over", "may_end", "free")), seen


# ── greedy, against transformers ──────────────────────────────────────────────────────────────────


@cache
def reference() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        TINY_MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@torch.inference_mode()
def greedy(prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float], str]:
    """In each step the logits of the whole text, and a matcher that reads it from the start."""
    output: list[int] = []
    logprobs: list[float] = []
    while len(output) < params.max_tokens:
        logits = reference()(torch.tensor([prompt + output])).logits[0, -1].log_softmax(-1)
        allowed = torch.ones(len(logits), dtype=torch.bool)
        if params.grammar is not None:
            matcher = fresh_matcher(params)
            assert matcher.consume_tokens(output)
            allowed = torch.tensor([bias > 0 for bias in matcher.compute_logit_bias()])
        output.append(int(logits.masked_fill(~allowed, -torch.inf).argmax()))
        logprobs.append(float(logits[output[-1]]))
        if output[-1] in EOS or (params.grammar is not None and not set_of_texts(params, output)):
            return output, logprobs, "stop"
    return output, logprobs, "length"


def set_of_texts(params: SamplingParams, output: list[int]) -> list[int]:
    """The tokens that are not end-of-sequence and may follow."""
    matcher = fresh_matcher(params)
    assert matcher.consume_tokens(output)
    return [
        token_id for token_id, bias in enumerate(matcher.compute_logit_bias()) if bias and token_id not in EOS
    ]


ASKED = [
    replace(GREEDY, json_schema=PERSON),
    replace(GREEDY, regex="[a-z]+(, [a-z]+){3}\\."),
    replace(GREEDY, regex="(yes|no|perhaps)"),
    replace(GREEDY, regex="[A-Z][a-z ]*"),
    GREEDY,
    replace(GREEDY, json_schema={"type": "array", "items": {"enum": ["a", "ab", 12]}, "minItems": 2}),
]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("budget", [5, 2048])
def test_greedy_is_what_transformers_says_with_a_mask(preemption: str, budget: int) -> None:
    """Token for token, with and without grammars, in chunks, in a pool in which requests are preempted."""
    llm = LLM(
        dtype="float32", block_size=4, num_blocks=24, preemption=preemption, max_num_batched_tokens=budget
    )
    prompts = [PROMPTS[i % 3] for i in range(len(ASKED))]
    reasons = set()
    for prompt, params, output in zip(prompts, ASKED, serve(llm, prompts, ASKED), strict=True):
        (completion,) = output.outputs
        tokens, logprobs, reason = greedy(prompt, params)
        assert (completion.token_ids, completion.finish_reason) == (tokens, reason)
        scored = [row[token_id].logprob for row, token_id in zip(completion.logprobs, tokens, strict=True)]
        assert scored == pytest.approx(logprobs, abs=1e-4)
        check_text(params, completion)
        reasons.add(reason)
    stats = llm.engine.stats()
    assert (stats.num_preemptions_swap if preemption == "swap" else stats.num_preemptions_recompute) > 0
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_samples_that_are_preempted_say_what_they_say_alone(llm: LLM, preemption: str) -> None:
    """Three outputs of each request, seeded; a plain request among them."""
    params = [replace(HOT, n=3, seed=i, max_tokens=60, regex="[a-f ]{30,90}") for i in range(3)]
    params += [
        replace(HOT, seed=3, max_tokens=60),
        replace(HOT, n=2, seed=4, max_tokens=60, json_schema=PERSON),
    ]
    asked = [PROMPTS[i % 3] for i in range(len(params))]
    small = LLM(
        dtype="float32", block_size=4, num_blocks=70, preemption=preemption, max_num_batched_tokens=16
    )
    outputs = serve(small, asked, params)
    for prompt, its_params, output in zip(asked, params, outputs, strict=True):
        (alone,) = serve(llm, [prompt], its_params)
        assert [each.token_ids for each in output.outputs] == [each.token_ids for each in alone.outputs]
        for completion in output.outputs if its_params.grammar is not None else []:
            check_text(its_params, completion)
    stats = small.engine.stats()
    assert (stats.num_preemptions_swap if preemption == "swap" else stats.num_preemptions_recompute) > 1


# ── random workloads, with faults ─────────────────────────────────────────────────────────────────


class GrammarRun(Run):
    """Also checks each text against its grammar."""

    def check_completion(self, asked: Asked, got: CompletionOutput, whole: CompletionOutput) -> None:
        super().check_completion(asked, got, whole)
        if (
            isinstance(asked.params, SamplingParams)
            and asked.params.grammar is not None
            and got.finish_reason
        ):
            check_text(asked.params, got)
            self.happened["complete"] += got.finish_reason == "stop"
            self.happened["forked"] += asked.params.n > 1

    def is_close_call(self, asked: Asked, got: CompletionOutput, whole: CompletionOutput) -> bool:
        """A request that goes on after the last equal token begins there in its grammar, too."""
        same = [a == b for a, b in zip(got.token_ids, whole.token_ids, strict=False)]

        def advanced(*grammar: Any) -> LLMatcher:
            matcher = compile_grammar(*grammar).deep_copy()
            assert matcher.consume_tokens(whole.token_ids[: same.index(False)])
            return matcher

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prompts, "compile_grammar", advanced)
            return super().is_close_call(asked, got, whole)


def with_grammars(workload: Workload) -> Workload:
    """The same requests with the tiny model, in a pool as small as can be; most samples follow a grammar."""
    rng, requests = random.Random(workload.seed), []
    for asked in workload.requests:
        if isinstance(asked.params, SamplingParams) and rng.random() < 0.8:
            changes = draw_grammar(rng)
            if "regex" in changes:
                changes["regex"] += rng.choice(["", "[a-z]{9,40}"])  # long enough to be preempted
            if asked.params.stop_token_ids:  # one that must not be drawn yet may be all that is allowed
                changes["min_tokens"] = 0
            changes["temperature"] = asked.params.temperature * rng.choice([1, 3])
            asked = replace(asked, params=replace(asked.params, **changes))
        if isinstance(asked.params, SamplingParams):
            asked = replace(asked, params=replace(asked.params, seed=rng.randint(0, 2)))
        requests.append(replace(asked, prompt=[3 + token_id % 1021 for token_id in asked.prompt]))
    num_blocks = max(asked.most_blocks(workload.block_size) for asked in requests)
    return replace(workload, model="tiny", num_blocks=num_blocks, requests=requests)


def test_random_workloads() -> None:
    happened: Counter[str] = Counter()
    for seed in range(14):
        for make_workload in (tiny, forked):
            run = GrammarRun(with_grammars(make_workload(seed)))
            run.serve()
            happened += run.happened
    events = ("swap", "recompute", "copy on write", "complete", "forked", "fault: update", "fault: schedule")
    assert all(happened[event] for event in events), happened


@pytest.mark.parametrize("n", [1, 3])
def test_a_step_that_fails_while_a_grammar_follows_a_token(llm: LLM, n: int) -> None:
    """At each line of it, at each token: the matcher may have consumed a token that it has not counted."""
    params = replace(HOT, n=n, seed=3, regex="[a-f]{4}(, [0-9]{3}){2}")
    (right,) = serve(llm, PROMPTS[:1], params)
    num_failures = 0
    for line in range(1, 60):
        llm.engine.add_request("fails", PROMPTS[0], params)
        fault = FailAtLine(line, RuntimeError, (Grammar.follow,))
        outputs: list[RequestOutput] = []
        while llm.engine.has_unfinished_requests():
            try:
                with fault:
                    outputs = llm.engine.step()
            except RuntimeError:
                num_failures += fault.raised is not None
            llm.engine.check_invariants()
        for ours, theirs in zip(outputs[0].outputs, right.outputs, strict=True):
            assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert num_failures > 20


# ── other rules that end or bar a text ────────────────────────────────────────────────────────────


def say(llm: LLM, **options: Any) -> CompletionOutput:
    (output,) = serve(llm, PROMPTS[:1], replace(HOT, **{"max_tokens": 40} | options))
    return output.outputs[0]


def test_a_text_ends_when_nothing_can_follow(llm: LLM) -> None:
    """Without an end-of-sequence token: the last token belongs to the text."""
    said = say(llm, regex="yes|no", max_tokens=8)
    assert said.text in ("yes", "no")
    assert (said.finish_reason, said.stop_reason) == ("stop", None)
    assert not EOS & set(said.token_ids)
    exactly = say(llm, regex="[ab]c", max_tokens=2)  # complete with its last token
    assert (len(exactly.token_ids), exactly.finish_reason) == (2, "stop")


def test_end_of_sequence_is_drawn_where_the_text_may_end_and_nowhere_else(llm: LLM) -> None:
    ends = Counter()
    for seed in range(30):
        said = say(llm, regex="(ab)*c?", seed=seed)
        assert regex.fullmatch("(ab)*c?", said.text)
        assert not EOS & set(said.token_ids[:-1])
        ends[said.token_ids[-1]] += 1
    assert ends[0] > 0  # both of the model's
    assert ends[2] > 0


def test_min_tokens_bars_the_end_while_more_can_follow(llm: LLM) -> None:
    for seed in range(8):
        said = say(llm, regex="[0-9]*", min_tokens=6, seed=seed)
        assert len(said.token_ids) > 6
        assert regex.fullmatch("[0-9]*", said.text)
        said = say(llm, regex="[0-9]{2}", min_tokens=6, seed=seed)  # the grammar has the last word
        assert regex.fullmatch("[0-9]{2}", said.text)
        assert said.finish_reason == "stop"


def test_ignore_eos_goes_on_as_long_as_more_can_follow(llm: LLM) -> None:
    said = say(llm, regex="[0-9]*", ignore_eos=True)
    assert (len(said.token_ids), said.finish_reason) == (40, "length")
    assert regex.fullmatch("[0-9]*", said.text)
    assert say(llm, regex="[0-9]{3}", ignore_eos=True).finish_reason == "stop"


def test_an_ignored_end_of_sequence_token_can_be_a_stop_token(llm: LLM) -> None:
    for seed in range(8):
        said = say(llm, regex="(ab)*", ignore_eos=True, stop_token_ids=[2], seed=seed)
        assert (said.finish_reason, said.stop_reason, said.token_ids[-1]) == ("stop", 2, 2)
        assert 0 not in said.token_ids
        assert regex.fullmatch("(ab)*", said.text)


def test_stop_strings_and_stop_tokens_cut_a_text(llm: LLM) -> None:
    """As without a grammar. What is left is the beginning of a text."""
    said = say(llm, regex="[78]{30}", stop="7", seed=1)
    assert (said.finish_reason, said.stop_reason) == ("stop", "7")
    assert regex.fullmatch("8*", said.text)
    (seven,) = TOKENIZER.encode("7")
    said = say(llm, regex="[78]{30}", stop_token_ids=[seven], seed=1)
    assert (said.finish_reason, said.stop_reason) == ("stop", seven)
    assert regex.fullmatch("8*", said.text)


def test_max_tokens_may_leave_a_beginning(llm: LLM) -> None:
    said = say(llm, json_schema=PERSON, max_tokens=4)
    assert said.finish_reason == "length"
    assert said.text.startswith('{"name')


def test_logprobs_are_those_of_the_model_without_a_mask(llm: LLM) -> None:
    (token_id,) = TOKENIZER.encode("7")
    with_mask = say(llm, regex="7", logprobs=5)
    plain = say(llm, logprobs=1024, max_tokens=1)
    assert with_mask.token_ids == [token_id]
    assert with_mask.logprobs[0][token_id].logprob == pytest.approx(
        plain.logprobs[0][token_id].logprob, abs=1e-4
    )
    assert len(with_mask.logprobs[0]) == 6  # the five most likely ones, which the mask leaves out


def test_filters_and_penalties_choose_among_what_is_allowed(llm: LLM) -> None:
    """Top-k of 1 is the most likely allowed token, not the most likely one."""
    best = say(llm, temperature=0, regex="[0-9]{9}")
    assert say(llm, top_k=1, regex="[0-9]{9}").token_ids == best.token_ids
    assert say(llm, top_p=1e-6, regex="[0-9]{9}").token_ids == best.token_ids
    said = say(llm, temperature=0, presence_penalty=2.0, regex="[0-9]{9}")
    assert regex.fullmatch("[0-9]{9}", said.text)
    assert len(set(said.text)) > len(set(best.text))


# ── what is refused ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(a"}, r"regex '\(a' cannot be used: .*unclosed group"),
        ({"regex": "a(?=b)"}, "regex .* cannot be used: .*look-around"),
        ({"regex": ""}, "regex '' cannot be used: it allows no text"),
        ({"regex": r"[^\s\S]"}, "it allows no text"),
        ({"json_schema": {"type": "foo"}}, "json_schema .* cannot be used: Invalid type: foo"),
        ({"json_schema": {"not": {}}}, "json_schema .* cannot be used: Unimplemented keys"),
        ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"json_schema": "{"}, r"json_schema '\{' cannot be used: EOF while parsing"),
        ({"json_schema": "true"}, "json_schema 'true' cannot be used: Expecting object"),
    ],
)
def test_a_bad_grammar_is_refused_with_the_words_of_the_library(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}"):
        llm.engine.add_request("bad", "x", SamplingParams(**options))
    assert not llm.engine.has_unfinished_requests()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="give json_schema or regex, not both"):
        SamplingParams(json_schema={}, regex="a")
    with pytest.raises(TypeError, match="json_schema must be a str, got 5"):
        SamplingParams(json_schema=5)
    with pytest.raises(TypeError, match="regex must be a str, got {}"):
        SamplingParams(regex={})
    with pytest.raises(TypeError, match="BeamSearchParams has no option 'regex'"):
        BeamSearchParams(beam_width=2, regex="a")
    with pytest.raises(TypeError, match=r"SamplingParams\(json_schema=…\)"):
        SamplingParams(guided_decoding={})


def test_a_schema_is_a_dict_or_json_and_params_stay_hashable() -> None:
    params = SamplingParams(json_schema=PERSON)
    assert params == SamplingParams(json_schema=json.dumps(PERSON)) == replace(params)
    assert len({params, replace(params)}) == 1


def test_a_model_without_a_tokenizer_is_refused(qwen3: Oracle) -> None:
    with pytest.raises(ValueError, match="regex needs a tokenizer, and this model has none"):
        LLM(qwen3.folder, num_blocks=8).engine.add_request("x", [1, 2], SamplingParams(regex="a"))


def test_a_vocabulary_with_more_rows_than_the_tokenizer_has_tokens() -> None:
    """As with many checkpoints, whose number of logits is rounded up. Those rows are never drawn."""
    vocabulary = read_vocabulary(TOKENIZER, 1101, EOS)
    mask = Grammar(compile_grammar("regex", "(?s:.)*", vocabulary), []).mask()
    assert len(mask) == 1101
    assert any(mask[3:1024])
    assert not any(mask[1024:])


def test_if_the_library_gives_up_the_request_is_named(llm: LLM) -> None:
    """It has limits for the work of a step. Here it is given a token that it does not allow."""
    params = SamplingParams(regex="[0-9]{20}", max_tokens=30)
    for request_id in ("good", "bad"):
        llm.engine.add_request(request_id, PROMPTS[0], params)
    llm.engine.step()
    bad = llm.engine.requests["bad"].live[0].grammar
    assert not bad.matcher.consume_tokens(TOKENIZER.encode("x"))
    assert not bad.is_over
    with pytest.raises(NoTokenAllowed, match="no token is allowed for request 'bad'"):
        llm.engine.step()
    llm.engine.abort_request("bad")
    while llm.engine.has_unfinished_requests():
        (output,) = llm.engine.step()
    assert regex.fullmatch("[0-9]{20}", output.outputs[0].text)


def test_min_tokens_and_a_stop_token_that_is_all_that_is_allowed(llm: LLM) -> None:
    """A dead end of the caller's own making ends in an error that names the request."""
    (seven,) = TOKENIZER.encode("7")
    llm.engine.add_request("x", PROMPTS[0], SamplingParams(regex="7+", stop_token_ids=[seven], min_tokens=2))
    with pytest.raises(NoTokenAllowed, match="'x'"):
        llm.engine.step()
    llm.engine.abort_request("x")


def test_equal_grammars_are_compiled_once_and_share_no_state(llm: LLM) -> None:
    params = replace(HOT, json_schema=PERSON, n=2)
    before = compile_grammar.cache_info()
    outputs = serve(llm, PROMPTS, params)
    after = compile_grammar.cache_info()
    assert after.misses <= before.misses + 1
    assert after.hits >= before.hits + 2
    for output in outputs:
        for completion in output.outputs:
            check_text(params, completion)
