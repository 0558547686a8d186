"""Every option of the engine and of a request: its default, and the rule that its values keep.

Rules are applied when options are made; limits that depend on the model are checked later.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import KW_ONLY, MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cached_property, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "flash", "triton", "cpp", "torch", "reference")
NO_TOP_K = 1 << 24  # more than any vocabulary, and exact in float32
MAX_NUM_BATCHED_TOKENS = 2048  # the default
OR_NONE, TO_THE_LIMIT = " (None chooses it for you)", " (None is as many as max_model_len allows)"

# ── rules: a function of (name, value) that returns the value as it is kept, or raises ─────────────────

Rule = Callable[[str, Any], Any]
_T = TypeVar("_T", bound="Options")
P = ParamSpec("P")
R = TypeVar("R")


def option(default: Any = MISSING, rule: Rule | None = None) -> Any:
    """A field with a rule. Without a default, it must be given."""
    return field(default=default, metadata={"rule": rule})


class Options:
    """The base of the classes of options. The error for an unknown keyword says what may have been meant."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]  # every class of options is a dataclass

    def __new__(cls: type[_T], *args: Any, **options: Any) -> _T:
        if not options.keys() <= cls.__dataclass_fields__.keys():
            theirs = foreign_names("options")
            theirs |= foreign_names("beam_options") if cls is BeamSearchParams else {}
            unknown = explain(options, cls.__dataclass_fields__, theirs)
            raise TypeError(f"{cls.__name__} has no option {unknown}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for each in fields(self):
            if rule := each.metadata.get("rule"):  # a fork may have plain fields
                object.__setattr__(self, each.name, rule(each.name, getattr(self, each.name)))


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(message)


def instance(kinds: type | tuple[type, ...], what: str) -> Rule:
    """A value of one of these types."""

    def rule(name: str, value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} must be {what}, got {value!r}")
        return value

    return rule


def is_whole(value: Any) -> bool:
    """Whether it is an int, or numpy's. (bool is a subclass of int.)"""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole(minimum: int, hint: str = "") -> Rule:
    """A whole number of at least `minimum`; numpy's ints become Python's."""

    def rule(name: str, value: Any) -> int:
        if not is_whole(value):
            raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
        require(value >= minimum, f"{name} is {value}, but must be at least {minimum}{hint}")
        return int(value)

    return rule


def number(low: float, high: float, hint: str = "", above: bool = False) -> Rule:
    """A number from `low` (or above it) to `high`. NaN fails both comparisons."""

    def rule(name: str, value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__})")
        if not low <= value <= high or (above and value == low):
            limits = f"be above {low} and at most {high}" if above else f"lie in [{low}, {high}]"
            raise ValueError(f"{name} is {value}, but must {limits}{hint}")
        return value

    return rule


def one_of(*choices: str | bool) -> Rule:
    """One of these. A dtype may be torch's own, or have one of its short names."""
    short = {"half": "float16", "float": "float32"}

    def rule(name: str, value: Any) -> Any:
        value = value if isinstance(value, bool) else str(value).removeprefix("torch.")
        value = short.get(value, value)
        require(
            value in choices,
            f"{name} is {value!r}, but must be one of {', '.join(map(str, choices))}",
        )
        return value

    return rule


def optional(rule: Rule) -> Rule:
    """None, or what the rule takes."""
    return lambda name, value: None if value is None else rule(name, value)


def device_name(name: str, value: Any) -> str:
    """The name of a device, or a torch.device."""
    value = str(value) if type(value).__module__ == "torch" else value
    return instance(str, "a name such as 'cpu' or 'cuda:0'")(name, value)


def new_file(name: str, value: Any) -> str | Path:
    """The name of a file in a folder that exists."""
    path = Path(
        instance((str, Path), "the name of a file such as 'run.html'")(name, value)
    ).absolute()
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{name} is {str(value)!r}, but there is no folder {str(path.parent)!r}"
        )
    require(not path.is_dir(), f"{name} is {str(value)!r}, which is a folder: name a file in it")
    return value


def several(rule: Rule) -> Rule:
    """A list of what the rule takes; None is an empty one. Kept as a tuple, so that params are hashable."""

    def rule_of_all(name: str, values: Any) -> tuple:
        if isinstance(values, str) or not isinstance(values, Iterable | None):
            raise TypeError(f"{name} must be a list, got {values!r} ({type(values).__name__})")
        return tuple(map(partial(rule, name), () if values is None else values))

    return rule_of_all


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A text, or several; none of them empty."""
    items = strings(name, [value] if isinstance(value, str) else value)
    require("" not in items, f"{name} has an empty string in it, which would stop at once")
    return items


strings = several(instance(str, "a string or a list of strings"))
boolean, token_ids = instance(bool, "True or False"), several(whole(0))
folder_or_id = instance((str, Path), "a folder, a hub id or None")

# ── the options ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EngineConfig(Options):
    """The options of an engine.

    Fields:
        model: a folder with config.json, safetensors and a tokenizer, or a Hugging Face hub id. None is the
            tiny model in the box.
        dtype: of weights, activations and K/V; "auto" is the checkpoint's.
        device: "auto" (CUDA if there is one), "cpu", "cuda:1", "mps".
        block_size: token slots in a block; 16 is the paper's default (§7.2).
        num_blocks: blocks of the KV cache. None measures the free memory, and takes no more than
            `max_num_seqs` sequences of full length could fill.
        num_host_blocks: blocks in host memory for swapped requests. None is as many as the KV cache has, but
            at most 4 GiB; 0 disables swapping.
        memory_utilization: on a GPU, the share of its memory for weights, activations and KV cache together
            (None: 0.9). On a CPU, the share of the free memory for the KV cache; None is a half, but at most
            4 GiB unless one sequence needs more.
        max_num_seqs: sequences running at once.
        max_num_batched_tokens: tokens computed in one step (the token budget). None is 2048, or
            `max_model_len` if that is more and chunked prefill is off.
        max_model_len: tokens of prompt and output together. None takes the model's own limit.
        enable_prefix_caching: let requests share full blocks of earlier prompts and outputs that begin alike.
        enable_chunked_prefill: compute a long prompt in pieces, so that decodes need not wait for it.
        preemption: what happens to the K/V of a request that must give its blocks back. "swap" moves it to
            host memory (or recomputes if that is full), "recompute" computes it again, "auto" takes the
            faster way, measured at start.
        watermark: share of the blocks that stay free when a request is admitted, for the others to grow.
        attention_backend: "torch" runs everywhere. "triton" has our kernels for storing and decoding, on a
            GPU; "flash" also prefills with flash attention. "cpp" has kernels for a CPU, built once by a C++
            compiler. "reference" is the slow, obvious loop over blocks. "auto" picks the fastest.
        enforce_eager: launch every kernel one by one. Otherwise, on a GPU, small operations are compiled, and
            decodes are replayed from CUDA graphs.
        tensor_parallel_size: processes that share each layer, each with a GPU of its own (or all on the CPU).
            The engine starts them, or uses those of torchrun.
        load_format: "auto" reads the weights; "dummy" draws random ones.
        seed: seeds the requests that have no seed of their own, and the dummy weights.
        trace: a page that shows each step in a browser, such as "run.html". An older one is overwritten.

    Raises:
        TypeError: an unknown name, or a value of the wrong type.
        ValueError: a value out of its range; the message names the value and the limit.
        FileNotFoundError: the folder of `trace` is missing.
    """

    model: str | Path | None = option(None, optional(folder_or_id))
    _: KW_ONLY
    dtype: str = option("auto", one_of(*DTYPES))
    device: str = option("auto", device_name)
    block_size: int = option(16, whole(1))
    num_blocks: int | None = option(None, optional(whole(1, OR_NONE)))
    num_host_blocks: int | None = option(None, optional(whole(0)))
    memory_utilization: float | None = option(None, optional(number(0.01, 1.0)))
    max_num_seqs: int = option(256, whole(1))
    max_num_batched_tokens: int | None = option(None, optional(whole(1, OR_NONE)))
    max_model_len: int | None = option(None, optional(whole(1, OR_NONE)))
    enable_prefix_caching: bool = option(True, boolean)
    enable_chunked_prefill: bool = option(True, boolean)
    preemption: str = option("auto", one_of("auto", "swap", "recompute"))
    watermark: float = option(0.05, number(0.0, 0.9))
    attention_backend: str = option("auto", one_of(*ATTENTION_BACKENDS))
    enforce_eager: bool = option(False, boolean)
    tensor_parallel_size: int = option(1, whole(1))
    load_format: str = option("auto", one_of("auto", "dummy"))
    seed: int = option(0, whole(0))
    trace: str | Path | None = option(None, optional(new_file))


def resolve_lengths(config: EngineConfig, longest: int) -> tuple[int, int]:
    """The maximum length of a sequence, and the token budget of a step, where `config` leaves them open.

    Args:
        longest: tokens of the longest sequence that the model was made for.

    Raises:
        ValueError: `max_model_len` is more than that; or without chunked prefill the longest prompt does not
            fit in one step.
    """
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the model was made for at most {longest}"
        )
    minimum = 0 if config.enable_chunked_prefill else max_model_len
    budget = config.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, minimum)
    if budget < minimum:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but without chunked prefill a prompt of up to "
            f"max_model_len = {max_model_len} tokens must fit in one step: raise max_num_batched_tokens, "
            "lower max_model_len, or set enable_chunked_prefill=True"
        )
    return max_model_len, budget


class RequestOptions(Options):
    """What both kinds of params check of their lengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = vars(self)["min_tokens"], vars(self)["max_tokens"]
        require(
            most is None or least <= most, f"min_tokens is {least}, but max_tokens is only {most}"
        )


@dataclass(frozen=True, kw_only=True)
class SamplingParams(RequestOptions):
    """How one request's tokens are chosen, and when it stops.

    The logits pass through penalties (vLLM's), temperature, top-k, top-p and min-p, in transformers' order.
    Defaults are vLLM's.

    Fields:
        n: outputs for the prompt (parallel sampling).
        temperature: 0 is greedy: the most likely token, no randomness.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the most likely tokens that together reach this probability (nucleus sampling).
        min_p: drop tokens less likely than `min_p` times the most likely one.
        repetition_penalty: divides the positive logits of all tokens of the prompt and the output, and
            multiplies the negative ones (Keskar et al., CTRL, 2019).
        frequency_penalty: subtracted from a token's logit once for each time that it was generated.
        presence_penalty: subtracted once from the logit of each token that was generated.
        seed: makes the request repeatable, independent of the rest of the batch. None draws one.
        max_tokens: tokens to generate at most; None is as many as `max_model_len` allows.
        min_tokens: until this many are generated, nothing but `max_tokens` ends the output.
        stop: a string, or several; the output ends before the first one that appears.
        stop_token_ids: token ids that end the output, in addition to the model's end-of-sequence ids.
        ignore_eos: do not end at end-of-sequence; `stop` and `stop_token_ids` still end it.
        logprobs: at each position, return the log-probabilities of this many most likely tokens, and of the
            chosen one: the model's own, before penalties and temperature.
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
    min_tokens: int = option(0, whole(0))
    stop: str | SequenceOf[str] = option((), texts)
    stop_token_ids: SequenceOf[int] = option((), token_ids)
    ignore_eos: bool = option(False, boolean)
    logprobs: int | None = option(None, optional(whole(0)))
    prompt_logprobs: int | None = option(None, optional(whole(0)))

    @cached_property
    def filters(self) -> tuple[float, ...]:
        """(temperature, top-k, top-p, min-p); a filter that is not set has a value that filters nothing."""
        if self.temperature == 0:
            return 1.0, NO_TOP_K, 1.0, 0.0
        top_k = min(self.top_k, NO_TOP_K) if self.top_k > 0 else NO_TOP_K
        return max(self.temperature, 1e-6), top_k, self.top_p, self.min_p

    @cached_property
    def penalties(self) -> tuple[float, float, float] | None:
        """(repetition, frequency, presence), or None if they change nothing."""
        penalties = self.repetition_penalty, self.frequency_penalty, self.presence_penalty
        return penalties if penalties != (1, 0, 0) else None

    @property
    def width(self) -> int:
        """Sequences that the request will have."""
        return self.n


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams(RequestOptions):
    """Beam search for one request: the same hypotheses and scores as transformers' `generate(num_beams=…)`.

    The outputs are the `beam_width` best texts, best first. A score is the sum of the tokens'
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
    min_tokens: int = option(0, whole(0))
    length_penalty: float = option(1.0, number(-50, 50))  # 10⁶ ** 50 is still a float
    early_stopping: bool | str = option(False, one_of(True, False, "never"))
    ignore_eos: bool = option(False, boolean)
    stop_token_ids: SequenceOf[int] = option((), token_ids)

    # The engine reads these fields of SamplingParams from any params. They are not options of a beam search.
    seed: ClassVar[None] = None
    stop: ClassVar[tuple[str, ...]] = ()
    logprobs: ClassVar[None] = None
    prompt_logprobs: ClassVar[None] = None

    @property
    def width(self) -> int:
        """Sequences that the request will have."""
        return self.beam_width


Params = SamplingParams | BeamSearchParams


# ── names of other engines ─────────────────────────────────────────────────────────────────────────────


def foreign_names(kind: str) -> dict[str, str]:
    """What vLLM, SGLang, nano-vllm and transformers call a thing → our name for it, or a sentence.

    Args:
        kind: "options", "beam_options" (where they differ), "attributes" or "imports".
    """
    return json.loads(Path(__file__).with_name("foreign_names.json").read_text(encoding="utf-8"))[
        kind
    ]


def explain(given: Iterable[str], known: Collection[str], theirs: dict[str, str]) -> str:
    """What to write instead of unknown keywords: 'x': did you mean 'y'?; 'z': its options are …"""
    parts = []
    for name in [name for name in given if name not in known]:
        hint = theirs.get(name, "")
        meant = [hint] if hint in known else get_close_matches(name, known, 1, 0.8)
        if " " not in hint:
            hint = f"did you mean {meant[0]!r}?" if meant else f"its options are {', '.join(known)}"
        parts.append(f"{name!r}: {hint.format(name=name)}")
    return "; ".join(parts)


def hint_for(params: Any) -> str:
    """What to write instead of a dict of params."""
    return f": write SamplingParams(**{params!r})" if isinstance(params, dict) else ""


def with_hints(params: type[Options]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method, so that its error for an unknown keyword says what to write.

    Args:
        params: the class of its params, whose options are not keywords of the method itself.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        known = {name: None for name in inspect.signature(method).parameters if name != "self"}

        @wraps(method)
        def call(*args: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= known.keys():
                name, theirs = getattr(method, "__name__", ""), foreign_names("options")
                theirs |= foreign_names("beam_options") if params is not SamplingParams else {}
                for option, ours in (
                    {each: each for each in params.__dataclass_fields__} | theirs
                ).items():
                    if ours in params.__dataclass_fields__ and option not in known:
                        theirs[option] = (
                            f"put it into the params: {name}(…, {params.__name__}({ours}=…))"
                        )
                raise TypeError(f"{name} has no option {explain(options, known, theirs)}")
            return method(*args, **options)

        return call

    return decorate
