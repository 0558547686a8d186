"""Every option of the engine and of a request, and the checks of their values.

`EngineConfig` holds what is fixed for the life of an engine, `SamplingParams` and `BeamSearchParams` what may
differ from request to request. Each checks its values when it is made. Limits that depend on the model (the
vocabulary, the longest context) are checked in `prompts.py` and `engine.py`.

This module knows no tensors: `dtype` and `device` are names here.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nanopaged.checks.foreign_names import explain, options_of, refuse_change

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_NAMES = {"half": "float16", "float": "float32"}  # torch's other names
ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch", "reference")
NO_TOP_K = 1 << 24  # more than any vocabulary, and exact in float32
LOAD_FORMATS = ("auto", "dummy")
PREEMPTIONS = ("auto", "swap", "recompute")

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_int(params: object, name: str, minimum: int, hint: str = "") -> None:
    """Raise unless the field is a whole number of at least `minimum`; numpy's ints become Python's."""
    value = getattr(params, name)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    _require(value >= minimum, f"{name} is {value}, but must be at least {minimum}{hint}")
    object.__setattr__(params, name, int(value))


def _check_optional_int(params: object, name: str, minimum: int, hint: str = "") -> None:
    if getattr(params, name) is not None:
        _check_int(params, name, minimum, hint)


def _check_number(name: str, value: object, low: float, high: float, why: str = "") -> None:
    """Raise unless `low <= value <= high`; NaN fails both comparisons and is refused too."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
    _require(low <= value <= high, f"{name} is {value}, but must lie in [{low}, {high}]{why}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name} is {value!r}, but must be one of {', '.join(choices)}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


_T = TypeVar("_T", bound="_Options")


def _check_trace(trace: object) -> None:
    """Raise unless a file can lie there."""
    if not isinstance(trace, str | Path):
        raise TypeError(f"trace must be the name of a file such as 'run.html', got {trace!r}")
    folder = Path(trace).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"trace is {str(trace)!r}, but there is no folder {str(folder)!r}: make it first"
        )
    _require(not Path(trace).is_dir(), f"trace is {str(trace)!r}, which is a folder: name a file in it")


class _Options:
    """The base of the classes below: the error for an unknown keyword says what may have been meant."""

    def __new__(cls: type[_T], *args: Any, **options: Any) -> _T:  # with Any, editors would show no options
        known = [option.name for option in fields(cls)]
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"{cls.__name__} has no option {explain(unknown, known, options_of(cls))}")
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class EngineConfig(_Options):
    """The options of an engine.

    Fields:
        model: a folder with config.json, safetensors and a tokenizer, or a Hugging Face hub id.
            None is the tiny model in the box.
        dtype: the type of weights, activations and K/V: "float32", "bfloat16" or "float16", as a name
            ("float" and "half" too) or as torch's own. "auto" takes the checkpoint's.
        device: "auto" (CUDA if there is one), or a device of torch or its name: "cpu", "cuda", "cuda:1".
        block_size: token slots in a block, 1 or more; 16 is the paper's default (§7.2).
        num_blocks: blocks of the KV cache. None measures the free memory and uses what
            `memory_utilization` allows, but no more than `max_num_seqs` sequences of full length could fill.
            The logger "nanopaged" tells the choice, at level INFO.
        num_host_blocks: blocks in host memory for swapped requests. None is as many as the KV cache has, but
            at most 4 GiB; 0 disables swapping.
        memory_utilization: on a GPU, the share of its memory that weights, activations and KV cache may take
            together (None: 0.9). On a CPU, the share of the memory that is free now that the KV cache may
            take. There None is a half, but at most 4 GiB unless a single sequence of full length needs more.
            The memory is used little by little, so a second engine still counts it as free.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step (the token budget). None is 2048, or
            `max_model_len` if that is more and chunked prefill is off.
        max_model_len: tokens of prompt and output together. None takes the model's own limit.
        enable_prefix_caching: let requests share full blocks of earlier prompts and outputs that begin alike.
        enable_chunked_prefill: compute a prompt in pieces over several steps, so that a long one does not
            hold up the sequences that are already decoding.
        preemption: what happens to the K/V of a request that must give its blocks back. "swap" moves it to
            host memory (and recomputes if that is full), "recompute" drops it and computes it again, "auto"
            takes the cheaper one, measured once at start.
        watermark: share of the blocks that must stay free when a request is admitted while others run, so
            that their sequences can grow. 0 admits while a block is left, and preempts more often.
        attention_backend: "torch" runs everywhere. "triton" uses our own kernels for storing and decoding, on
            a GPU. "flash" does too, and prefills with flash-attn or PyTorch's flash attention. "reference" is
            the slow, obvious loop over blocks that the docs explain. "auto" picks the fastest that runs here.
        enforce_eager: launch every kernel one by one. Otherwise, on a GPU with the "triton" or "flash"
            backend, decode-only steps are replayed from CUDA graphs, which are captured at start.
        tensor_parallel_size: processes that share each layer, each with a GPU of its own (or all on the CPU).
            The engine starts them, or uses those that torchrun has started.
        load_format: "auto" reads the weights; "dummy" draws random ones (config.json is enough).
        seed: seeds the requests that have no seed of their own, and the dummy weights.
        trace: a file for a page that shows each step in a browser, such as "run.html" (docs/trace.md). It is
            written when the engine starts, over an older one, and grows with every step.

    Raises:
        TypeError: an unknown name, or a value of the wrong type.
        ValueError: a value out of its range; the message names the value and the limit.
        FileNotFoundError: the folder of `trace` is missing.
    """

    model: str | Path | None = field(default=None, kw_only=False)
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    memory_utilization: float | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption: str = "auto"
    watermark: float = 0.05
    attention_backend: str = "auto"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    load_format: str = "auto"
    seed: int = 0
    trace: str | Path | None = None

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, str | Path):
            raise TypeError(f"model must be a folder, a hub id or None, got {self.model!r}")
        if type(self.device).__module__ == "torch":  # torch.device("cuda")
            object.__setattr__(self, "device", str(self.device))
        if not isinstance(self.device, str):
            raise TypeError(f"device must be a name such as 'cpu' or 'cuda:0', got {self.device!r}")
        dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16
        object.__setattr__(self, "dtype", DTYPE_NAMES.get(dtype, dtype))
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_choice("preemption", self.preemption, PREEMPTIONS)
        _check_choice("load_format", self.load_format, LOAD_FORMATS)
        _check_int(self, "block_size", 1)
        _check_int(self, "max_num_seqs", 1)
        _check_int(self, "seed", 0)
        for name in ("num_blocks", "max_num_batched_tokens", "max_model_len"):
            _check_optional_int(self, name, 1, " (None chooses it for you)")
        _check_optional_int(self, "num_host_blocks", 0)
        if self.memory_utilization is not None:
            _check_number("memory_utilization", self.memory_utilization, 0.01, 1.0)
        _check_number("watermark", self.watermark, 0.0, 0.9)
        _check_bool("enforce_eager", self.enforce_eager)
        _check_int(self, "tensor_parallel_size", 1)
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        _check_bool("enable_chunked_prefill", self.enable_chunked_prefill)
        if self.trace is not None:
            _check_trace(self.trace)

    def token_budget(self, max_model_len: int) -> int:
        """Tokens that one step may compute, for a model of `max_model_len`.

        Raises:
            ValueError: prompts may not be cut into chunks, and the longest does not fit in one step.
        """
        budget = self.max_num_batched_tokens
        if self.enable_chunked_prefill:
            return budget or DEFAULT_MAX_NUM_BATCHED_TOKENS
        budget = budget or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_model_len)
        _require(
            budget >= max_model_len,
            f"max_num_batched_tokens is {budget}, but without chunked prefill a prompt of up to "
            f"max_model_len = {max_model_len} tokens must fit in one step: raise "
            "max_num_batched_tokens, lower max_model_len, or set enable_chunked_prefill=True",
        )
        return budget


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Options):
    """How one request's tokens are chosen, and when it stops.

    The logits pass through penalties (vLLM's), temperature, top-k, top-p and min-p, in transformers' order,
    then a token is drawn. (vLLM has min-p before top-k.) Defaults are vLLM's. Left out, to stay small:
    logit_bias, bad_words, structured output, skip_special_tokens (they are never in the text), detokenize
    (text is made when it is read). Params cannot be changed: `dataclasses.replace(params, n=2)` makes a
    changed copy.

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
        seed: makes the request repeatable, independent of the other requests in the batch. None draws one.
        max_tokens: tokens to generate at most; None is as many as `max_model_len` allows. Blocks for all of
            them must fit in the pool, or the request is refused.
        min_tokens: until this many tokens are generated, no end-of-sequence or stop token is drawn and
            stop strings do not end the output.
        stop: a string, or several; the output ends before the first one that appears.
        stop_token_ids: token ids that end the output, in addition to the model's end-of-sequence ids.
        ignore_eos: do not end at end-of-sequence; `stop` and `stop_token_ids` still end it.
        logprobs: at each generated position, return the log-probabilities of this many most likely tokens,
            and of the chosen one. They belong to the model's own distribution, before penalties,
            temperature and filters. None returns none.
        prompt_logprobs: the same for the prompt's tokens.

    Raises:
        TypeError, ValueError: as for `EngineConfig`.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | SequenceOf[str] = ()
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_int(self, "n", 1)
        _check_number("temperature", self.temperature, 0.0, 1e6, ": 0 is greedy")
        _check_int(self, "top_k", -1, ": 0 or -1 keeps all tokens")
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _require(self.top_p > 0, "top_p is 0, but must be above 0: 1 keeps all tokens")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0, ": 1 changes nothing")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), -2.0, 2.0, ": 0 changes nothing")
        _check_optional_int(self, "seed", 0)
        _check_lengths(self)
        for name in ("logprobs", "prompt_logprobs"):
            _check_optional_int(self, name, 0)
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r} in it")
            _require(text != "", "stop has an empty string in it, which would stop at once")
        object.__setattr__(self, "stop", stop)

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
class BeamSearchParams(_Options):
    """Beam search for one request: the same hypotheses and scores as transformers' `generate(num_beams=…)`.

    The request's outputs are the `beam_width` best texts, best first. A text's score is the sum of its
    tokens' log-probabilities over (number of tokens ** length_penalty), end-of-sequence included.

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

    beam_width: int
    max_tokens: int | None = 16
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    ignore_eos: bool = False
    stop_token_ids: SequenceOf[int] = ()

    # The engine reads these fields of SamplingParams from any params. They are not options of a beam search.
    seed: ClassVar[None] = None
    stop: ClassVar[tuple[str, ...]] = ()
    logprobs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None

    def __post_init__(self) -> None:
        _check_int(self, "beam_width", 1)
        _check_number("length_penalty", self.length_penalty, -50, 50)  # 10⁶ ** 50 is still a float
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping is {self.early_stopping!r}, but must be True, False or 'never'")
        _check_lengths(self)

    @property
    def num_sequences(self) -> int:
        """Sequences that the request will have."""
        return self.beam_width


def _check_lengths(params: SamplingParams | BeamSearchParams) -> None:
    """Check the options that end a text; `stop_token_ids` becomes a tuple, so that params are hashable."""
    _check_optional_int(params, "max_tokens", 1, " (None is as many as max_model_len allows)")
    _check_int(params, "min_tokens", 0)
    _require(
        params.max_tokens is None or params.min_tokens <= params.max_tokens,
        f"min_tokens is {params.min_tokens}, but max_tokens is only {params.max_tokens}",
    )
    _check_bool("ignore_eos", params.ignore_eos)
    ids = _as_tuple("stop_token_ids", params.stop_token_ids)
    for token_id in ids:
        if not isinstance(token_id, Integral) or isinstance(token_id, bool):
            raise TypeError(f"stop_token_ids must be ints, got {token_id!r} among them")
        _require(token_id >= 0, f"stop_token_ids has {token_id}, but token ids are at least 0")
    object.__setattr__(params, "stop_token_ids", tuple(int(token_id) for token_id in ids))


def _as_tuple(name: str, value: object) -> tuple:
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list, got {value!r} ({type(value).__name__})")
    return tuple(value)


for _options in (EngineConfig, SamplingParams, BeamSearchParams):
    _options.__setattr__ = refuse_change  # dataclass has set another one, which does not say what to do
