"""Steps until the first token of urgent requests among ordinary ones, by scheduling policy. Without a model.

git apply docs/forks/priority/priority.patch
PYTHONPATH=docs/experiments python docs/forks/priority/measure.py
"""

from __future__ import annotations

import random
from itertools import count

from no_model import NoModel, make_request, make_scheduler

from nanopaged import SamplingParams
from nanopaged.scheduler import by_priority
from nanopaged.sequence import Request


def run(policy: str) -> tuple[list[int], list[int], int, int]:
    """64 ordinary requests at step 0, and an urgent one in every 25th step from step 20 on.

    Returns:
        steps until the first token, of the urgent and of the ordinary requests; preemptions; all steps.
    """
    rng, runner, clock = random.Random(1), NoModel(), count()
    scheduler = make_scheduler(400, 16, max_num_seqs=32, max_num_batched_tokens=512, watermark=0.05)
    if policy != "fcfs":
        scheduler.rank = by_priority()
        scheduler.preempts_on_arrival = policy == "priority"
    asked = [(0, 1)] * 64 + [(20 + 25 * i, 0) for i in range(8)]  # (step of arrival, priority)
    requests: list[Request] = []
    for arrival, priority in asked:
        prompt = [rng.randrange(32000) for _ in range(rng.randint(20, 200))]
        params = SamplingParams(max_tokens=rng.randint(20, 200) if priority else 20)
        request = make_request(f"{arrival}-{len(requests)}", prompt, params)
        request.priority, request.arrival_time = priority, next(clock)
        requests.append(request)
    first: dict[Request, int] = {}
    step = 0
    while any(request.live for request in requests):
        for request, (arrival, _) in zip(requests, asked, strict=True):
            if arrival == step:
                scheduler.add(request)
        batch = scheduler.schedule()
        for request in scheduler.update(batch, runner.execute(batch)):
            first.setdefault(request, step)
        step += 1
    waits = [first[request] - arrival + 1 for request, (arrival, _) in zip(requests, asked, strict=True)]
    return waits[64:], waits[:64], sum(request.num_preemptions for request in requests), step


if __name__ == "__main__":
    print("| policy | urgent: mean | worst | ordinary: mean | worst | preemptions | all steps |")
    for policy in ("fcfs", "priority, no preemption on arrival", "priority"):
        urgent, ordinary, num_preemptions, num_steps = run(policy)
        waits = [f"{sum(w) / len(w):.1f} | {max(w)}" for w in (urgent, ordinary)]
        print(f"| {policy} | {waits[0]} | {waits[1]} | {num_preemptions} | {num_steps} |")
