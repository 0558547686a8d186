"""Three decodes in the CUDA graph for four: the buffer that the graph reads, filled by the engine.

python docs/book/figures/graph_padding.py
"""

from __future__ import annotations

import numpy as np
import torch
from svg import COLORS, GREY, PAPER, Drawing

from nanopaged.attention.metadata import AttentionMetadata
from nanopaged.attention.triton_backend import TritonAttention
from nanopaged.cuda_graphs import DecodeGraphs
from nanopaged.kv_cache import KVCache, KVShape

BLOCK_SIZE, GRAPH_SIZE, MAX_SPLITS = 4, 4, 2
TOKENS, POSITIONS, TABLES = [17, 4, 260], [6, 2, 7], [[9, 19], [1], [4, 5]]
WIDTH, LEFT = 60, 48


@torch.inference_mode()
def buffer_of_graph() -> list[int]:
    """What is sent to the graph for four sequences. The capture records nothing, so no GPU is needed."""
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    attention = TritonAttention(KVCache(shape, 20, BLOCK_SIZE, torch.device("cpu")), 1.0)
    attention.max_splits = lambda num_seqs: MAX_SPLITS
    torch.cuda.graph_pool_handle = lambda: None
    DecodeGraphs.capture = lambda _, work: (torch.zeros(0), lambda: None)
    graphs = DecodeGraphs(None, attention, GRAPH_SIZE, 64)
    blocks = [table[position // BLOCK_SIZE] for table, position in zip(TABLES, POSITIONS, strict=True)]
    batch = AttentionMetadata(
        query_lens=np.ones(3, dtype=np.int64),
        context_lens=np.array(POSITIONS) + 1,
        block_tables=TABLES,
        slot_mapping=np.array(blocks) * BLOCK_SIZE + np.array(POSITIONS) % BLOCK_SIZE,
        num_decodes=3,
        seq_ids=[1, 2, 3],
    )
    graphs.run(np.array(TOKENS), np.array(POSITIONS), batch)
    return graphs.graphs[GRAPH_SIZE][0].tolist()


numbers = buffer_of_graph()
rows, splits = np.array(numbers[: 4 * GRAPH_SIZE]).reshape(4, -1), np.array(numbers[5 * GRAPH_SIZE + 1 :])
drawing = Drawing(400, 348, "Three decodes in the graph for four: the fourth row is padding")
for column, title in enumerate(("token", "position", "slot")):
    drawing.text(LEFT + WIDTH * (column + 0.5), 24, title, 12, color=GREY)
drawing.note(LEFT + 3 * WIDTH + 14, 24, "K/V is stored in")
for i in range(GRAPH_SIZE):
    is_padding, y = i >= len(TOKENS), 38 + 36 * i
    fill, line = (PAPER, GREY) if is_padding else COLORS[i]
    drawing.text(26, y + 15, "–" if is_padding else "ABC"[i], 14, color=line, bold=True)
    for column in range(3):
        text = str(rows[column, i]).replace("-", "−")
        drawing.box(LEFT + WIDTH * column, y, WIDTH, 30, text, fill, line, 14, dashed=is_padding)
    block, offset = divmod(int(rows[2, i]), BLOCK_SIZE)
    place = "padding: not stored" if is_padding else f"block {block}, offset {offset}"
    drawing.text(LEFT + 3 * WIDTH + 14, y + 15, place, 13, "start", line)
drawing.text(16, 210, "Splits", anchor="start", bold=True)
drawing.note(70, 210, f"room for {GRAPH_SIZE} + {MAX_SPLITS} = {GRAPH_SIZE + MAX_SPLITS}, with their keys")
for i, (seq, start, end) in enumerate(splits.reshape(-1, 3).tolist()):
    fill, line = COLORS[seq] if end else (PAPER, GREY)
    text = f"{'ABC'[seq]}: {start}–{end - 1}" if end else "empty"
    drawing.box(16 + 61.5 * i, 228, 60, 30, text, fill, line, 13, dashed=not end)
drawing.note(16, 282, "An empty split reads nothing.")
drawing.note(16, 306, "Each replay reads this one buffer, so its size and address")
drawing.note(16, 324, "never change.")
drawing.save()
