"""Detokenising: whole characters, stop strings, end-of-sequence, streaming; with the tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count, pairwise

import fake_runner
import pytest
from fake_runner import FakeRunner
from faults import interrupt_at_line
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase

from nanopaged import LLM, EngineConfig, LLMEngine, SamplingParams
from nanopaged.sequence import Request, Sample
from nanopaged.text.detokenizer import Detokenizer
from nanopaged.text.stopping import StopRules
from nanopaged.views.outputs import completion_output


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=256)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> PreTrainedTokenizerBase:
    return llm.engine.tokenizer


def feed(tokenizer: PreTrainedTokenizerBase, token_ids: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    """What may be shown after each token; ends at a stop string."""
    detokenizer, shown = Detokenizer(tokenizer.backend_tokenizer, stop), []
    for n in range(1, len(token_ids) + 1):
        stopped = bool(stop) and detokenizer.find_stop(token_ids[:n]) is not None
        shown.append(detokenizer.visible(token_ids[:n], finished=stopped))
        if stopped:
            break
    return shown


@pytest.mark.parametrize("text", ["éàü", "漢字かな", "🙂🙃 and 👩‍👩‍👧‍👦", "mixed é漢🙂x"])
def test_no_broken_character_is_ever_shown(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """The tiny tokenizer knows bytes only, so each of these characters takes two to four tokens."""
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > len(text)
    shown = feed(tokenizer, token_ids)
    assert shown[-1] == text
    for earlier, later in zip(shown, shown[1:], strict=False):
        assert "\ufffd" not in earlier
        assert later.startswith(earlier)


# Characters of one to four bytes, in scripts that a vocabulary may have as words, parts or bytes only.
LETTERS = "ab .éßж한쀤툁漢字🙂👩\u200d\u0301"


def byte_level_tokenizer(rng: random.Random, data: bytes) -> tuple[Tokenizer, list[int]]:
    """A vocabulary of pieces of `data` at any byte, so that tokens end one character and begin the next.

    Returns it, and `data` in its tokens.
    """
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in kept}  # GPT-2's: other bytes are letters from 256 on
    letters |= {byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(kept)))}
    cuts = [0, *sorted(rng.sample(range(1, len(data)), rng.randint(0, len(data) - 1))), len(data)]
    pieces = ["".join(letters[byte] for byte in data[lo:hi]) for lo, hi in pairwise(cuts)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*letters.values(), *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, [vocab[piece] for piece in pieces]


def sentencepiece_tokenizer(rng: random.Random, data: bytes) -> tuple[Tokenizer, list[int]]:
    """Like Llama 2's (or Gemma's): what is not in the vocabulary is spelt in bytes, each a token.

    Returns it, and `data` in its tokens: at random as pieces or in bytes.
    """
    text = data.decode(errors="replace").replace(" ", "▁")
    letters = [letter for letter in sorted(set(text) - {"\ufffd"}) if rng.random() < 0.6]
    pairs = [a + b for a, b in pairwise(text) if {a, b} <= set(letters)]
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *letters, *pairs]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    strip = [decoders.Strip(" ", 1, 0)] if rng.random() < 0.5 else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    token_ids, i = [], 0
    while i < len(text):
        piece = next((p for p in (text[i : i + 2], text[i]) if p in vocab and rng.random() < 0.9), None)
        spelt = text[i].replace("▁", " ").replace("\ufffd", "é").encode()
        token_ids += [vocab[piece]] if piece else [1 + byte for byte in spelt]
        i += len(piece or text[i])
    return tokenizer, token_ids


def drawn_outputs(num: int) -> Iterator[tuple[random.Random, Tokenizer, list[int]]]:
    """Vocabularies, and outputs in their tokens: texts, a third of them with invalid bytes or cut short."""
    for seed in range(num):
        rng = random.Random(seed)
        data = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 30))).encode()
        if seed % 3 == 0:
            at = rng.randrange(len(data))
            data = data[:at] + bytes(rng.choices([0xFF, 0xE2, 0x9F], k=rng.randint(1, 5))) + data[at:]
        make = byte_level_tokenizer if rng.random() < 0.5 else sentencepiece_tokenizer
        tokenizer, token_ids = make(rng, data)
        if seed % 3 == 0:  # in any vocabulary: tokens that no text has in this order
            at = rng.randrange(len(token_ids) + 1)
            token_ids[at:at] = rng.choices(token_ids, k=rng.randint(0, 3))
            del token_ids[rng.randint(max(1, len(token_ids) - 3), len(token_ids)) :]
        if seed % 4 == 0:
            tokenizer.add_special_tokens(["<end>"])  # gives no text
            for _ in range(rng.randint(1, 12)):
                token_ids.insert(rng.randrange(len(token_ids) + 1), tokenizer.token_to_id("<end>"))
        yield rng, tokenizer, token_ids


def test_what_is_streamed_put_together_is_the_decode_of_all_tokens() -> None:
    """For any vocabulary. Past bug: a token that ended one character and began the next broke the text."""
    for _, tokenizer, token_ids in drawn_outputs(1500):
        detokenizer, shown = Detokenizer(tokenizer), ""
        for n in range(1, len(token_ids) + 1):
            now = detokenizer.visible(token_ids[:n], finished=False)
            assert now.startswith(shown), "what was shown is taken back"
            shown = now
        whole = tokenizer.decode(token_ids)
        assert detokenizer.visible(token_ids, finished=True) == whole
        assert whole.startswith(shown)
        assert Detokenizer(tokenizer).visible(token_ids, finished=True) == whole, "asked only at the end"


def test_only_what_may_still_change_is_held_back() -> None:
    """Half a character, or the byte tokens at the end."""
    for _, tokenizer, token_ids in drawn_outputs(1000):
        detokenizer = Detokenizer(tokenizer)
        for n in range(1, len(token_ids) + 1):
            shown, end = detokenizer.visible(token_ids[:n], finished=False), n
            while end > 0 and tokenizer.id_to_token(token_ids[end - 1]).startswith(("<0x", "<end>")):
                end -= 1
            settled = tokenizer.decode(token_ids[:end])
            assert shown in (settled, settled.removesuffix("\ufffd"))


def test_a_stop_string_cuts_the_decode_of_the_tokens_so_far() -> None:
    """As soon as it is there, for any vocabulary; the text before it is as without stop strings."""
    num_stopped = 0
    for rng, tokenizer, token_ids in drawn_outputs(1500):
        whole = tokenizer.decode(token_ids)
        begin = rng.randrange(max(1, len(whole)))
        stop = (whole[begin : begin + rng.randint(1, 4)] or "x", rng.choice(LETTERS))
        if "\ufffd" in stop[0]:
            continue
        detokenizer, shown = Detokenizer(tokenizer, stop), ""
        for n in range(1, len(token_ids) + 1):
            so_far, found = tokenizer.decode(token_ids[:n]), detokenizer.find_stop(token_ids[:n])
            assert (found is not None) == any(s in so_far for s in stop)
            now = detokenizer.visible(token_ids[:n], finished=found is not None)
            assert now.startswith(shown), "what was shown is taken back"
            shown = now
            if found is not None:
                assert shown == so_far[: min(so_far.find(s) for s in stop if s in so_far)]
                assert so_far.startswith(shown + found)
                num_stopped += 1
                break
        else:
            assert detokenizer.visible(token_ids, finished=True) == whole
    assert num_stopped > 500


def test_a_korean_text_in_tokens_of_a_real_vocabulary() -> None:
    """쀤툁 in Qwen's tokens: EC | 80 | A4 ED | 88 | 81. The third ends one character and begins the next."""
    names = ["ì", "Ģ", "¤í", "Ī", "ģ"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.decode([*range(5)]) == "쀤툁"
    shown = [Detokenizer(tokenizer).visible([*range(n)], finished=False) for n in range(1, 6)]
    assert shown == ["", "", "쀤", "쀤", "쀤툁"]
    for stop in ((), ("x",)):
        detokenizer = Detokenizer(tokenizer, stop)
        assert [detokenizer.visible([*range(n)], finished=False) for n in range(1, 6)] == shown
        assert detokenizer.visible([*range(5)], finished=True) == "쀤툁"


def test_no_token_is_decoded_again_and_again(tokenizer: PreTrainedTokenizerBase) -> None:
    """Past bug: in a run of tokens without text, each was decoded together with all before it."""

    class CountingTokenizer:
        num_decoded = 0
        get_added_tokens_decoder = tokenizer.backend_tokenizer.get_added_tokens_decoder
        token_to_id = tokenizer.backend_tokenizer.token_to_id

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            self.num_decoded += len(token_ids)
            return tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    for token_id in (tokenizer.all_special_ids[0], tokenizer.encode("é")[0], tokenizer.encode("a")[0]):
        counting = CountingTokenizer()
        detokenizer = Detokenizer(counting, ("zzz",))
        for n in range(1, 1001):
            detokenizer.find_stop([token_id] * n)
        assert counting.num_decoded < 100_000


def test_a_stop_string_split_over_tokens_ends_the_text_before_it(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = "To be, or not to be: that is the question."
    token_ids = tokenizer.encode(text)
    for begin in range(len(text) - 3):
        stop = text[begin : begin + 4]
        shown = feed(tokenizer, token_ids, (stop,))
        assert shown[-1] == text[: text.index(stop)]
        assert all(shown[-1].startswith(partial) for partial in shown), "what is shown is never taken back"


def test_the_first_of_several_stop_strings_wins(tokenizer: PreTrainedTokenizerBase) -> None:
    shown = feed(tokenizer, tokenizer.encode("one two three"), ("three", "two", "wo"))
    assert shown[-1] == "one "


def test_of_two_stop_strings_in_one_token_the_first_in_the_text_wins(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    (token_id,) = tokenizer.encode(" the")
    detokenizer = Detokenizer(tokenizer.backend_tokenizer, ("he", "th"))
    assert detokenizer.find_stop([token_id]) == "th"
    assert detokenizer.visible([token_id], finished=True) == " "


def test_an_unfinished_stop_string_is_held_back_and_then_released(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    detokenizer = Detokenizer(tokenizer.backend_tokenizer, ("abcd",))
    output = tokenizer.encode("xab")
    for n in range(1, len(output) + 1):
        detokenizer.find_stop(output[:n])
    assert detokenizer.visible(output, finished=False) == "x"
    assert detokenizer.visible(output, finished=True) == "xab"
    output += tokenizer.encode("x")
    assert detokenizer.visible(output, finished=False) == "xabx"


# ── through the engine ────────────────────────────────────────────────────────────────────────────

GREEDY = {"temperature": 0, "max_tokens": 40}


def test_stop_string(llm: LLM) -> None:
    """The text generated without a stop string shows where it must end with one."""
    (plain,) = llm.generate("ROMEO:\n", SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[10:14]
    (output,) = llm.generate("ROMEO:\n", SamplingParams(**GREEDY, ignore_eos=True, stop=stop), use_tqdm=False)
    completion = output.outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == plain.outputs[0].token_ids[: len(completion.token_ids)]
    assert stop in llm.engine.tokenizer.decode(completion.token_ids)


def test_stop_token(llm: LLM) -> None:
    """The stop token is in token_ids, not in the text."""
    (plain,) = llm.generate("ROMEO:\n", SamplingParams(**GREEDY, ignore_eos=True), use_tqdm=False)
    token_ids = plain.outputs[0].token_ids
    stop_id = token_ids[9]
    (output,) = llm.generate(
        "ROMEO:\n", SamplingParams(**GREEDY, ignore_eos=True, stop_token_ids=[stop_id]), use_tqdm=False
    )
    completion = output.outputs[0]
    first = token_ids.index(stop_id)
    assert completion.token_ids == token_ids[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)
    assert completion.text == llm.engine.tokenizer.decode(token_ids[:first])


def test_chat_ends_by_itself(llm: LLM) -> None:
    """<|im_end|> is the tokenizer's end-of-sequence; a special token never appears in the text."""
    messages = [{"role": "user", "content": "Good morrow, my lord."}]
    outputs = llm.chat([messages] * 8, SamplingParams(max_tokens=300, seed=1), use_tqdm=False)
    assert all("<|" not in output.outputs[0].text for output in outputs)
    ended = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert ended
    assert all(completion.token_ids[-1] in llm.engine.prompts.eos_token_ids for completion in ended)
    assert all(completion.stop_reason is None for completion in ended)


def test_min_tokens_holds_back_every_way_to_stop(llm: LLM) -> None:
    """Of 16 seeded answers some end by themselves; told to go on for ten tokens more, they do."""
    prompt = llm.chat_prompt([{"role": "user", "content": "Peace!"}])
    natural = [SamplingParams(seed=i, max_tokens=150) for i in range(16)]
    outputs = llm.generate([prompt] * 16, natural, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    ended = [(i, len(c.token_ids)) for i, c in enumerate(completions) if c.finish_reason == "stop"]
    assert ended
    longer = [SamplingParams(seed=i, max_tokens=n + 30, min_tokens=n + 10) for i, n in ended]
    for (_, n), output in zip(
        ended, llm.generate([prompt] * len(ended), longer, use_tqdm=False), strict=True
    ):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) >= n + 10
        assert not llm.engine.prompts.eos_token_ids & set(token_ids[: n + 9])


def test_stop_strings_are_not_looked_for_before_min_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    token_ids = tokenizer.encode("abab")
    params = SamplingParams(min_tokens=len(token_ids), max_tokens=50, stop="ab")
    request = Request("a", None, [1], params, StopRules.of(params, 1, frozenset(), max_model_len=100), seed=0)
    (seq,) = request.sequences
    seq.detokenizer = Detokenizer(tokenizer.backend_tokenizer, ("ab",))
    assert [seq.append(Sample(t, 0.0)) for t in token_ids] == [False] * (len(token_ids) - 1) + [True]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "ab")
    assert completion_output(seq).text == "ab", "the earlier one stays in the text"


def test_max_model_len_ends_a_sequence() -> None:
    llm = LLM(dtype="float32", max_model_len=20, num_blocks=8)
    (output,) = llm.generate([5] * 15, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert output.outputs[0].finish_reason == "length"


def test_stream_grows_to_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    (whole,) = llm.generate("JULIET:\n", params, use_tqdm=False)
    states = list(llm.stream("JULIET:\n", params))
    assert [len(state.outputs[0].token_ids) for state in states] == list(range(1, 31))
    assert [state.finished for state in states] == [False] * 29 + [True]
    assert states[-1].outputs[0].text == whole.outputs[0].text
    for earlier, later in zip(states, states[1:], strict=False):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)


def test_two_streams_interleave(llm: LLM) -> None:
    """Each step serves both; neither loses what the other's step produced."""
    params = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    alone = [list(llm.stream(p, params))[-1].outputs[0].text for p in ("ROMEO:\n", "JULIET:\n")]
    a, b = llm.stream("ROMEO:\n", params), llm.stream("JULIET:\n", params)
    for _ in range(4):
        next(a)
        next(b)
    ends = [list(b)[-1].outputs[0].text, list(a)[-1].outputs[0].text]
    assert ends == alone[::-1]


def test_leaving_a_stream_early_aborts_the_request(llm: LLM) -> None:
    for _ in llm.stream("ROMEO:\n", SamplingParams(max_tokens=30)):
        break
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0


def test_an_interrupt_at_any_line_leaves_the_texts_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a step in which several texts end: each of them is still reported once, and whole."""
    monkeypatch.setattr(fake_runner, "next_token", lambda token_ids, noise, _: 300 + len(token_ids) + noise)
    engine = LLMEngine(EngineConfig(), FakeRunner(16, 16))
    params = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    expected = [engine.tokenizer.decode(range(302 + i, 305 + i)) for i in range(2)]
    for line in count(1):
        engine.add_request("a", [5, 6], params)
        engine.add_request("b", [5, 6], params)
        texts, interrupted = {}, False
        for step in count():
            if not engine.has_unfinished_requests():
                break
            try:
                with interrupt_at_line(line if step == 2 else 10**9):
                    outputs = engine.step()
            except KeyboardInterrupt:
                interrupted, outputs = True, []
            texts |= {out.request_id: [c.text for c in out.outputs] for out in outputs if out.finished}
        assert texts == {"a": expected, "b": expected}, f"after an interrupt at line {line} of the step"
        if not interrupted:
            break
