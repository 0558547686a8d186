"""Failures of a step that are the fault of one request."""

from __future__ import annotations


class NonFiniteLogits(FloatingPointError):
    """The model's logits for a request are not finite. The engine can go on without it.

    Attributes:
        request_id: of the request, for `LLMEngine.abort_request`.
    """

    def __init__(self, request_id: str, position: int) -> None:
        super().__init__(request_id, position)  # so that it can be pickled
        self.request_id, self.position = request_id, position

    def __str__(self) -> str:
        return (
            f"the model's logits for request {self.request_id!r} at position {self.position} are not finite: "
            "abort the request, or use a dtype with a wider range"
        )


class NoTokenAllowed(NonFiniteLogits):
    """Every token of the vocabulary is banned for a request, or masked. The engine can go on without it."""

    def __str__(self) -> str:
        return (
            f"no token is allowed for request {self.request_id!r} at position {self.position}: its banned "
            "tokens or its mask leave none of the vocabulary; abort the request, or allow a token"
        )
