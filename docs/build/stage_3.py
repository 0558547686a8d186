"""Stage 3 of docs/build/rebuild.py."""

from stages import Stage

FILE = "nanopaged/scheduler.py"
SUITE = (  # what holds with the blocks of stage 2: one sequence, nothing found in the prefix cache
    "decodes_and_prompt_chunks_share_a_step",
    "a_stream_of_arrivals_does_not_starve_a_decode",
    "an_empty_engine_admits_a_request_that_needs_every_block",
    "the_latest_is_preempted_and_says_the_same_in_the_end",
    "several_victims_resume_in_order_of_arrival",
    "without_chunks_a_prompt_waits_until_a_step_has_room_for_it",
)

STAGE = Stage(
    title="the scheduler's one rule",
    chapter="04-scheduling.md",
    functions=((FILE, "Scheduler._schedule_tokens"), (FILE, "Scheduler.schedule")),
    suite=tuple(f"tests/engine/test_scheduler.py::test_{name}" for name in SUITE),
    hints=(
        "`_schedule_tokens` is a loop over `request.live`. What a sequence gets is the smaller of two "
        "numbers: the tokens that it has not computed, and what is left of the budget.",
        "A sequence that waits makes its siblings after it wait, too. So the loop ends at the first one that "
        "gets less than it wants because of the budget; without chunked prefill such a one gets nothing.",
        "A block becomes full in this step if the number of full blocks before it, computed // block_size, "
        "is smaller than after it, (computed + scheduled) // block_size. Then call `publish`.",
        "`schedule` has two loops, both while budget is left. The first goes over `self.running` with an "
        "index: the list can become shorter at its end while you are in it.",
        "In the first loop, try `append_slots`. On None, pop the last running request, preempt it, and try "
        "the same request again. The loop ends by itself if the popped request was that one.",
        "The second loop goes over `self.waiting`. Leave it if the limit of sequences would be passed or "
        "`_admit` returns False. Then take the admitted requests, the first of the list, out of `waiting`.",
    ),
)
