"""The waiting queue: the first request by any rank, in the same time however long the queue is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any

from nanopaged.sequence import Request


class WaitingQueue(OrderedDict[str, Request]):
    """The waiting requests by id, in order of arrival, preempted ones first. `first` is the first by rank.

    A heap holds their ranks, so a step takes the same time however long the queue is. A rank is computed when
    a request begins to wait. If the rank of the first request has changed since, all ranks are computed
    again: a rank that changes from step to step is followed, but each step then takes a time that grows with
    the queue ("The waiting queue" in docs/benchmarks.md). If the rank of another request alone becomes
    better, this is noticed only when all ranks are computed again; `rank_again` does that.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[Any, int, Request]] = []  # (rank, place, request); the first is the smallest
        self._unranked: list[tuple[int, Request]] = []  # have come since the last step
        self._last, self._front = count(1), count(-1, -1)  # places among equal ranks: 1 2 3 …, -1 -2 -3 …

    def add(self, request: Request) -> None:
        """Behind all others."""
        self[request.request_id] = request
        self._unranked.append((next(self._last), request))

    def put_back(self, request: Request) -> None:
        """Before all others: it was preempted."""
        self[request.request_id] = request
        self.move_to_end(request.request_id, last=False)
        self._unranked.append((next(self._front), request))

    def update_ranks(self, rank: Callable[[Request], Any]) -> None:
        """Before a step: rank the requests that have come, or all of them if the first one's rank changed."""
        for place, request in self._unranked:
            heappush(self._heap, (rank(request), place, request))
        self._unranked = []
        if self and (rank(self.first()) != self._heap[0][0] or len(self._heap) > 2 * len(self)):
            self.rank_again(rank)

    def rank_again(self, rank: Callable[[Request], Any]) -> None:
        """Compute all ranks, and forget the requests that were aborted."""
        self._heap = [(rank(r), place, r) for _, place, r in self._heap if self.get(r.request_id) is r]
        heapify(self._heap)

    def first(self) -> Request:
        """The first request. There must be one."""
        while self.get(self._heap[0][2].request_id) is not self._heap[0][2]:  # it was aborted
            heappop(self._heap)
        return self._heap[0][2]

    def take_first(self) -> None:
        """Remove the first request: it is admitted."""
        _, _, request = heappop(self._heap)
        del self[request.request_id]

    def discard(self, request: Request) -> bool:
        """Remove a request, if it waits. Returns whether it did."""
        return self.pop(request.request_id, None) is not None
