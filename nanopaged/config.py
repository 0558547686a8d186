"""Every option of the engine and of a request, with its default and the values that it may have.

Options are checked when they are made. Limits that depend on the model are checked later.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar

DTYPES = ("auto", "float32", "bfloat16", "float16")
NO_TOP_K = 1 << 24  # more than any vocabulary, and exact in float32
NO_PENALTIES = (1, 0, 0)  # see `SamplingParams.penalties`
# Stands for the temperature 0. Logits are divided by it, which turns even a difference of 1e-17
# into 184, so only the most likely tokens keep a probability above 0 in float32.
ALMOST_ZERO = 2.0**-64


def is_int(value: Any) -> bool:
    """Whether a value is an int, or one of numpy's. (In Python, a bool counts as an int.)"""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: Any, minimum: int) -> int:
    """The option's value as a Python int. Raises unless it is an int of at least `minimum`."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < minimum:
        raise ValueError(f"{name} is {value}, but must be at least {minimum}")
    return int(value)


class Options:
    """The checks that the classes of options share. Each raises an error that names the option."""

    def check_ints(self, *names: str, minimum: int) -> None:
        """Raise unless the options are ints of at least `minimum`, or None as by default."""
        for name in names:
            value = getattr(self, name)
            default = getattr(type(self), name, 0)  # a class holds the defaults
            if value is not None or default is not None:
                self.keep(name, check_int(name, value, minimum))

    def check_numbers(self, *names: str, low: float, high: float) -> None:
        """Raise unless the options are numbers from `low` to `high`. NaN fails the comparisons."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}, but must lie in [{low}, {high}]")

    def check_types(self, *names: str, types: Any, description: str) -> None:
        """Raise TypeError unless the options have one of the types."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, types):
                raise TypeError(f"{name} must be {description}, got {value!r}")

    def check_choice(self, name: str, choices: Iterable[str]) -> None:
        """Raise ValueError unless the option is one of the choices."""
        value = getattr(self, name)
        if value not in choices:
            raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(choices)}")

    def check_list(self, name: str) -> list[Any]:
        """The items of an option that is a list. None is an empty list."""
        self.check_types(name, types=Iterable | None, description="a list")
        values = getattr(self, name)
        return [] if values is None else list(values)

    def keep(self, name: str, value: Any) -> None:
        """Keep a value in its plain form; the classes of options are frozen."""
        object.__setattr__(self, name, value)


@dataclass(frozen=True)
class EngineConfig(Options):
    """The options of an engine.

    Fields:
        model: a folder with config.json, safetensors and a tokenizer, or a Hugging Face hub id.
            None is the tiny model in the box.
        dtype: of weights, activations and K/V; "auto" takes the checkpoint's.
        device: "auto" (CUDA if there is a GPU), "cpu", "cuda:1", "mps".
        block_size: token slots in a block; 16 is the paper's default (§7.2).
        num_blocks: blocks of the KV cache. None measures the free memory, and takes no more blocks
            than `max_num_seqs` sequences of full length could fill.
        num_host_blocks: blocks in host memory for swapped requests. None takes as many as the KV
            cache has, but at most 4 GiB; 0 turns swapping off.
        memory_utilization: on a GPU, the share of its memory for weights, activations and KV cache
            together (None takes 0.9). On a CPU, the share of the free memory for the KV cache; None
            takes half, but at most 4 GiB unless one sequence needs more.
        max_num_seqs: sequences running at the same time.
        max_num_batched_tokens: tokens computed in one step (the token budget). None takes 8192 on a
            GPU and 2048 elsewhere, or `max_model_len` if that is more and chunked prefill is off.
        max_model_len: tokens of prompt and output together. None takes the model's own limit.
        enable_prefix_caching: let requests share the full blocks of earlier prompts and outputs
            that begin with the same tokens.
        enable_chunked_prefill: compute a long prompt in pieces, so that decodes need not wait for
            it.
        preemption: what happens to the K/V of a request that must give its blocks back. "swap"
            moves it to host memory (or recomputes it if host memory is full), "recompute" computes
            it again, "auto" takes whichever a measurement at the start finds faster.
        watermark: share of the blocks that stay free when a request is admitted, so that running
            requests can grow.
        attention_backend: "torch" runs everywhere. "triton" stores and decodes with our kernels on
            a GPU; "flash" also prefills with flash attention. "cpp" has kernels for a CPU, which a
            C++ compiler builds once. "reference" is the slow, obvious loop over blocks. "auto"
            picks the fastest one that can run.
        enforce_eager: launch every kernel one by one. Otherwise, on a GPU, small operations are
            compiled, and decodes are replayed from CUDA graphs.
        tensor_parallel_size: processes that share each layer, each with a GPU of its own (or all on
            the CPU). The engine starts them, or uses those that torchrun has started.
        load_format: "auto" reads the weights; "dummy" draws random ones.
        seed: seeds the requests that have no seed of their own, and the dummy weights.
        trace: a page that shows each step in a browser, such as "run.html". It replaces an older
            file.

    Raises:
        TypeError: an unknown name, or a value of the wrong type.
        ValueError: a value out of its range; the message names the value and the limit.
        FileNotFoundError: `trace` is not a file in a folder that exists.
    """

    model: str | Path | None = None
    _: KW_ONLY
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    num_host_blocks: int | None = None
    memory_utilization: float | None = None
    max_num_seqs: int = 256
    # A user may leave these two open with None. `choose_lengths` makes them ints, which all code
    # behind it relies on, so a type checker should not see the None.
    max_num_batched_tokens: int | Any = None
    max_model_len: int | Any = None
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
        # torch.float16 and torch.device("cuda:1") are welcome, and other names of the dtypes.
        dtype = str(self.dtype).removeprefix("torch.")
        self.keep("dtype", {"half": "float16", "float": "float32"}.get(dtype, dtype))
        self.keep("device", str(self.device))
        self.check_choice("dtype", DTYPES)
        self.check_choice("preemption", ("auto", "swap", "recompute"))
        self.check_choice(
            "attention_backend", ("auto", "flash", "triton", "cpp", "torch", "reference")
        )
        self.check_choice("load_format", ("auto", "dummy"))
        self.check_ints(
            "block_size",
            "num_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "tensor_parallel_size",
            minimum=1,
        )
        self.check_ints("num_host_blocks", "seed", minimum=0)
        self.check_numbers("watermark", low=0.0, high=0.9)
        if self.memory_utilization is not None:
            self.check_numbers("memory_utilization", low=0.01, high=1.0)
        self.check_types(
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
            types=bool,
            description="True or False",
        )
        if self.trace is not None:
            self.check_types("trace", types=str | Path, description="a file name like 'run.html'")
            path = Path(self.trace)
            if path.is_dir() or not path.parent.is_dir():
                raise FileNotFoundError(
                    f"trace is {str(self.trace)!r}, but must be a file in a folder that exists"
                )


def choose_lengths(config: EngineConfig, model_limit: int, usual_budget: int) -> EngineConfig:
    """The config with `max_model_len` and `max_num_batched_tokens`, if it leaves them open.

    Args:
        model_limit: tokens of the longest sequence that the model was made for.
        usual_budget: `max_num_batched_tokens`, unless the longest prefill needs more.

    Raises:
        ValueError: `max_model_len` is above the model's limit; or chunked prefill is off, and the
            longest prompt does not fit in one step.
    """
    max_model_len = config.max_model_len or model_limit
    if max_model_len > model_limit:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the model was made for at most {model_limit}"
        )
    longest_prefill = 0 if config.enable_chunked_prefill else max_model_len
    budget = config.max_num_batched_tokens or max(usual_budget, longest_prefill)
    if budget < longest_prefill:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but without chunked prefill a prompt of up to "
            f"max_model_len = {max_model_len} tokens must fit in one step: raise "
            "max_num_batched_tokens, lower max_model_len, or set enable_chunked_prefill=True"
        )
    return replace(config, max_model_len=max_model_len, max_num_batched_tokens=budget)


@dataclass(frozen=True, kw_only=True)
class RequestOptions(Options):
    """What ends a text. Both kinds of params have these options.

    Fields:
        max_tokens: tokens to generate at most; None is as many as `max_model_len` allows.
        min_tokens: until this many are generated, nothing but `max_tokens` ends the text.
        ignore_eos: do not end at end-of-sequence. Stop strings and `stop_token_ids` still end the
            text.
        stop_token_ids: token ids that end the text, in addition to the model's end-of-sequence ids.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: SequenceOf[int] = ()

    def __post_init__(self) -> None:
        self.check_ints("min_tokens", minimum=0)
        if self.max_tokens is not None:
            self.check_ints("max_tokens", minimum=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(
                    f"min_tokens is {self.min_tokens}, but max_tokens is only {self.max_tokens}"
                )
        self.check_types("ignore_eos", types=bool, description="True or False")
        token_ids = [
            check_int("an item of stop_token_ids", token_id, minimum=0)
            for token_id in self.check_list("stop_token_ids")
        ]
        self.keep("stop_token_ids", tuple(token_ids))


@dataclass(frozen=True, kw_only=True)
class SamplingParams(RequestOptions):
    """How one request's tokens are chosen, and when it stops.

    The logits pass through penalties (vLLM's), temperature, top-k, top-p and min-p, in the order of
    transformers. Defaults are vLLM's.

    Fields: those of `RequestOptions`, and
        n: outputs for the prompt (parallel sampling).
        temperature: 0 is greedy: the most likely token, no randomness.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens that together reach this probability (nucleus sampling).
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: divides the positive logits of all tokens of the prompt and the output,
            and multiplies the negative ones (Keskar et al., CTRL, 2019).
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        presence_penalty: subtracted once from the logit of each token that was generated.
        seed: makes the random numbers of the request repeatable, whatever else is in the batch.
            (Rounding may still depend on the batch.) None draws a seed.
        stop: a string, or several; the output ends before the first one that appears.
        logprobs: at each position, return the log-probabilities of this many most likely tokens,
            and of the chosen one: the model's own, before penalties and temperature.
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
    stop: str | SequenceOf[str] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("n", minimum=1)
        self.check_ints("top_k", minimum=-1)
        self.check_ints("seed", "logprobs", "prompt_logprobs", minimum=0)
        self.check_numbers("temperature", low=0.0, high=1e6)
        self.check_numbers("top_p", "min_p", low=0.0, high=1.0)
        self.check_numbers("repetition_penalty", low=0.01, high=100.0)
        self.check_numbers("frequency_penalty", "presence_penalty", low=-2.0, high=2.0)
        if self.top_p == 0:
            raise ValueError("top_p is 0, but must be above 0: 1 keeps all tokens")
        stop = [self.stop] if isinstance(self.stop, str) else self.check_list("stop")
        self.keep("stop", tuple(stop))
        for text in stop:
            if not isinstance(text, str):
                raise TypeError(f"stop must be a string or a list of strings, got {text!r}")
            if text == "":
                raise ValueError("stop has an empty string in it, which would end every output")

    @cached_property
    def filters(self) -> tuple[float, ...]:
        """(temperature, top-k, top-p, min-p); one that is not set has a value that keeps all."""
        top_k = min(self.top_k, NO_TOP_K) if self.top_k > 0 else NO_TOP_K
        return max(self.temperature, ALMOST_ZERO), top_k, self.top_p, self.min_p

    @cached_property
    def penalties(self) -> tuple[float, ...]:
        """(repetition, frequency, presence penalty)."""
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty

    @property
    def width(self) -> int:
        """Sequences that the request will have."""
        return self.n


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(RequestOptions):
    """Beam search for one request, with the hypotheses and scores of transformers' `num_beams=…`.

    The outputs are the `beam_width` best texts, best first. A score is the sum of the tokens'
    log-probabilities over (number of tokens ** length_penalty), end-of-sequence included.

    Fields: those of `RequestOptions`, and
        beam_width: beams (unfinished texts) kept at each step; 1 is greedy decoding.
        length_penalty: above 0 favours long texts, below 0 short ones.
        early_stopping: when to stop once `beam_width` texts have ended. True stops right then.
            False stops when the best beam would not beat the worst of them if it ended now. "never"
            stops when no beam could ever beat it.

    Raises:
        TypeError, ValueError: as for `EngineConfig`.
    """

    beam_width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    # The engine reads these fields of SamplingParams from any params. In a beam search they are no
    # options, and always have these values.
    seed: ClassVar = None
    stop: ClassVar = ()
    logprobs: ClassVar = None
    prompt_logprobs: ClassVar = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("beam_width", minimum=1)
        self.check_numbers("length_penalty", low=-50, high=50)  # 10⁶ ** 50 is still a float
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(
                f"early_stopping is {self.early_stopping!r}, but must be True, False or 'never'"
            )

    @property
    def width(self) -> int:
        """Sequences that the request will have."""
        return self.beam_width


Params = SamplingParams | BeamSearchParams
