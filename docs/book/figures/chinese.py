"""The labels of the figures in Chinese. A figure that is drawn is also written to docs/zh/figures."""

from __future__ import annotations

import re
from html import escape, unescape

# The figures of the chapters that are there in Chinese.
FIGURES = {
    "step",
    "waste",
    "block_tables",
    "batching",
    "gather",
    "online_softmax",
    "splitkv",
    "chat_turns",
    "copy_on_write",
    "write_a_token",
    "swap",
    "gpu_memory",
    "chunks",
    "shared_prefix",
    "beams",
    "grid",
    "limits",
    "ranks",
    "saturation",
}
# {} is a number. The numbers of a label stand in the same order in both languages.
LABELS = {
    "KV cache": "KV 缓存",
    "block": "块",
    "block table {}, {}": "块表 {}, {}",
    "block table {}, {}, {}": "块表 {}, {}, {}",
    "block tables": "块表",
    "logical blocks": "逻辑块",
    "physical block": "物理块",
    "physical blocks": "物理块",
    "free": "空闲",
    "idle": "空位",
    "after step {}": "第 {} 步之后",
    "step {}": "第 {} 步",
    "request A": "请求 A",
    "request B": "请求 B",
    "request C": "请求 C",
    # step
    "One step: schedule, execute, update": "一步：调度、执行、更新",
    "{}  schedule": "{}  调度（schedule）",
    "all that was not computed, up to {} tokens": "还没算过的全部，最多 {} 个 token",
    "{}  execute": "{}  执行（execute）",
    "one batch through the model": "一个批次，模型算一遍",
    "after the step": "这一步之后",
    "{} computed, {} scheduled": "已计算 {} 个，本步调度 {} 个",
    "{}  update: it gets a token": "{}  更新（update）：得到一个 token",
    "{}  update: no token yet, its prompt goes on": "{}  更新（update）：还没有 token，prompt 接着算",
    "every layer": "每一层",
    "new K, V": "新的 K、V",
    "all K, V": "全部 K、V",
    "the next token of A and of B": "A 和 B 的下一个 token",
    "The number in a square is the position of its token; dark edges are new.": (
        "方格里的数是 token 的位置，深色边框的是这一步新算的。"
    ),
    # waste
    "A pool under four ways to allocate it": "同一个池，四种分配方式",
    "real": "有效",
    "reserved": "预留",
    "internal": "内部碎片",
    "external": "外部碎片",
    "{} requests at once, {} served before.  real {} %, reserved {} %, internal {} %": (
        "同时运行 {} 个请求，此前完成 {} 个。有效 {} %，预留 {} %，内部碎片 {} %"
    ),
    "{} requests at once, {} served before.  real {} %, reserved {} %, internal {} %, external {} %": (
        "同时运行 {} 个请求，此前完成 {} 个。有效 {} %，预留 {} %，内部碎片 {} %，外部碎片 {} %"
    ),
    "{} requests at once, {} served before.  real {} %, reserved {} %, external {} %": (
        "同时运行 {} 个请求，此前完成 {} 个。有效 {} %，预留 {} %，外部碎片 {} %"
    ),
    # block_tables
    "Two requests: logical blocks, block tables and physical blocks": "两个请求：逻辑块、块表与物理块",
    "# filled": "已填槽位",
    "The number in a slot is the position of its token.": "槽位里的数是 token 的位置。",
    # batching
    "Static and continuous batching, step by step": "静态批处理与连续批处理，一步一步看",
    "Static batching": "静态批处理",
    "Continuous batching": "连续批处理",
    "{} steps · {} of {} places used · {} idle ({}%)": "{} 步 · 位置用了 {} / {} 个 · 空着 {} 个（{}%）",
    "finished, place kept": "已结束，仍占着位置",
    "one column is one step": "一列是一步",
    # gather
    "Attention over scattered blocks: gather first, or read in place": (
        "对分散的块计算注意力：先收集，还是就地读"
    ),
    "Gather, then attend": "先收集，再算注意力",
    "Read the blocks in place": "就地读块",
    "KV cache: block ids, and the tokens of one sequence": "KV 缓存：块号，以及一个序列的 token",
    "a contiguous copy": "连续的副本",
    "softmax over all scores": "对全部分数做 softmax",
    "three passes: read the blocks, write the copy, read the copy": "访存三遍：读块，写副本，读副本",
    "one pass: read the blocks": "访存一遍：读块",
    "Llama-{}-{}B, {} tokens: {} GiB for each new token": (
        "Llama-{}-{}B，{} 个 token：每生成一个新 token 搬动 {} GiB"
    ),
    "three running numbers": "只维护三个数",
    # online_softmax
    "The online softmax: maximum, sum and weighted sum after each block": (
        "在线 softmax：每读一块之后的最大值、累加和与加权和"
    ),
    "scores s": "分数 s",
    "values v": "value v",
    "output, acc / l": "输出 acc / l",
    "largest score": "最大的分数",
    "× is the rescale factor exp(m − m'): {} if the block does not raise the maximum.": (
        "× 后面是重新缩放因子 exp(m − m')：如果这一块没有提高最大值，它就是 {}。"
    ),
    # splitkv
    "Split-KV: partial results of three splits, combined by their log-sum-exp": (
        "split-KV：三段的部分结果，用 log-sum-exp 合并"
    ),
    "block id; scores of its keys": "块号，以及块中 key 的分数",
    "Block table": "块表",
    "split by its entries": "按表项切分",
    "Programs": "程序实例",
    "run at the same time": "同时运行",
    "Combine": "合并",
    "keys {} to {}": "key {} 到 {}",
    "online softmax": "在线 softmax",
    "one program over all {} keys: {}": "由一个程序实例读全部 {} 个 key：{}",
    # chat_turns
    "Tokens of three turns of a chat, with the prefix cache": "三轮对话的 token，启用前缀缓存",
    "turn {}": "第 {} 轮",
    "{} found": "命中 {}",
    "{} computed": "计算 {}",
    "{} generated": "生成 {}",
    "The marks under a bar stand at multiples of the block size, {} tokens.": (
        "横条下面的刻度是块大小（{} 个 token）的整数倍。"
    ),
    # copy_on_write
    "Two samples before and after one of them copies the block they share": (
        "两个样本：其中一个复制共享块之前与之后"
    ),
    "after step {}: forked": "第 {} 步之后：已分叉",
    "after step {}: A.{} copied block {}, A.{} did not": "第 {} 步之后：A.{} 复制了块 {}，A.{} 没有复制",
    "block table of A.{}": "A.{} 的块表",
    "references": "引用",
    "A.{}'s": "A.{} 的",
    # write_a_token
    "Two samples write their tokens: a shared block is copied before a write": (
        "两个样本写入各自的 token：共享的块先复制，再写入"
    ),
    "block table": "块表",
    "of A.{}": "A.{}",
    "{} references": "{} 个引用",
    "{} reference": "{} 个引用",
    "A.{} and A.{} continue one prompt. Both tables name its blocks.": (
        "A.{} 和 A.{} 接着同一个 prompt 生成，两张块表都指着它的块。"
    ),
    "A.{} is to write into block {}. But A.{} reads that block, too.": (
        "A.{} 要写入块 {}，可是 A.{} 也在读这个块。"
    ),
    "So block {} is copied to block {}, and the table of A.{} names the copy.": (
        "于是块 {} 复制到块 {}，A.{} 的块表改指副本。"
    ),
    "A.{} writes into block {}, which no other table names.": "A.{} 写入块 {}，没有别的块表指着它。",
    "The last block of A.{} is full, so its table gets a free one: block {}.": (
        "A.{} 的最后一块满了，块表添上一个空闲块：块 {}。"
    ),
    # gpu_memory
    "A GPU's memory: weights, K/V, and the rest": "GPU 的显存：权重、K/V 和其余部分",
    "weights {} GB": "权重 {} GB",
    "rest": "其余",
    "{} tokens: {} requests that reserve {}, or {} of {} in blocks": (
        "{} 个 token：{} 个各预留 {} 的请求，或用块存放 {} 个各 {} token 的请求"
    ),
    "Each box is a range for the longest request; the filled part is what a mean one uses.": (
        "每个方框是为最长的请求预留的一段，涂色部分是平均一个请求用到的。"
    ),
    # chunks
    "A long prompt beside three decodes, whole and in chunks": "三个 decode 旁边的一个长 prompt：整段与分段",
    "whole": "整段，一步算完",
    "in chunks: at most {} tokens a step": "分段：每步最多 {} 个 token",
    "A, B and C wait for a step of {} tokens": "A、B、C 要等一步算完 {} 个 token",
    # shared_prefix
    "One prefix in the block tables of three requests": "三个请求的块表里，同一个前缀",
    "table of A": "A 的块表",
    "table of B": "B 的块表",
    "table of C": "C 的块表",
    "blocks": "块",
    "{} tokens found, {} computed": "命中 {} 个 token，计算 {} 个",
    "Numbers in a block are tokens. Full blocks are found; C computes block {} for its last token.": (
        "块里的数是 token。能命中的是满块；C 为了最后一个 token 要计算块 {}。"
    ),
    # beams
    "Block tables of four beams before and after a step of a beam search": (
        "束搜索的一步之前与之后，四个 beam 的块表"
    ),
    "four beams": "四个 beam",
    "the next four": "下一步的四个",
    "no child": "没有子 beam",
    "the blocks, and how many tables have each": "各个块，以及有几张块表指向它",
    "before": "之前",
    "after": "之后",
    "{} freed, {} copied": "释放 {} 个，复制 {} 个",
    # swap
    "The blocks of the device and of the host before, during and after a preemption": (
        "抢占之前、之中、之后，设备和主机的块"
    ),
    "device": "设备",
    "host": "主机",
    "no block is left": "没有空闲块了",
    "B is out, A has its block {}": "B 已换出，它的块 {} 归了 A",
    "B is back, in other blocks": "B 已换入，放在别的块里",
    "B:{} is a block with the K/V of four tokens of B. An arrow is a copy, to where it is afterwards.": (
        "B:{} 表示一个块，里面有 B 的四个 token 的 K/V。箭头表示复制，指向复制之后的位置。"
    ),
    # grid
    "The grid of the decode kernel, and a tile of keys that spans four scattered blocks": (
        "decode kernel 的网格，以及一个跨四个分散的块的 tile"
    ),
    "Grid": "网格",
    "{} splits × {} KV heads = {} programs; a cell shows its keys": (
        "{} 个分段 × {} 个 KV 头 = {} 个程序实例；格子里是它负责的 key"
    ),
    "KV head {}": "KV 头 {}",
    "sequence A: {} keys": "序列 A：{} 个 key",
    "sequence B: {} keys": "序列 B：{} 个 key",
    "sequence C: {} keys": "序列 C：{} 个 key",
    "split {}": "分段 {}",
    "Block table of C": "C 的块表",
    "blocks of {} keys; tiles of {}": "每块 {} 个 key，每个 tile {} 个",
    "tile {}: keys {}–{}": "tile {}：key {}–{}",
    "blocks of all sequences, in any order": "所有序列的块，次序任意",
    "{} keys of KV head {}, loaded at once and multiplied with all query heads that share it;": (
        "{} 个 key，属于 KV 头 {}：一次读入，与共享这个 KV 头的所有查询头相乘；"
    ),
    "the program keeps m, l and acc from tile to tile, and writes out and LSE after its last tile": (
        "程序实例逐个 tile 更新 m、l、acc，算完最后一个 tile 再写出 out 和 LSE"
    ),
    # limits
    "The roofline of an H{}, and steps of Llama-{}-{}B": "H{} 的 roofline，以及 Llama-{}-{}B 的几种步",
    "arithmetic intensity: FLOP for each byte that is read": "算术强度：每读一个字节做的 FLOP",
    "TFLOP a second": "TFLOP/s",
    "memory-bound: {} TB a second": "访存受限：{} TB/s",
    "compute-bound": "计算受限",
    "decode of {} sequence: {}% of the FLOP": "{} 个序列的 decode：用到算力的 {}%",
    "decode of {}: {}% of the FLOP": "{} 个序列：{}%",
    "prefill of {} tokens: {}% of the FLOP": "{} 个 token 的 prefill：{}%",
    # ranks
    "Two ranks with the same block tables": "两个 rank，块表相同",
    "rank {}: the process of the engine": "rank {}：引擎所在的进程",
    "rank {}: a worker": "rank {}：worker",
    "scheduler, block manager, model runner, sampler": "调度器、块管理器、model runner、采样器",
    "model runner; it does what a message says": "model runner；按消息执行",
    "query heads {}–{}": "查询头 {}–{}",
    "MLP columns {}–{}": "MLP 的列 {}–{}",
    "h{}: K and V of KV head {}, all layers": "h{}：KV 头 {} 的 K 和 V，所有层",
    "message": "消息",
    "each step": "每一步",
    "{} a step": "每步 {} 次",
    # saturation
    "Requests served and good, and the wait for the first token, over the rate of arrivals": (
        "随到达率变化：完成的请求、合格的请求、首 token 延迟"
    ),
    "requests a second": "每秒请求数",
    "requests a second, arriving": "每秒到达的请求数",
    "served": "完成",
    "good": "合格",
    "seconds to the first token": "首 token 延迟（秒）",
    "limit for a good request": "合格请求的上限",
    "median": "中位数",
}
# Words of the code, formulas, and pieces of a prompt.
SAME = {
    "beam {}",
    "OPT-{}B, {} GB",
    "Llama-{}-{}B, {} GB",
    "K/V {} GB",
    "decode A",
    "decode B",
    "decode C",
    "prompt",
    "Tile",
    "all-reduce",
    "logits",
}
SAME |= {"max", "pow{}", "oracle", "paging", "prefill", "decode", "m, l, acc", "acc", "acc / l"}
SAME |= {"Σ exp(s − m)", "Σ exp(s − m) · v", "w = exp(lse − LSE)", "LSE = ln Σ exp(lse) = {}"}
SAME |= {"out {}", "lse {}", "out = {}·{} + {}·{} + {}·{}", "our", "sc", "ore", "and", "se", "ven"}
SAME |= {"Four", "score", "seven", "years", "ago", "fathers", "brought", "forth", "friends", "met", "here"}

LABEL = re.compile(r"(?<=>)[^<>\n]+(?=</(?:text|title)>)")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def in_chinese(svg: str) -> str:
    """A figure with its labels in Chinese.

    Raises:
        KeyError: a label is in neither table.
    """
    svg = svg.replace("<svg ", '<svg lang="zh" ', 1)  # the glyphs are those of Chinese, and not of Japanese
    return LABEL.sub(lambda found: escape(translate(unescape(found[0]))), svg)


def translate(label: str) -> str:
    """`step 3` → `第 3 步`. Without two letters in a row, a label is a name or a number, and stays."""
    pattern = NUMBER.sub("{}", label)
    if pattern not in LABELS and (pattern in SAME or not re.search("[A-Za-z]{2}", label)):
        return label
    return LABELS[pattern].format(*NUMBER.findall(label))
