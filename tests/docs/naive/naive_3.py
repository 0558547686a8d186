"""Stage 3 of docs/build/rebuild.py, written again: sums and lists are made again where they are needed."""
# ruff: noqa: F821

# right: written naively


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
