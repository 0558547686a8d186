"""The progress bar of `LLM.generate`: prompts done, and tokens per second."""

from __future__ import annotations

from types import TracebackType

from tqdm.auto import tqdm

from nanopaged.scheduler import Scheduler
from nanopaged.sequence import Request


class Progress:
    """A bar for `requests`.

    Args:
        queued: all unfinished requests of the engine by id, these and others.
    """

    def __init__(
        self, requests: list[Request], queued: dict[str, Request], scheduler: Scheduler, use_tqdm: bool
    ) -> None:
        self.requests, self.queued, self.scheduler = requests, queued, scheduler
        self.num_others, self.tokens_before = len(queued), scheduler.num_generated_tokens
        self.num_done = 0  # of the first ones; looking at all of them in each step would take long
        options = {} if use_tqdm else {"disable": True}  # without the option, TQDM_DISABLE=1 counts
        self.bar = tqdm(total=len(requests), desc="Generating", unit="prompt", **options)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()

    def update(self) -> bool:
        """Show the state after a step. Returns whether a request is unfinished."""
        num, bar = len(self.requests), self.bar
        while self.num_done < num and self.requests[self.num_done].finished:
            self.num_done += 1
        if self.num_done < num:
            bar.update(max(self.num_done, num - max(0, len(self.queued) - self.num_others)) - bar.n)
        else:
            bar.update(num - bar.n)
        tokens = self.scheduler.num_generated_tokens - self.tokens_before
        rate = tokens / max(bar.format_dict["elapsed"], 1e-6)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        return self.num_done < num
