"""Turns: several threads and streams use one engine, and no error or Ctrl-C leaves a request behind.

A thread holds `lock` while it steps the engine, and every step serves the requests of all threads. A call
that ends early, by an error, Ctrl-C or a loop that is left, has its unfinished requests aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from threading import Lock

from nanopaged.checks.failures import NonFiniteLogits
from nanopaged.engine import LLMEngine
from nanopaged.sequence import Request
from nanopaged.text.outputs import RequestOutput
from nanopaged.views.outputs import request_output

logger = logging.getLogger("nanopaged")


class Turns:
    """The turns of the calls of one `LLM`.

    Attributes:
        lock: who holds it may use the engine. Only `with` takes it, so that no Ctrl-C leaves it taken.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.lock = Lock()
        self._count = count()
        self._dropped: list[Request] = []  # of calls that have ended; to be aborted

    def new_id(self) -> str:
        """An id that no unfinished request has. (With the lock.)"""
        return next(name for i in self._count if (name := f"llm-{i}") not in self.engine.requests)

    @contextmanager
    def serving(self, requests: list[Request]) -> Iterator[None]:
        """However the code inside `with` ends, unfinished requests are aborted."""
        try:
            yield
        finally:
            queued = self.engine.requests
            self.abort([request for request in requests if queued.get(request.request_id) is request])

    def abort(self, requests: list[Request]) -> None:
        """Abort requests; but while another call uses the engine, leave them to the end of that call.

        That may be a call of this very thread: Python's garbage collector, which closes a dropped generator,
        can run in the middle of a step.
        """
        self._dropped += requests
        while self._dropped and not self.lock.locked():
            # A second Ctrl-C must not leave some of them queued.
            with self.lock, suppress(KeyboardInterrupt):
                while self._dropped:
                    request = self._dropped[0]
                    if self.engine.requests.get(request.request_id) is request:
                        self.engine.abort_request(request.request_id)
                    self._dropped.remove(request)

    def queue(self, request: Request) -> None:
        """Queue a request whose call looks at it itself. (With the lock.)"""
        request.is_polled = True
        self.engine.queue(request)

    def step(self, mine: list[Request]) -> None:
        """A step of the engine. If the logits of another call's request are not finite, that call fails.

        (With the lock.)
        """
        try:
            self.engine.step(with_outputs=False, keep=True)
        except NonFiniteLogits as error:
            request = self.engine.requests[error.request_id]
            if request in mine:
                raise
            self.engine.abort_request(error.request_id)
            request.error = error
            if not request.is_polled:  # its owner gets its output from the next step of the engine
                logger.warning("%s", error)
                self.engine.requests[error.request_id] = request
                self.engine.scheduler.unreported.append(request)

    def stream(self, request: Request) -> Generator[RequestOutput]:
        """Queue a request and yield its state after every step that gave it a token. (Takes the lock.)"""
        with self.serving([request]):
            with self.lock:
                request.request_id = self.new_id()
                self.queue(request)
            num_shown, output = 0, None
            while output is None or not output.finished:
                with self.lock:
                    if not request.finished:  # a step of another stream may have finished it
                        self.step([request])
                    output = request_output(request)
                self.abort([])
                if request.error is not None:
                    raise request.error
                num_tokens = sum(len(completion.token_ids) for completion in output.outputs)
                if num_tokens > num_shown or output.finished:
                    num_shown = num_tokens
                    yield output
