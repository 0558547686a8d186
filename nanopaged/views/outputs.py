"""What a user gets of a request: its outputs so far, as plain data that the engine does not change again."""

from __future__ import annotations

from nanopaged.sequence import Request, Sequence
from nanopaged.text.outputs import CompletionOutput, RequestMetrics, RequestOutput


def request_output(request: Request) -> RequestOutput:
    """The outputs so far, see `RequestOutput`."""
    times = request.arrival_time, request.first_token_time, request.finish_time
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None if request.prompt_logprobs is None else list(request.prompt_logprobs),
        outputs=[completion_output(seq) for seq in request.sequences],
        finished=request.finished,
        metrics=RequestMetrics(*times, request.num_cached_tokens or 0, request.num_preemptions),
    )


def completion_output(seq: Sequence) -> CompletionOutput:
    """The output of one sequence so far, see `CompletionOutput`."""
    token_ids, text = seq.token_ids[seq.request.num_prompt_tokens :], ""
    if seq.detokenizer is not None:
        stopped_by_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        shown = token_ids[:-1] if stopped_by_token else token_ids  # a stop token is not part of the text
        text = seq.detokenizer.visible(shown, seq.finish_reason is not None)
    return CompletionOutput(
        index=seq.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=seq.cumulative_logprob,
        logprobs=list(seq.logprobs) if seq.request.params.logprobs is not None else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
        score=seq.score,
    )
