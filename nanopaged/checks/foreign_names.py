"""Names that users of vLLM, SGLang, nano-vllm and transformers write out of habit, and what serves here.

An unknown name is an error (nothing is ignored), and the error says what to write. This module knows names
and sentences only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import FrozenInstanceError
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # a type checker's own module

P = ParamSpec("P")
R = TypeVar("R")

LORA = "merge the adapter into the model first (peft: merge_and_unload), or apply docs/forks/lora"
NO_STRUCTURE = "structured output is not supported: ask for it in the prompt, and check the text"
LOGITS = "the place to change logits is nanopaged/sampler.py (docs/13-forks.md)"
TO_BEAMS = "use llm.beam_search(prompts, BeamSearchParams(beam_width=…))"
OF_BEAMS = "it belongs to beam search: BeamSearchParams(beam_width=…, length_penalty=…)"
LEAVE_OUT = "leave it out: "
TEXT_ONLY = "nanopaged generates text only"
TEMPLATE = "use chat_template_kwargs={{'{name}': …}}: the options of transformers' apply_chat_template"

OPTIONS = {  # an option of theirs → one of ours, or a sentence (with a space in it)
    # of the engine
    "gpu_memory_utilization": "memory_utilization",
    "mem_fraction_static": "memory_utilization",
    "num_gpu_blocks_override": "num_blocks",
    "num_kvcache_blocks": "num_blocks",
    "num_cpu_blocks": "num_host_blocks",
    "swap_space": "did you mean 'num_host_blocks'? It is a number of blocks, not GiB; None is at most 4 GiB",
    "kvcache_block_size": "block_size",
    "page_size": "block_size",
    "chunked_prefill_size": "max_num_batched_tokens",
    "max_extend_tokens": "max_num_batched_tokens",
    "model_path": "model",
    "tp_size": "tensor_parallel_size",
    "context_length": "max_model_len",
    "max_seq_len_override": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "disable_radix_cache": "use enable_prefix_caching=False",
    "attn_implementation": "use attention_backend='flash', 'triton' or 'torch'",
    "torch_dtype": "use dtype='bfloat16', or dtype=torch.bfloat16",
    "device_map": "use device='cuda' or 'cpu', and tensor_parallel_size for several GPUs",
    "trust_remote_code": LEAVE_OUT + "no code of a checkpoint is run, and Llama, Qwen2 and Qwen3 need none",
    "tokenizer": LEAVE_OUT + "the tokenizer comes from the model's folder; with another one, give token ids",
    "tokenizer_mode": LEAVE_OUT + "config and tokenizer are transformers' own",
    "config_format": LEAVE_OUT + "config and tokenizer are transformers' own",
    "skip_tokenizer_init": LEAVE_OUT + "give prompts as token ids, and read outputs[0].token_ids",
    "generation_config": LEAVE_OUT + "of it only end-of-sequence ids are read; SamplingParams have the rest",
    "download_dir": "set the environment variable HF_HOME, or give the folder of a downloaded model",
    "revision": "download it first: LLM(huggingface_hub.snapshot_download(model, revision=…))",
    "quantization": "quantised weights are not supported: use the checkpoint in bfloat16 or float16",
    "load_in_4bit": "quantised weights are not supported: use the checkpoint in bfloat16 or float16",
    "kv_cache_dtype": LEAVE_OUT + "K/V has the dtype of the weights; docs/forks/int8kv stores it in 8 bits",
    "speculative_config": "speculative decoding is a fork: apply docs/forks/speculation",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_request"), LORA),
    "disable_log_stats": LEAVE_OUT + "nothing is logged; llm.engine.stats() returns the counts",
    "max_logprobs": LEAVE_OUT + "logprobs may be as many as the vocabulary has tokens",
    "pipeline_parallel_size": LEAVE_OUT + "a model is divided by tensor_parallel_size only",
    "cuda_graph_max_bs": LEAVE_OUT + "enforce_eager=True captures no graphs",
    "task": LEAVE_OUT + TEXT_ONLY,
    "runner": LEAVE_OUT + TEXT_ONLY,
    # of sampling
    "max_new_tokens": "max_tokens",
    "max_length": "did you mean 'max_tokens'? It is the number of tokens to generate, without the prompt",
    "stop_strings": "stop",
    "num_return_sequences": "n",
    "best_of": "did you mean 'n'? The best of the n outputs are those of the highest cumulative_logprob",
    "do_sample": "did you mean 'temperature'? It is 0 for do_sample=False, and above 0 for True",
    "eos_token_id": "did you mean 'stop_token_ids'? It is a list, in addition to the model's own ids",
    "pad_token_id": LEAVE_OUT + "prompts are never padded",
    "use_beam_search": TO_BEAMS,
    "num_beams": TO_BEAMS,
    "length_penalty": OF_BEAMS,
    "early_stopping": OF_BEAMS,
    "skip_special_tokens": LEAVE_OUT + "text has no special tokens; tokenizer.decode(token_ids) shows them",
    "include_stop_str_in_output": LEAVE_OUT + "the text ends before the stop string, which is stop_reason",
    "detokenize": LEAVE_OUT + "text is made when it is read; token_ids are always there",
    "output_kind": LEAVE_OUT + "llm.stream yields the text so far; the new part is text[len(previous):]",
    "truncate_prompt_tokens": "cut the prompt yourself: llm.get_tokenizer().encode(text)[-k:] is a prompt",
    **dict.fromkeys(("structured_outputs", "guided_decoding"), NO_STRUCTURE),
    **dict.fromkeys(("logits_processors", "logit_bias", "bad_words", "allowed_token_ids"), LOGITS),
    # of a call
    "prompt_token_ids": "token ids are prompts: llm.generate([[1, 2, 3]], params)",
    "input_ids": "token ids are prompts: llm.generate(input_ids, params), or the tokenizer's whole output",
    "inputs": "token ids are prompts: llm.generate(input_ids, params), or the tokenizer's whole output",
    "attention_mask": "give the tokenizer's whole output: llm.generate(tokenizer(texts), params)",
    "stream": "use llm.stream(prompt, params): it yields the output after every token",
    "streamer": "use llm.stream(prompt, params): it yields the output after every token",
    "priority": "requests are served in order of arrival; docs/forks/priority adds priorities",
    "params": "sampling_params",
    **dict.fromkeys(
        ("chat_template", "tools", "add_generation_prompt", "continue_final_message", "enable_thinking"),
        TEMPLATE,
    ),
}
BEAM_OPTIONS = {  # where BeamSearchParams need another answer
    "num_beams": "beam_width",
    "n": "use beam_width: all of its texts are returned, best first",
    "temperature": LEAVE_OUT + "beam search draws nothing",
}
ATTRIBUTES = {
    "llm_engine": "use llm.engine",
    "get_default_sampling_params": "use SamplingParams(): generation_config.json gives no defaults here",
    **dict.fromkeys(("encode", "embed", "score", "classify"), TEXT_ONLY),
    **dict.fromkeys(("sleep", "wake_up", "exit", "shutdown"), "`del llm` frees its memory"),
    "get_metrics": "use llm.engine.stats(), and output.metrics",
    "start_profile": "use torch.profiler.profile() around the call",
    "stop_profile": "use torch.profiler.profile() around the call",
    "async_generate": "use generate or stream: several threads may call them at once",
    "tokenizer": "use llm.get_tokenizer()",
    **dict.fromkeys(("to", "cuda", "eval", "half"), "use LLM(model, device=…, dtype=…)"),
    "from_pretrained": "use LLM(model)",
    "from_engine_args": "use LLMEngine(EngineConfig(model, …))",
    "add_cli_args": "use argparse, and EngineConfig(**vars(args))",
    "from_cli_args": "use argparse, and EngineConfig(**vars(args))",
    "sequences": "use output.outputs: their text is the continuation, without the prompt",
    "text": "use output.outputs[0].text",
    "token_ids": "use output.outputs[0].token_ids",
    "tokens": "use token_ids: they are the continuation, without the prompt",
    "cum_logprob": "use cumulative_logprob",
}
NAMES = {  # of the module
    "EngineArgs": "use EngineConfig, and LLMEngine(config)",
    "ServerArgs": "use EngineConfig",
    "Engine": "use LLM",
    **dict.fromkeys(
        ("AsyncLLMEngine", "AsyncLLM", "AsyncEngineArgs"),
        "use LLM.stream, in threads if need be, or LLMEngine.step; docs/forks/server is a server",
    ),
    "LoRARequest": LORA,
    "StructuredOutputsParams": NO_STRUCTURE,
    "GuidedDecodingParams": NO_STRUCTURE,
    "RequestOutputKind": LEAVE_OUT + "llm.stream yields the text so far",
    "TokensPrompt": "use a dict: {'prompt_token_ids': ids}",
    "TextPrompt": "use a dict: {'prompt': text}",
    "FlexibleArgumentParser": "use argparse.ArgumentParser",
    "Counter": "use itertools.count",
    "cleanup_dist_env_and_memory": LEAVE_OUT + "`del llm` frees its memory",
}


def options_of(options: type) -> dict[str, str]:
    """`OPTIONS` for this class of ours."""
    return OPTIONS | BEAM_OPTIONS if options.__name__ == "BeamSearchParams" else dict(OPTIONS)


def explain(unknown: Iterable[str], known: Collection[str], theirs: dict[str, str]) -> str:
    """What to write instead of these keywords: 'x': did you mean 'y'?; 'z': its options are …"""
    parts = []
    for name in unknown:
        hint = theirs.get(name, "")
        meant = [hint] if hint in known else get_close_matches(name, known, 1, 0.8)
        if " " in hint:
            parts.append(f"{name!r}: {hint.format(name=name)}")
        elif meant:
            parts.append(f"{name!r}: did you mean {meant[0]!r}?")
        else:
            parts.append(f"{name!r}: its options are {', '.join(known)}")
    return "; ".join(parts)


def with_hints(params: type[DataclassInstance]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a method, so that its error for an unknown keyword says what to write.

    Args:
        params: the class of its params, whose options are not keywords of the method itself.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        called = getattr(method, "__name__", "")
        known = [name for name in inspect.signature(method).parameters if name != "self"]
        theirs = options_of(params)
        for name in {*theirs, *params.__dataclass_fields__} - set(known):
            ours = theirs.get(name, name)
            if ours in params.__dataclass_fields__:
                theirs[name] = f"put it into the params: {called}(…, {params.__name__}({ours}=…))"

        @wraps(method)
        def call(*args: P.args, **options: P.kwargs) -> R:
            unknown = [name for name in options if name not in known]
            if unknown:
                raise TypeError(f"{called} has no option {explain(unknown, known, theirs)}")
            return method(*args, **options)

        return call

    return decorate


class ForeignAttributes:
    """A class whose errors for another library's attributes say what serves here."""

    __slots__ = ()

    if not TYPE_CHECKING:  # type checkers should still know the attributes

        def __getattr__(self, name: str) -> NoReturn:
            hint = f": {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

        def __getitem__(self, key: object) -> NoReturn:  # output["text"]
            hint = f": {ATTRIBUTES[key]}" if isinstance(key, str) and key in ATTRIBUTES else ""
            raise TypeError(f"{type(self).__name__!r} object is not a dict or a list{hint}")


def refuse_change(options: object, name: str, value: object) -> NoReturn:
    """`__setattr__` of options: they are frozen, because a request that runs must not change."""
    raise FrozenInstanceError(
        f"{type(options).__name__} cannot be changed: dataclasses.replace(params, {name}={value!r}) makes a "
        "changed copy"
    )


def explain_import(name: str) -> str | None:
    """What to import instead of a name of another library's; None if it is not known."""
    return f"cannot import {name!r} from 'nanopaged': {NAMES[name]}" if name in NAMES else None
