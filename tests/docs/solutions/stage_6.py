"""Solutions of stage 6 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# right: loops over lists, and every count made again


class Scheduler:
    def _preempt(self, request: Request, batch: ScheduledBatch) -> None:
        request.num_preemptions = request.num_preemptions + 1
        request.rank = self.rank(request)
        place = 0
        while place < len(self.waiting) and self.waiting[place].rank < request.rank:
            place += 1
        self.waiting.insert(place, request)
        if self.preemption == "swap":
            moves = self.swapper.swap_out(request)
            if moves is not None:
                batch.moves.swap_out.extend(moves)
                batch.preempted.append((request, "swap"))
                return
        for seq in list(request.live):
            seq.candidates = None
            while seq.block_table:
                self.block_manager.release(seq.block_table.pop())
            seq.num_computed_tokens = 0
        batch.preempted.append((request, "recompute"))


class Swapper:
    def swap_out(self, request: Request) -> list[Move] | None:
        device_blocks = []
        for seq in request.live:
            for position in range(seq.num_computed_tokens):
                block_id = seq.block_table[position // self.block_manager.block_size]
                if block_id not in device_blocks:
                    device_blocks.append(block_id)
        if not device_blocks or len(device_blocks) > len(self.free_ids):
            return None
        moves = []
        for block_id in device_blocks:
            host_id = min(self.free_ids)
            self.free_ids.remove(host_id)
            moves.append((block_id, host_id))
        for seq in request.live:
            seq.host_table = []
            for block_id in seq.block_table:
                for source, host_id in moves:
                    if source == block_id:
                        seq.host_table.append(host_id)
        for seq in request.live:
            while seq.block_table:
                self.block_manager.release(seq.block_table.pop())
        return moves

    def swap_in(self, request: Request, num_reserved: int = 0) -> list[Move] | None:
        manager, size = self.block_manager, self.block_manager.block_size
        host_blocks, num_needed, written = [], 0, []
        for seq in request.live:
            for host_id in seq.host_table:
                if host_id not in host_blocks:
                    host_blocks.append(host_id)
                    num_needed += 1
            if (seq.num_tokens - 1) // size < len(seq.host_table):
                newest = seq.host_table[(seq.num_tokens - 1) // size]
                if newest in written:
                    num_needed += 1  # a copy of its own
                written.append(newest)
            for position in range(0, seq.num_tokens, size):
                if position // size >= len(seq.host_table):
                    num_needed += 1
        if manager.num_free_blocks < num_needed + num_reserved:
            return None
        moves = []
        for host_id in host_blocks:
            moves.append((host_id, manager.take()))
        references = []
        for seq in request.live:
            seq.block_table = []
            for host_id in seq.host_table:
                for source, block_id in moves:
                    if source == host_id:
                        seq.block_table.append(block_id)
                        if block_id in references:
                            manager.share(block_id)
                        references.append(block_id)
        self.release(request)
        return moves

    def release(self, request: Request) -> None:
        for seq in request.live:
            for host_id in seq.host_table:
                if host_id not in self.free_ids:
                    self.free_ids.append(host_id)
            seq.host_table = []


class KVCache:
    def move_blocks(self, moves: Moves) -> None:
        for pairs, source, destination in (
            (moves.swap_out, self.data, self.host),
            (moves.swap_in, self.host, self.data),
            (moves.copies, self.data, self.data),
        ):
            for src, dst in pairs:
                for layer in range(self.shape.num_layers):
                    for k_or_v in range(2):
                        destination[dst, layer, k_or_v] = source[src, layer, k_or_v]


# wrong: data is replaced
class KVCache:
    def move_blocks(self, moves):
        self.data = self.data.clone()
        right(self, moves)


# wrong: the lists are popped
class KVCache:
    def move_blocks(self, moves):
        right(self, moves)
        moves.swap_out.clear()


# wrong: in before out
class KVCache:
    def move_blocks(self, moves):
        for host_block, device_block in moves.swap_in:
            self.data[device_block] = self.host[host_block]
        right(self, moves)


# wrong: after one full host pool it never swaps again
class Scheduler:
    def _preempt(self, request, batch):
        right(self, request, batch)
        if batch.preempted[-1][1] == "recompute":
            self.preemption = "recompute"


# wrong: the victim waits behind those of equal rank
replace(
    "Scheduler._preempt",
    "insort_left(self.waiting, request, key=BY_RANK)",
    "insort_right(self.waiting, request, key=BY_RANK)",
)


# wrong: beams that are computed again keep their candidates
class Scheduler:
    def _preempt(self, request, batch):
        candidates = [seq.candidates for seq in request.live]
        right(self, request, batch)
        for seq, kept in zip(request.live, candidates, strict=True):
            seq.candidates = kept


# wrong: the newest token is not counted
replace("Swapper.swap_in", "len(_host_blocks) + _num_grown", "len(_host_blocks)")
# wrong: the host blocks stay in use
replace("Swapper.swap_in", "self.release(request)", "None")


# wrong: the computed tokens are forgotten
class Swapper:
    def swap_out(self, request):
        moves = right(self, request)
        for seq in request.live if moves else ():
            seq.num_computed_tokens = 0
        return moves
