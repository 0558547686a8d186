"""What the scheduler tells the runner to do in a step, and what the runner has to say afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanopaged.block_manager import BlockCopy
from nanopaged.sequence import Request, Sequence
from nanopaged.swap import Move
from nanopaged.text.outputs import Logprobs, Sample


@dataclass(slots=True)
class ScheduledBatch:
    """One step's work; `num_new_tokens` of each sequence says how much of it.

    Those with a single new token stand first: `sequences[:num_decodes]`. Before anything is computed, blocks
    are moved: out, then in, then the copies on write. No block is the destination of two copies, or both
    a source and a destination.
    """

    sequences: list[Sequence] = field(default_factory=list)
    num_decodes: int = 0
    swap_out: list[Move] = field(default_factory=list)  # (device block, host block)
    swap_in: list[Move] = field(default_factory=list)  # (host block, device block)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)  # left the waiting queue for this step
    swapped_out: list[Request] = field(default_factory=list)  # went to it, and to host memory


@dataclass(slots=True)
class StepResult:
    """What the runner found out.

    Fields:
        samples: for each sequence of the batch the tokens drawn to follow it: none if it has not
            caught up; else one; or, when the prompt of a request for n outputs has just been computed,
            n, one for each; or a beam's proposals.
        prompt_logprobs: by request, of the prompt tokens whose turn it was, where asked for.
    """

    samples: list[list[Sample]]
    prompt_logprobs: dict[Request, list[Logprobs]] = field(default_factory=dict)
