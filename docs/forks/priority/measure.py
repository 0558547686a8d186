"""Steps to the first token of 8 urgent requests among 64 ordinary ones, without a model.

PYTHONPATH=.:docs/experiments python docs/forks/priority/measure.py
"""

from __future__ import annotations

from random import Random

from no_model import NoModel, make_request, make_scheduler
from priority import SamplingParams

from nanopaged.sequence import Request


def serve(fork: str | None) -> str:
    """Serve all, and say how long they waited."""
    draw, runner, first = Random(1).randint, NoModel(), dict[Request, int]()
    scheduler = make_scheduler(
        400, 16, max_num_seqs=32, max_num_batched_tokens=512, watermark=0.05, fork=fork
    )
    coming, requests = [(0, 0)] * 64 + [(20 + 25 * i, -1) for i in range(8)], []  # (step, priority)
    for i, (arrival, priority) in enumerate(coming):
        params = SamplingParams(max_tokens=20 if priority else draw(20, 200), priority=priority)
        requests.append(make_request(str(i), [draw(0, 9999) for _ in range(draw(20, 200))], params))
        requests[-1].arrival_time = arrival + i / 1000
    step = 0
    while any(request.live for request in requests):
        for request, (arrival, _) in zip(requests, coming, strict=True):
            if arrival == step:
                scheduler.add(request)
        batch, step = scheduler.schedule(), step + 1
        for request in scheduler.update(batch, runner.execute(batch)):
            first.setdefault(request, step - int(request.arrival_time))
    parts = []
    for name, part in {"urgent": requests[64:], "others": requests[:64]}.items():
        waits = [first[request] for request in part]
        times = sum(request.num_preemptions for request in part)
        parts.append(f"{name}: mean {sum(waits) / len(waits):.1f}, worst {max(waits)}, preempted {times}")
    return "    ".join(parts)


if __name__ == "__main__":
    print("without the fork   ", serve(None))
    print("with it            ", serve(f"{__file__.rpartition('/')[0]}/priority.py"))
