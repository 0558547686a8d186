"""Solutions of stage 3 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: sums and lists are made again where they are needed


class Scheduler:
    def schedule(self) -> ScheduledBatch:
        batch = ScheduledBatch()

        def scheduled() -> int:
            return sum(seq.num_scheduled_tokens for seq in batch.sequences)

        for request in tuple(self.running):
            if scheduled() == self.max_num_batched_tokens or request not in self.running:
                continue
            copies = self.block_manager.append_slots(request.live)
            while copies is None:
                victim = self.running[-1]
                self.running = self.running[:-1]
                self._preempt(victim, batch)
                if victim is request:
                    break
                copies = self.block_manager.append_slots(request.live)
            if copies is not None:
                batch.moves.copies.extend(copies)
                self._schedule_tokens(request, self.max_num_batched_tokens - scheduled(), batch)

        while len(self.waiting) > 0:
            request = self.waiting[0]
            rest = self.max_num_batched_tokens - scheduled()
            if rest == 0 or sum(each.num_seqs for each in [*self.running, request]) > self.max_num_seqs:
                break
            if self._admit(request, rest, batch) is False:
                break
            self.waiting.remove(request)
            self._schedule_tokens(request, rest, batch)

        return batch

    def _schedule_tokens(self, request: Request, budget: int, batch: ScheduledBatch) -> int:
        for seq in request.live:
            seq.num_scheduled_tokens = 0
        for seq in request.live:
            wanted = seq.num_tokens - seq.num_computed_tokens
            given = 0
            if self.enable_chunked_prefill or wanted <= budget:
                while given < wanted and budget > 0:
                    given += 1
                    budget -= 1
            seq.num_scheduled_tokens = given
            if given > 0:
                batch.sequences = sorted([*batch.sequences, seq], key=lambda s: s.num_scheduled_tokens > 1)
                batch.num_decodes = sum(s.num_scheduled_tokens == 1 for s in batch.sequences)
                self.block_manager.publish(seq)
            if given < wanted:
                return budget
        return budget


# right: decodes and prefills in the reverse order
class Scheduler:
    def _schedule_tokens(self, request, budget, batch):
        rest = right(self, request, budget, batch)
        decodes = batch.sequences[: batch.num_decodes]
        prefills = batch.sequences[batch.num_decodes :]
        batch.sequences = decodes[::-1] + prefills[::-1]
        return rest


# wrong: at most two victims in a step
class Scheduler:
    def schedule(self):
        append_slots = self.block_manager.append_slots
        refusals = []

        def lenient(sequences):
            copies = append_slots(sequences)
            refusals.append(copies is None)
            return [] if copies is None and sum(refusals) > 2 else copies

        self.block_manager.append_slots = lenient
        batch = right(self)
        del self.block_manager.append_slots
        return batch


# wrong: at most 64 running requests
class Scheduler:
    def schedule(self):
        limit, self.max_num_seqs = self.max_num_seqs, min(64, self.max_num_seqs)
        batch = right(self)
        self.max_num_seqs = limit
        return batch


# wrong: chunked prefill is switched off for good
class Scheduler:
    def schedule(self):
        batch = right(self)
        self.enable_chunked_prefill &= len(self.waiting) < 5
        return batch


# wrong: no waiting request is admitted
class Scheduler:
    def schedule(self):
        waiting, self.waiting = self.waiting, []
        batch = right(self)
        self.waiting = waiting
        return batch


# wrong: a waiting request overtakes
replace(
    "Scheduler.schedule",
    "not self._admit(_request, _budget, _batch)",
    "not self._admit(_request, _budget, _batch) and len(self.waiting) < 2",
)
# wrong: the first running request is preempted
replace("Scheduler.schedule", "self.running.pop()", "self.running.pop(0)")


# wrong: publish before num_scheduled_tokens is set
class Scheduler:
    def _schedule_tokens(self, request, budget, batch):
        for seq in request.live:
            self.block_manager.publish(seq)
        publish = self.block_manager.publish
        self.block_manager.publish = lambda seq: None
        rest = right(self, request, budget, batch)
        self.block_manager.publish = publish
        return rest
