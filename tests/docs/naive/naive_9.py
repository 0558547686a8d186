"""Stage 9 of docs/build/rebuild.py, written once more: token by token, one kind of exchange alone."""
# ruff: noqa: F821


class ModelConfig:
    def share(self, size: int) -> ModelConfig:
        if self.num_heads % size != 0 or self.intermediate_size % size != 0:
            raise ValueError(
                f"tensor_parallel_size is {size}, which divides not both {self.num_heads} heads and "
                f"{self.intermediate_size} columns"
            )
        num_kv_heads = 1
        if size <= self.num_kv_heads:
            num_kv_heads = self.num_kv_heads // size
            if num_kv_heads * size != self.num_kv_heads:
                raise ValueError(f"{self.num_kv_heads} KV heads on {size} ranks")
        elif size // self.num_kv_heads * self.num_kv_heads != size:
            raise ValueError(f"{self.num_kv_heads} KV heads on {size} ranks")
        num_rows = (self.vocab_size - 1) // size + 1
        changes = {"num_heads": self.num_heads // size, "num_kv_heads": num_kv_heads, "vocab_size": num_rows}
        return replace(self, **changes, intermediate_size=self.intermediate_size // size)


def _share(name: str, slot: Tensor, shape: list[int], rank: int, size: int) -> tuple[slice, ...]:
    parts = []
    for dimension in range(len(shape)):
        total, mine = shape[dimension], slot.shape[dimension]
        if total == mine:
            parts.append(slice(None))
        elif "embed" in name or "lm_head" in name:
            first = min(sum(mine for _ in range(rank)), total)
            parts.append(slice(first, min(first + mine, total)))
        else:
            firsts = list(range(0, total, mine))  # of the shares that differ
            owners = [first for first in firsts for _ in range(size // len(firsts))]
            parts.append(slice(owners[rank], owners[rank] + mine))
    return tuple(parts)


class Ranks:
    def all_reduce(self, x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x) for _ in range(self.size)]
        self.group.allgather([parts], [x]).wait()
        total = torch.zeros_like(x)
        for part in parts:
            total = total + part
        x.copy_(total)
        return x

    def gather(self, x: Tensor) -> Tensor:
        n, columns = x.shape
        wide = torch.zeros(n, self.size * columns, dtype=x.dtype, device=x.device)
        wide[:, self.rank * columns : (self.rank + 1) * columns] = x
        self.group.allreduce([wide]).wait()
        return wide if self.rank == 0 else x


class Linear:
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if self._reordered is None else self._reordered.to_dense()
        out = x @ weight.T
        if self.bias is not None:
            out = out + self.bias
        if self.ranks is not None:
            out = self.ranks.all_reduce(out)
        return out


class Model:
    def _embed_share(self, input_ids: Tensor, ranks: Ranks) -> Tensor:
        weight = self.embed_tokens.weight
        rows = []
        for token_id in input_ids.tolist():
            row = token_id - ranks.rank * len(weight)
            rows.append(weight[row].clone() if 0 <= row < len(weight) else weight[0] * 0)
        x = weight.new_zeros(len(rows), weight.shape[1])
        for i in range(len(rows)):
            x[i] = rows[i]
        return ranks.all_reduce(x)

    def logits(self, hidden: Tensor) -> Tensor:
        scores = self.lm_head(hidden)
        if self.ranks is not None:
            scores = self.ranks.gather(scores)
        if scores.shape[1] > self.config.vocab_size:
            scores = scores[:, : self.config.vocab_size]
        return scores.to(dtype=self.embed_tokens.weight.new_zeros(1).float().dtype)
