"""Exercise 4.3, prefill always wins: see docs/book/04-scheduling.md."""

import random

Arrivals = dict[int, list[tuple[str, int, int]]]  # step → (name, prompt tokens, output tokens) before it


def prefill_first(arrivals: Arrivals, budget: int, num_steps: int) -> list[dict[str, int]]:
    """For each step, how many tokens of each request are computed. A request of which none are is left out.

    While there are prompt tokens to compute, a step computes those, in order of arrival, and nothing else. In
    the other steps each request whose prompt is computed gets one token, in order of arrival, as far as the
    budget reaches. No request ends.
    """
    raise NotImplementedError


# ── the check ─────────────────────────────────────────────────────────────────────────────────────


def test_each_step() -> None:
    rng = random.Random(0)
    for _ in range(30):
        arrivals = {
            step: [(f"{step}{name}", rng.randint(1, 12), 9) for name in "ab"[: rng.randint(1, 2)]]
            for step in sorted(rng.sample(range(1, 9), 3))
        }
        budget = rng.randint(1, 16)
        steps = prefill_first(arrivals, budget, 10)
        call = f"prefill_first({arrivals}, {budget}, 10)"
        assert len(steps) == 10, f"{call} has {len(steps)} steps."
        prompts, decoding = {}, []
        for number, step in enumerate(steps, 1):
            prompts |= {name: num_prompt for name, num_prompt, _ in arrivals.get(number, [])}
            wanted, rest = {}, budget
            for name in [*prompts] or decoding:
                num_tokens = min(prompts.get(name, 1), rest)
                if num_tokens > 0:
                    wanted[name] = num_tokens
                rest -= num_tokens
            why = f"the prompts {prompts} wait" if prompts else f"{decoding} decode and no prompt waits"
            assert step == wanted, f"{call}: step {number} computes {step}, not {wanted} ({why})."
            for name in [name for name in prompts if name in wanted]:
                prompts[name] -= wanted[name]
                if prompts[name] == 0:
                    del prompts[name]
                    decoding.append(name)


def test_a_stream_of_prompts() -> None:
    arrivals = {1: [("first", 4, 30)]} | {step: [(f"late {step}", 40, 5)] for step in range(2, 22)}
    steps = prefill_first(arrivals, 32, 21)
    num = sum("first" in step for step in steps[1:])
    assert num == 0, (
        f"With a prompt of 40 tokens before each step, `first` gets a token in {num} of 20 steps, not in 0."
    )
