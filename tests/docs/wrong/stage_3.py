"""Solutions of stage 3 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: decodes and prefills in the reverse order
replace("Scheduler._schedule_tokens", ".insert(batch.num_decodes, seq)", ".insert(0, seq)")
replace("Scheduler._schedule_tokens", ".append(seq)", ".insert(batch.num_decodes, seq)")
# wrong: at most two victims in a step
replace("Scheduler.schedule", "if copies is None:", "if copies is None and len(batch.preempted) < 2:")
replace("Scheduler.schedule", "batch.moves.copies += copies", "batch.moves.copies += copies or []")
# wrong: at most 64 running requests
replace("Scheduler.schedule", "if budget == 0 or", "if budget == 0 or len(self.running) >= 64 or")
# wrong: chunked prefill is switched off for good
replace(
    "Scheduler.schedule",
    "return batch",
    "self.enable_chunked_prefill &= len(self.waiting) < 5\n        return batch",
)

# wrong: no waiting request is admitted
replace("Scheduler.schedule", "for request in self.waiting:", "for request in self.waiting[:0]:")
