"""The progress bar of `LLM.generate`: prompts done, and tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request


@contextmanager
def progress_bar(
    requests: list[Request], queued: dict[str, Request], scheduler: Scheduler, use_tqdm: bool
) -> Iterator[Callable[[], bool]]:
    """A function that shows how many requests are finished, and returns whether one is not.

    Args:
        queued: all unfinished requests of the engine by id; now those of other calls.
    """
    num_others, tokens_before = len(queued), scheduler.num_generated_tokens
    num_done = 0  # of the first ones; looking at all of them after each step would take long
    options = {} if use_tqdm else {"disable": True}  # without the option, TQDM_DISABLE=1 counts
    with tqdm(total=len(requests), desc="Generating", unit="prompt", **options) as bar:

        def show() -> bool:
            nonlocal num_done
            while num_done < len(requests) and requests[num_done].finished:
                num_done += 1
            bar.update(max(num_done, len(requests) - max(0, len(queued) - num_others)) - bar.n)
            tokens, seconds = scheduler.num_generated_tokens - tokens_before, bar.format_dict["elapsed"]
            bar.set_postfix_str(f"{tokens / max(seconds, 1e-6):.0f} tokens/s", refresh=False)
            return num_done < len(requests)

        yield show
