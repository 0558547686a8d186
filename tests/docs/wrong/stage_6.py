"""Solutions of stage 6 of docs/build: see tests/docs/judged.py."""
# ruff: noqa: ANN001, ANN201, ANN202, E501, F811, F821

# wrong: data is replaced
replace("KVCache.move_blocks", "self.data.index_copy_(0", "self.data = self.data.index_copy(0")
# wrong: the lists are popped
replace(
    "KVCache.move_blocks",
    "for device_block, host_block in moves.swap_out:",
    "while moves.swap_out:\n            device_block, host_block = moves.swap_out.pop(0)",
)
# wrong: after one full host pool it never swaps again
replace("Scheduler._preempt", "        else:", "        else:\n            self.preemption = 'recompute'")
# right: copies one after another, host blocks from the other end
replace(
    "KVCache.move_blocks",
    "self.data.index_copy_(0, dst, self.data.index_select(0, src))",
    "for source, destination in moves.copies:\n                self.data[destination] = self.data[source]",
)
replace("Swapper.swap_out", "self.free_ids.pop()", "self.free_ids.pop(0)")
