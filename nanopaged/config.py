"""Every option of the engine and of a request: its default, and the rule that its values keep.

`EngineConfig` holds what is fixed for the life of an engine, `SamplingParams` and `BeamSearchParams` what may
differ from request to request. The rules (`checks/rules.py`) are applied when one is made; limits that depend
on the model are checked later. This module knows no tensors: `dtype` and `device` are names here.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from nanopaged.checks import rules
from nanopaged.checks.foreign_names import refuse_change
from nanopaged.checks.rules import Options, boolean, number, one_of, option, optional, whole

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "flash", "triton", "cpp", "torch", "reference")
NO_TOP_K = 1 << 24  # more than any vocabulary, and exact in float32
OR_NONE, TO_THE_LIMIT = " (None chooses it for you)", " (None is as many as max_model_len allows)"


@dataclass(frozen=True)
class EngineConfig(Options):
    """The options of an engine.

    Fields:
        model: a folder with config.json, safetensors and a tokenizer, or a Hugging Face hub id. None is the
            tiny model in the box.
        dtype: of weights, activations and K/V: "float32", "bfloat16" or "float16", or torch's own. "auto"
            takes the checkpoint's.
        device: "auto" (CUDA if there is one), or a device of torch or its name: "cpu", "cuda:1", "mps".
        block_size: token slots in a block; 16 is the paper's default (§7.2).
        num_blocks: blocks of the KV cache. None measures the free memory and uses what `memory_utilization`
            allows, but no more than `max_num_seqs` sequences of full length could fill.
        num_host_blocks: blocks in host memory for swapped requests. None is as many as the KV cache has, but
            at most 4 GiB; 0 disables swapping.
        memory_utilization: on a GPU, the share of its memory for weights, activations and KV cache together
            (None: 0.9). On a CPU, the KV cache may take this share of the memory that is free at start; None
            is a half, but at most 4 GiB unless a single sequence of full length needs more.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step (the token budget). None is 2048, or
            `max_model_len` if that is more and chunked prefill is off.
        max_model_len: tokens of prompt and output together. None takes the model's own limit.
        enable_prefix_caching: let requests share full blocks of earlier prompts and outputs that begin alike.
        enable_chunked_prefill: compute a long prompt in pieces over several steps, so that it does not hold
            up the sequences that are already decoding.
        preemption: what happens to the K/V of a request that must give its blocks back. "swap" moves it to
            host memory (and recomputes if that is full), "recompute" computes it again, "auto" takes the
            cheaper one, measured once at start.
        watermark: share of the blocks that must stay free when a request is admitted while others run, so
            that these can grow. 0 admits while a block is left, and preempts more often.
        attention_backend: "torch" runs everywhere. "triton" has our own kernels for storing and decoding, on
            a GPU. "flash" has too, and prefills with flash-attn or PyTorch's flash attention. "cpp" has
            kernels for a CPU, which a C++ compiler builds once. "reference" is the slow, obvious loop over
            blocks. "auto" picks the fastest that runs here ("cpp" only if it was built before).
        enforce_eager: launch every kernel one by one. Otherwise, on a GPU with "triton" or "flash",
            decode-only steps are replayed from CUDA graphs, which are captured at start.
        tensor_parallel_size: processes that share each layer, each with a GPU of its own (or all on the CPU).
            The engine starts them, or uses those of torchrun.
        load_format: "auto" reads the weights; "dummy" draws random ones (config.json is enough).
        seed: seeds the requests that have no seed of their own, and the dummy weights.
        trace: a file for a page that shows each step in a browser, such as "run.html" (docs/trace.md). It is
            written when the engine starts, over an older one, and grows with every step.

    Raises:
        TypeError: an unknown name, or a value of the wrong type.
        ValueError: a value out of its range; the message names the value and the limit.
        FileNotFoundError: the folder of `trace` is missing.
    """

    model: str | Path | None = option(None, rules.model)
    _: KW_ONLY
    dtype: str = option("auto", one_of(DTYPES, {"half": "float16", "float": "float32"}))
    device: str = option("auto", rules.device)
    block_size: int = option(16, whole(1))
    num_blocks: int | None = option(None, optional(whole(1, OR_NONE)))
    num_host_blocks: int | None = option(None, optional(whole(0)))
    memory_utilization: float | None = option(None, optional(number(0.01, 1.0)))
    max_num_seqs: int = option(256, whole(1))
    max_num_batched_tokens: int | None = option(None, optional(whole(1, OR_NONE)))
    max_model_len: int | None = option(None, optional(whole(1, OR_NONE)))
    enable_prefix_caching: bool = option(True, boolean)
    enable_chunked_prefill: bool = option(True, boolean)
    preemption: str = option("auto", one_of(("auto", "swap", "recompute")))
    watermark: float = option(0.05, number(0.0, 0.9))
    attention_backend: str = option("auto", one_of(ATTENTION_BACKENDS))
    enforce_eager: bool = option(False, boolean)
    tensor_parallel_size: int = option(1, whole(1))
    load_format: str = option("auto", one_of(("auto", "dummy")))
    seed: int = option(0, whole(0))
    trace: str | Path | None = option(None, optional(rules.new_file))

    # Called with each new engine: see `nanopaged/__init__.py`.
    on_start: ClassVar[list[Callable[[Any], None]]] = []


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Options):
    """How one request's tokens are chosen, and when it stops.

    The logits pass through penalties (vLLM's), temperature, top-k, top-p and min-p, in transformers' order,
    then a token is drawn. Defaults are vLLM's. Left out, to stay small: logit_bias, bad_words, structured
    output, skip_special_tokens (they are never in the text), detokenize (text is made when it is read).
    `dataclasses.replace(params, n=2)` makes a changed copy.

    Fields:
        n: outputs for the prompt (parallel sampling).
        temperature: 0 is greedy: the most likely token, no randomness.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens that together reach this probability (nucleus sampling).
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: divides the positive logits of all tokens of the prompt and the output, and
            multiplies the negative ones. Above 1 discourages repetition (Keskar et al., CTRL, 2019).
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        presence_penalty: subtracted once from the logit of each token that was generated.
        seed: makes the request repeatable, independent of the rest of the batch. None draws one.
        max_tokens: tokens to generate at most; None is as many as `max_model_len` allows. Blocks for all of
            them must fit in the pool, or the request is refused.
        min_tokens: until this many are generated, no end-of-sequence or stop token is drawn, and stop strings
            do not end the output.
        stop: a string, or several; the output ends before the first one that appears.
        stop_token_ids: token ids that end the output, in addition to the model's end-of-sequence ids.
        ignore_eos: do not end at end-of-sequence; `stop` and `stop_token_ids` still end it.
        logprobs: at each generated position, return the log-probabilities of this many most likely tokens,
            and of the chosen one: those of the model itself, before penalties and temperature.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        TypeError, ValueError: as for `EngineConfig`.
    """

    n: int = option(1, whole(1))
    temperature: float = option(1.0, number(0.0, 1e6, ": 0 is greedy"))
    top_k: int = option(0, whole(-1, ": 0 or -1 keeps all tokens"))
    top_p: float = option(1.0, number(0.0, 1.0, ": 1 keeps all tokens", above=True))
    min_p: float = option(0.0, number(0.0, 1.0))
    repetition_penalty: float = option(1.0, number(0.01, 100.0, ": 1 changes nothing"))
    frequency_penalty: float = option(0.0, number(-2.0, 2.0, ": 0 changes nothing"))
    presence_penalty: float = option(0.0, number(-2.0, 2.0, ": 0 changes nothing"))
    seed: int | None = option(None, optional(whole(0)))
    max_tokens: int | None = option(16, optional(whole(1, TO_THE_LIMIT)))
    min_tokens: int = option(0, whole(0), rules.min_at_most_max)
    stop: str | SequenceOf[str] = option((), rules.texts)
    stop_token_ids: SequenceOf[int] = option((), rules.token_ids)
    ignore_eos: bool = option(False, boolean)
    logprobs: int | None = option(None, optional(whole(0)))
    prompt_logprobs: int | None = option(None, optional(whole(0)))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without randomness."""
        return self.temperature == 0

    @cached_property
    def filters(self) -> tuple[float, ...]:
        """(temperature, top-k, top-p, min-p); a filter that is not set has a value that filters nothing."""
        if self.is_greedy:
            return 1.0, NO_TOP_K, 1.0, 0.0
        top_k = min(self.top_k, NO_TOP_K) if self.top_k > 0 else NO_TOP_K
        return max(self.temperature, 1e-6), top_k, self.top_p, self.min_p

    @cached_property
    def penalties(self) -> tuple[float, float, float] | None:
        """(repetition, frequency, presence), or None if they change nothing."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties if penalties != (1, 0, 0) else None

    @property
    def num_sequences(self) -> int:
        """Sequences that the request will have."""
        return self.n


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(Options):
    """Beam search for one request: the same hypotheses and scores as transformers' `generate(num_beams=…)`.

    The outputs are the `beam_width` best texts, best first. A text's score is the sum of its tokens'
    log-probabilities over (number of tokens ** length_penalty), end-of-sequence included.

    Fields:
        beam_width: beams (unfinished texts) kept at each step; 1 is greedy decoding.
        max_tokens: tokens to generate at most; None is as many as `max_model_len` allows.
        min_tokens: until this many tokens are generated, no text ends.
        length_penalty: above 0 favours long texts, below 0 short ones.
        early_stopping: when to stop once `beam_width` texts have ended. True: at once. False: when the best
            beam would not beat the worst of them if it ended now. "never": when no beam could ever beat it.
        ignore_eos: do not end at end-of-sequence.
        stop_token_ids: token ids that end a text, in addition to the model's end-of-sequence ids.

    Raises:
        TypeError, ValueError: as for `EngineConfig`.
    """

    beam_width: int = option(rule=whole(1))
    max_tokens: int | None = option(16, optional(whole(1, TO_THE_LIMIT)))
    min_tokens: int = option(0, whole(0), rules.min_at_most_max)
    length_penalty: float = option(1.0, number(-50, 50))  # 10⁶ ** 50 is still a float
    early_stopping: bool | str = option(False, rules.true_false_or("never"))
    ignore_eos: bool = option(False, boolean)
    stop_token_ids: SequenceOf[int] = option((), rules.token_ids)

    # The engine reads these fields of SamplingParams from any params. They are not options of a beam search.
    seed: ClassVar[None] = None
    stop: ClassVar[tuple[str, ...]] = ()
    logprobs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None

    @property
    def num_sequences(self) -> int:
        """Sequences that the request will have."""
        return self.beam_width


for _options in (EngineConfig, SamplingParams, BeamSearchParams):
    # dataclass's own does not say what to do
    type.__setattr__(_options, "__setattr__", refuse_change)
