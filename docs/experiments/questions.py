"""What paging does for 60 real questions: steps at equal memory, shared blocks, and tokens computed.

    python docs/experiments/questions.py

A chat model, SmolLM2-135M-Instruct (real_model.py), answered each question greedily in float32, until its
answer ended or had 160 tokens (questions.py of commit f2a2530 with --model). QUESTIONS has the lengths, which
go through the real scheduler and block manager without the model. At equal memory, five rules say when a
request may start (PagedAttention, §6.2):

    max      a range of slots is free for the longest text possible, 2,048 tokens
    limit    a range for the prompt and max_tokens, the most that this answer may have
    pow2     a range for the prompt, and for the answer's length rounded up to a power of two (at most 160)
    oracle   a range for exactly the prompt and the answer, as if the answer's length were known
    paging   the engine's own: blocks for the prompt are free, and the answer takes more as it grows
"""

from __future__ import annotations

import random
from typing import Any

from lib.common import make_parser
from lib.no_model import (
    KINDS,
    Lengths,
    NoModel,
    Reserve,
    Run,
    make_request,
    make_scheduler,
    run_contiguous,
    serve_all,
)

from nanopaged import SamplingParams
from nanopaged.scheduler import Scheduler
from nanopaged.terminal import run_program

MAX_TOKENS = 160
BLOCK_SIZE = 16
NUM_COMMON = 24  # tokens with which every prompt begins: the chat template's own system prompt
NUM_COMMON_WITH_SYSTEM = 309  # with rules of a library in its place

# Tokens of the prompt, of the answer, and of the answer to the same question after those rules.
QUESTIONS = [
    (37, 8, 8, "What is the capital of Australia?"),
    (39, 25, 160, "How many days are in a leap year?"),
    (36, 160, 160, "Who wrote Romeo and Juliet?"),
    (40, 12, 20, "What is 17 plus 25?"),
    (35, 61, 12, "Name three primary colours."),
    (39, 13, 53, 'Translate "good morning" into French.'),
    (39, 65, 30, "Is a tomato a fruit or a vegetable?"),
    (39, 53, 12, 'What is the opposite of "ancient"?'),
    (38, 24, 10, "Which planet is closest to the sun?"),
    (39, 33, 10, 'Spell the word "necessary" backwards.'),
    (36, 160, 160, "Why is the sky blue?"),
    (38, 160, 97, "How does a refrigerator keep food cold?"),
    (38, 160, 160, "What causes the tides of the ocean?"),
    (38, 160, 160, "Explain photosynthesis to a child of eight."),
    (38, 160, 160, "Why do leaves change colour in autumn?"),
    (38, 101, 108, "How do vaccines protect people from disease?"),
    (39, 160, 160, "What is the difference between weather and climate?"),
    (40, 160, 160, "How does a bicycle stay upright while it moves?"),
    (42, 160, 160, "Why is sea water salty, although rivers carry fresh water?"),
    (42, 160, 160, "What happens to a candle's wax when the candle burns?"),
    (42, 160, 160, "Write a short poem about the first snow of the year."),
    (42, 160, 160, "Write a birthday message for my grandmother, who likes gardening."),
    (45, 160, 157, "Write a polite e-mail that asks for an appointment at the dentist."),
    (42, 160, 160, "Tell me a story about a fox that learns to swim."),
    (42, 18, 31, "Write two sentences about Paris that begin with the same letter."),
    (41, 160, 160, "Describe the smell of a bakery early in the morning."),
    (40, 56, 84, "Write a Python function that reverses a string."),
    (43, 107, 141, "Write a Python function that returns the largest number in a list."),
    (43, 160, 160, "How do I read a text file line by line in Python?"),
    (41, 160, 160, 'What does the keyword "yield" do in Python?'),
    (41, 160, 160, "What is the difference between a list and a tuple?"),
    (42, 105, 25, "Write an SQL query that counts the customers in each city."),
    (43, 160, 160, "What is a binary search, and when can it be used?"),
    (41, 160, 160, "Explain recursion with the factorial of 5."),
    (39, 160, 160, "Give me a recipe for pancakes without eggs."),
    (44, 157, 23, "How long should I boil an egg so that the yolk stays soft?"),
    (41, 160, 8, "What can I cook with potatoes, onions and cheese?"),
    (44, 160, 160, "How do I remove a red wine stain from a white tablecloth?"),
    (41, 160, 160, "Which vegetables can I plant on a balcony in April?"),
    (40, 160, 160, "How do I choose running shoes for a beginner?"),
    (44, 160, 160, "What should I pack for a three-day hike in the mountains?"),
    (38, 136, 65, "Give me five tips for sleeping better."),
    (41, 160, 160, "How can I remember the names of people I meet?"),
    (42, 160, 160, "How do I prepare for a job interview in one evening?"),
    (41, 160, 160, "What is a good way to save money each month?"),
    (42, 160, 160, "Should I learn to play the piano or the guitar first?"),
    (42, 160, 160, "Who was Marie Curie, and what did she discover?"),
    (36, 160, 160, "What was the Silk Road?"),
    (44, 74, 160, "When did people first land on the moon, and who were they?"),
    (37, 114, 160, "Why did the Roman Empire fall?"),
    (38, 42, 75, "What is the longest river in Africa?"),
    (40, 20, 160, "What are the main parts of a plant cell?"),
    (40, 25, 41, "How far away is the moon from the earth?"),
    (53, 118, 160, "If a train travels 60 kilometres in 45 minutes, "
                   "what is its speed in kilometres per hour?"),
    (52, 106, 48, "A shirt costs 40 euros and is reduced by 15 percent. What does it cost now?"),
    (46, 22, 15, "Sort these words alphabetically: pear, apple, fig, cherry, banana."),
    (49, 15, 16, "Summarise: The meeting was moved from Monday to Thursday, because two speakers are ill."),
    (45, 55, 50, "Correct the grammar: She don't like going to school by the bus."),
    (43, 31, 48, 'Is the sentence "I love this film" positive or negative?'),
    (46, 95, 160, 'Give three synonyms for "quick" and use each of them in a sentence.'),
]  # fmt: skip
Question = tuple[int, int, int, str]


def lengths_of(questions: list[Question], with_system: bool) -> Lengths:
    """(prompt, answer) tokens of each question."""
    lengths = []
    for num_prompt, num_answer, num_answer_with_system, _ in questions:
        if with_system:
            num_prompt += NUM_COMMON_WITH_SYSTEM - NUM_COMMON
            num_answer = num_answer_with_system
        lengths.append((num_prompt, num_answer))
    return lengths


def main() -> None:
    make_parser(__doc__).parse_args()
    compare_pools()
    compare_prefix_caching()
    compare_preemption()


RULES: dict[str, Reserve] = {
    "max": lambda num_prompt, num_answer: 2048,
    "limit": lambda num_prompt, num_answer: num_prompt + MAX_TOKENS,
    "pow2": lambda num_prompt, num_answer: num_prompt + min(MAX_TOKENS, 1 << (num_answer - 1).bit_length()),
    "oracle": lambda num_prompt, num_answer: num_prompt + num_answer,
}


def compare_pools() -> None:
    """Steps in pools of three sizes, and what the slots of the smallest one are while a request waits."""
    lengths = lengths_of(QUESTIONS, with_system=False)
    num_prompt = sum(num_prompt for num_prompt, _ in lengths)
    num_answer = sum(num_answer for _, num_answer in lengths)
    print(f"{len(lengths)} questions, {num_prompt:,} tokens in prompts, {num_answer:,} in answers")
    kinds = "".join(f"{kind:>10}" for kind in KINDS)
    print("          steps in pools of           slots of the first pool while a request waits")
    print(f"          3,200   6,400  16,000{kinds}   at once")
    for rule in (*RULES, "paging"):
        runs = []
        for num_slots in (3200, 6400, 16000):
            if rule == "paging":
                scheduler = make_scheduler(num_slots // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
                runs.append(serve(scheduler, lengths))
            else:
                runs.append(run_contiguous(lengths, num_slots, RULES[rule]))
        steps = "".join(f"{run.num_steps:8,}" for run in runs)
        shares = "".join(f"{share:10.1%}" for share in runs[0].shares.values())
        print(f"{rule:7}{steps}{shares}{runs[0].at_once:10.1f}")


def serve(scheduler: Scheduler, lengths: Lengths, num_common: int = 0) -> Run:
    """Serve requests. Tokens do not matter, except where prompts are equal: the first ones."""
    rng = random.Random(0)
    for i, (num_prompt, num_answer) in enumerate(lengths):
        prompt = [0] * num_common + rng.choices(range(1, 32000), k=num_prompt - num_common)
        scheduler.add(make_request(str(i), prompt, SamplingParams(max_tokens=num_answer)))
    return serve_all(scheduler, NoModel())


def replay(questions: list[Question], num_blocks: int, with_system: bool = False, **options: Any) -> Run:
    """Serve the questions with an engine's defaults."""
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "watermark": 0.05}
    scheduler = make_scheduler(num_blocks, BLOCK_SIZE, **limits, **options)
    num_common = NUM_COMMON_WITH_SYSTEM if with_system else NUM_COMMON
    return serve(scheduler, lengths_of(questions, with_system), num_common)


def compare_prefix_caching() -> None:
    """The prefix cache, where all questions follow a system prompt."""
    print("\nafter the system prompt    computed   peak blocks   steps in 100 blocks")
    for name, enabled in (("without prefix cache", False), ("with prefix cache", True)):
        ample = replay(QUESTIONS, num_blocks=10_000, with_system=True, enable_prefix_caching=enabled)
        small = replay(QUESTIONS, num_blocks=100, with_system=True, enable_prefix_caching=enabled)
        print(f"{name:27}{ample.num_computed:8,}{ample.peak:14,}{small.num_steps:22,}")


def compare_preemption() -> None:
    """Both modes of preemption, in a pool for a few requests."""
    print("\n60 blocks                          steps   computed   preempted   requests at once")
    for enabled in (True, False):
        for preemption in ("recompute", "swap"):
            run = replay(QUESTIONS, num_blocks=60, enable_prefix_caching=enabled, preemption=preemption)
            name = f"{preemption}, {'with' if enabled else 'without'} prefix cache"
            counts = f"{run.num_steps:8,}{run.num_computed:11,}{run.num_preempted:12}"
            print(f"{name:32}{counts}{run.at_once:19.1f}")


if __name__ == "__main__":
    run_program(main)
