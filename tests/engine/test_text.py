"""Detokenising: whole characters, stop strings, end-of-sequence, streaming; with the tiny model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from copy import copy
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nanopaged import LLM, RequestOutput, SamplingParams
from nanopaged.outputs import CompletionOutput
from nanopaged.text import Detokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", num_blocks=256)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> PreTrainedTokenizerBase:
    return llm.engine.tokenizer


# Characters of one to four bytes, in scripts that a vocabulary may have as words, parts or bytes only.
LETTERS = "ab .éßж한쀤툁漢字🙂👩\u200d\u0301"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_tokenizer(rng: random.Random, data: bytes) -> tuple[Tokenizer, list[int]]:
    """A vocabulary of pieces of `data` at any byte, so that tokens end one character and begin the next.

    Returns it, and `data` in its tokens.
    """
    letters = bytes_to_unicode()  # GPT-2's
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
    vocab = {name: i for i, name in enumerate(dict.fromkeys(["<unk>", *BYTES, "▁", *letters, *pairs]))}
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
    """For any vocabulary. Past bug: a token that ended one character and began the next broke the text.

    Only what may still change is held back: half a character, or the byte tokens at the end.
    """
    for _, tokenizer, token_ids in drawn_outputs(1500):
        detokenizer, shown = Detokenizer(tokenizer), ""
        for n in range(1, len(token_ids) + 1):
            now, end = detokenizer.visible(token_ids[:n], finished=False), n
            assert now.startswith(shown), "what was shown is taken back"
            shown = now
            while end > 0 and tokenizer.id_to_token(token_ids[end - 1]).startswith(("<0x", "<end>")):
                end -= 1
            settled = tokenizer.decode(token_ids[:end])
            assert shown in (settled, settled.removesuffix("\ufffd"))
        whole = tokenizer.decode(token_ids)
        assert whole.startswith(shown)
        assert detokenizer.visible(token_ids, finished=True) == whole
        assert Detokenizer(tokenizer).visible(token_ids, finished=True) == whole, "asked only at the end"


def test_a_stop_string_cuts_the_decode_of_the_tokens_so_far() -> None:
    """As soon as it is there, for any vocabulary; the text before it is as without stop strings."""
    num_stopped = 0
    for rng, tokenizer, token_ids in drawn_outputs(1500):
        whole = tokenizer.decode(token_ids)
        begin = rng.randrange(max(1, len(whole)))
        stop = (whole[begin : begin + rng.randint(1, 4)] or "x", rng.choice(LETTERS))
        if "\ufffd" in stop[0]:
            continue
        detokenizer, shown, found = Detokenizer(tokenizer, stop), "", None
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
        assert found is not None or detokenizer.visible(token_ids, finished=True) == whole
    assert num_stopped > 500


def test_a_stop_string_in_byte_tokens_after_a_replacement_character() -> None:
    """Past bug: the character is a token of the vocabulary, but was taken for half of another one."""
    names = ["<unk>", *BYTES, "\ufffd"]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    token_ids = [257, *(1 + byte for byte in "😀END".encode())]
    detokenizer = Detokenizer(tokenizer, ["END"])
    found = [detokenizer.find_stop(token_ids[:n]) for n in range(1, len(token_ids) + 1)]
    assert found == [None] * (len(token_ids) - 1) + ["END"]
    assert detokenizer.visible(token_ids, finished=True) == "\ufffd😀"


def test_a_stop_string_before_the_last_token_does_not_count() -> None:
    """It came before `min_tokens`, when nothing was asked."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Fuse()
    detokenizer = Detokenizer(backend, ["ab"])
    assert [detokenizer.find_stop([0, 1, 0, 1][:n]) for n in (3, 4)] == [None, "ab"]
    assert detokenizer.visible([0, 1, 0, 1], finished=True) == "ab"


def test_copies_share_no_state() -> None:
    """As those of a prompt for several outputs, which go on differently after half a character."""
    backend = Tokenizer(models.BPE({letter: byte for byte, letter in bytes_to_unicode().items()}, []))
    backend.decoder = decoders.ByteLevel()
    first = Detokenizer(backend)
    assert first.visible(list("é".encode())[:1], finished=False) == ""
    second = copy(first)
    for detokenizer, letter in ((first, "é"), (second, "è")):
        assert detokenizer.visible(list(letter.encode()), finished=False) == letter


def test_as_much_is_held_back_as_may_become_a_stop_string() -> None:
    """Any text and any stop strings of two letters, which are full of half matches."""
    rng = random.Random(0)
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.decoder = decoders.Fuse()
    for _ in range(500):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 8))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choices("ab", k=rng.randint(1, 20)))
        detokenizer = Detokenizer(backend, stop)
        shown = detokenizer.visible(["ab".index(letter) for letter in text], finished=False)
        assert text.startswith(shown)
        assert len(text) - len(shown) <= max([len(s) - 1 for s in stop], default=0)
        for begin in range(len(shown)):
            assert not any(s.startswith(text[begin:]) and s != text[begin:] for s in stop)


# ── through the engine ────────────────────────────────────────────────────────────────────────────


def test_stop_strings_and_tokens(llm: LLM) -> None:
    """The output without them shows where it must end. A stop token is in token_ids, not in the text."""

    def greedy(**stop: object) -> CompletionOutput:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **stop)
        return llm.generate("ROMEO:\n", params, use_tqdm=False)[0].outputs[0]

    plain, decode = greedy(), llm.engine.tokenizer.decode
    text, token_ids = plain.text, plain.token_ids
    stop = text[10:14]
    ended = greedy(stop=stop)
    assert ended.text == text[: text.index(stop)]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert ended.token_ids == token_ids[: len(ended.token_ids)]
    assert stop in decode(ended.token_ids)
    stop_id, first = token_ids[9], token_ids.index(token_ids[9])
    ended = greedy(stop_token_ids=[stop_id])
    assert ended.token_ids == token_ids[: first + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", stop_id)
    assert ended.text == decode(token_ids[:first])


def test_two_streams_interleave(llm: LLM) -> None:
    """Each step serves both; neither loses what the other's step produced. One that is left is aborted."""
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True)
    prompts = ["ROMEO:\n", "JULIET:\n"]
    alone = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    states: list[list[RequestOutput]] = [[], []]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    for _ in range(4):
        for stream, seen in zip(streams, states, strict=True):
            seen.append(next(stream))
    for stream, seen, text in list(zip(streams, states, alone, strict=True))[::-1]:
        seen += stream
        assert seen[-1].outputs[0].text == text
        assert [state.finished for state in seen] == [False] * (len(seen) - 1) + [True]
        for earlier, later in pairwise(seen):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)
    assert [len(state.outputs[0].token_ids) for state in states[1]] == [1, 3, 5, 7, *range(8, 31)]
    for _ in llm.stream("ROMEO:\n", params):
        break
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0


def test_generate_serves_the_streams_that_are_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They get a token in each of its steps, and its progress bar does not count them."""
    bar = MagicMock(side_effect=lambda requests, **options: requests)
    monkeypatch.setattr("nanopaged.llm.tqdm", bar)
    long, short = [llm.stream("O", SamplingParams(max_tokens=n, ignore_eos=True)) for n in (30, 3)]
    assert [len(next(stream).outputs[0].token_ids) for stream in (long, short)] == [1, 1]
    llm.generate(["ROMEO:\n", "JULIET:\n"], SamplingParams(max_tokens=10, ignore_eos=True))
    assert len(bar.call_args.args[0]) == 2
    assert bar.call_args.kwargs["disable"] is None, "no bar where the error stream is no terminal"
    llm.generate("ROMEO:\n", SamplingParams(max_tokens=1), use_tqdm=False)
    assert bar.call_args.kwargs["disable"] is True
    assert len(next(long).outputs[0].token_ids) == 2 + 10 + 1 + 1
    (last,) = short
    assert (last.finished, len(last.outputs[0].token_ids)) == (True, 3)
    long.close()


def test_no_token_is_decoded_again_and_again(tokenizer: PreTrainedTokenizerBase) -> None:
    """Past bug: in a run of tokens without text, each was decoded together with all before it."""
    backend = tokenizer.backend_tokenizer

    class CountingTokenizer:
        num_decoded = 0
        get_added_tokens_decoder = backend.get_added_tokens_decoder
        token_to_id = backend.token_to_id

        def decode(self, token_ids: list[int]) -> str:
            self.num_decoded += len(token_ids)
            return backend.decode(token_ids)

    for token_id in (tokenizer.all_special_ids[0], tokenizer.encode("é")[0], tokenizer.encode("a")[0]):
        counting = CountingTokenizer()
        detokenizer = Detokenizer(counting, ("zzz",))
        for n in range(1, 1001):
            detokenizer.find_stop([token_id] * n)
        assert counting.num_decoded < 100_000


def test_the_work_for_stop_strings_is_bounded(tokenizer: PreTrainedTokenizerBase) -> None:
    """A few calls for each string, however long it is. Past bug: one for each character of each string."""
    stop = [f"{i} is not to be, that is" * 20 for i in range(300)]
    token_ids = tokenizer.encode("To be, or not to be, that is the question: " * 20)
    detokenizer, calls = Detokenizer(tokenizer.backend_tokenizer, stop), []
    detokenizer.visible(token_ids[:-1], finished=False)
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    shown = detokenizer.visible(token_ids, finished=False)
    sys.setprofile(None)
    assert shown == tokenizer.decode(token_ids)[: 1 - max(map(len, stop))]
    assert len(calls) < 20 * len(stop)
