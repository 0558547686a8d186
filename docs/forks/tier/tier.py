"""A second tier of the prefix cache: evicted blocks go to host memory or a file, and are found there again.

    llm = LLM(tier_bytes=1 << 30, tier_file="chats.tier")  # without tier_file: in host memory
    llm.close_tier()  # at the end; it stores what the pool still has, for the next LLM with this file

An evicted block is stored under its key. An admitted request looks for the keys behind those in the pool:

    block_size = 2    prompt  a b │ c d │ e f │ g h │ i        keys  k0 k1 k2 k3
    the pool has k0 in block 7, the tier k1 and k2             table [7 0 1 2 3]
    blocks 0 and 1 are loaded, so 6 of 9 tokens are not computed; k1 and k2 can be found in the pool again

`take` stores a block at once, while the pool has it. What `allocate` finds is read at once, and written to
the pool after the moves of the step: its block may be one that the step swaps out first. The tier is a
database of SQLite, which maps no file into memory: a cut file is an error, not a SIGBUS. Any error or wrong
checksum switches the tier off, with one warning, and tokens are computed again.
"""

import logging
import sqlite3
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128, xxh3_128_digest

import nanopaged
from nanopaged.block_manager import BlockManager
from nanopaged.config import EngineConfig
from nanopaged.model_runner import ModelRunner
from nanopaged.sequence import Moves, Sequence

PAGE = 4096  # bytes of a page of the database
SWITCHED_OFF = "the second tier (tier_file=%r) is off: %s. Tokens stay right; delete it before the next start"
logger = logging.getLogger("nanopaged")


@dataclass(frozen=True, kw_only=True)
class TierConfig(EngineConfig):
    """With a tier of at most `tier_bytes`, in host memory or in `tier_file`. Raises as `EngineConfig`."""

    tier_bytes: int = 1 << 28
    tier_file: str | Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ints("tier_bytes", minimum=1)
        self.check_types("tier_file", types=str | Path | None, description="a file name or None")
        if self.tier_file is not None and Path(self.tier_file).is_dir():
            raise ValueError(f"tier_file is {str(self.tier_file)!r}, which is a folder: name a file in it")
        if self.tier_file is not None and not Path(self.tier_file).absolute().parent.is_dir():
            raise FileNotFoundError(f"tier_file is {str(self.tier_file)!r}, but its folder is missing")
        if not self.enable_prefix_caching:
            raise ValueError("enable_prefix_caching is False, but a tier needs it: set it to True")
        if self.tensor_parallel_size > 1:
            raise ValueError(f"tensor_parallel_size is {self.tensor_parallel_size}, but a tier needs 1 rank")


class Tier:
    """Records by name, the hash of a key. A record is the checksum of key and K/V, then the K/V.

    `pool` [num_blocks, ...] is the K/V of the pool, `loads` (block, K/V) to write there in this step. `order`
    has the names, the least recently used first; after a restart as they were stored. `db` is None once it is
    off. Raises ValueError: the file is in use, damaged, not ours, or of other K/V; or no block fits.
    """

    def __init__(self, config: TierConfig, folder: Path, pool: torch.Tensor) -> None:
        self.pool, self.loads, self.order = pool, list[tuple[int, bytes]](), OrderedDict[bytes, None]()
        self.block_bytes, self.file = pool[0].nbytes, config.tier_file
        # A record fills pages of its own, and parts of leaves of table and index. 32 pages are spare.
        self.capacity = (config.tier_bytes // PAGE - 32) // (-(-self.block_bytes // (PAGE - 4)) + 2)
        if self.capacity <= 0:
            what = f"tier_bytes is {config.tier_bytes:,}, too few for blocks of {self.block_bytes:,} bytes"
            raise ValueError(f"{what}: raise it to {self.block_bytes + 40 * PAGE:,} or more")
        self.db: sqlite3.Connection | None = None
        try:
            self._open(config, folder)
        except sqlite3.Error as error:
            self.close()
            in_use = "locked" in str(error)
            why = "an engine has it open: call `close_tier` there" if in_use else f"{error}: delete it"
            raise ValueError(
                f"tier_file {str(self.file)!r} cannot be used, {why}, or name another"
            ) from error

    def _open(self, config: TierConfig, folder: Path) -> None:
        """Lock the file until it is closed. Check, or write, what its K/V depends on. Read the names."""
        path = ":memory:" if self.file is None else Path(self.file).absolute()
        self.db = db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        pragmas = f"page_size={PAGE}", "mmap_size=0", "locking_mode=EXCLUSIVE", "synchronous=OFF"
        db.executescript("".join(f"PRAGMA {pragma};" for pragma in pragmas) + "BEGIN EXCLUSIVE")
        model = xxh3_128(repr(config.load_format == "dummy" and config.seed).encode())
        for part in (folder / "config.json", *sorted(folder.glob("*.safetensors"))) if self.file else ():
            model.update(np.memmap(part, mode="r").data)
        header = {"model": model.hexdigest(), "block": f"{self.pool.dtype} {tuple(self.pool.shape[1:])}"}
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            db.execute("CREATE TABLE header (name, value)")
            db.execute("CREATE TABLE blocks (name BLOB UNIQUE, record BLOB)")
            db.executemany("INSERT INTO header VALUES (?, ?)", header.items())
        if (theirs := dict(db.execute("SELECT name, value FROM header"))) != header:
            raise sqlite3.Error(f"it is of {theirs}, this engine of {header}")
        self.order.update(db.execute("SELECT name, NULL FROM blocks ORDER BY rowid"))
        db.execute("COMMIT")

    def load(self, keys: list[bytes]) -> list[bytes]:
        """The K/V of the first of these blocks, up to one that is missing."""
        names, found = [sha256(key).digest() for key in keys], list[bytes]()
        for name, key in zip(names, keys, strict=True):
            if name not in self.order:
                break
            rows = self.run("SELECT CAST(record AS BLOB) FROM blocks WHERE name = ?", name)
            record = (rows[0][0] or b"") if rows else b""
            if len(record) != 16 + self.block_bytes or record[:16] != xxh3_128_digest(key + record[16:]):
                self.close("a record is damaged")
                break
            found.append(record[16:])
        for name in names[: len(found)][::-1] if self.order else ():
            self.order.move_to_end(name)  # the end of a prefix is to be forgotten first
        return found

    def store(self, block: Any) -> None:
        """Store a published block of an earlier step, unless its key is known. The oldest make room."""
        if (name := sha256(key := block.key).digest()) in self.order:
            self.order.move_to_end(name)
        elif self.db is not None:
            kv = self.pool[block.block_id].cpu().view(torch.uint8).numpy().tobytes()
            while len(self.order) >= self.capacity:
                self.run("DELETE FROM blocks WHERE name = ?", self.order.popitem(last=False)[0])
            self.run("INSERT OR REPLACE INTO blocks VALUES (?, ?)", name, xxh3_128_digest(key + kv) + kv)
            self.order |= {name: None} if self.db is not None else {}

    def run(self, statement: str, *values: bytes) -> list[tuple]:
        """The rows of a statement, which is a transaction. If it fails, the tier is switched off."""
        try:
            return self.db.execute(statement, values).fetchall() if self.db is not None else []
        except (sqlite3.Error, MemoryError) as error:
            self.close(str(error) or "no memory is left")
            return []

    def close(self, error: str = "") -> None:
        """Find and store nothing from now on; if there was an error, a warning says so."""
        db, self.db = self.db, None
        self.order.clear()
        if db is not None:
            db.close()
            if error:
                logger.warning(SWITCHED_OFF, self.file, error)


class TierBlockManager(BlockManager):
    """A block manager with a tier, once the engine has set it."""

    tier: Any = None

    def reset(self) -> None:
        """As `BlockManager.reset`. The tier stays: a record is stored whole, with its key."""
        super().reset()
        if self.tier is not None:
            self.tier.loads.clear()

    def take(self) -> int:
        """As `BlockManager.take`; an evicted block is stored."""
        if not self.free_ids:
            self.tier.store(next(iter(self.cached.values())))
        return super().take()

    def allocate(self, sequences: list[Sequence], look_up: bool = True, num_reserved: int = 0) -> bool:
        """As `BlockManager.allocate`; then what follows in the tier is loaded into blocks just taken."""
        fits = super().allocate(sequences, look_up, num_reserved)
        for seq in sequences if fits and look_up else ():
            first = seq.num_computed_tokens // self.block_size  # no sibling before `seq` has this block
            keys = self.keys_of(seq, (seq.num_tokens - 1) // self.block_size)[first:]
            for key, block_id, kv in zip(keys, seq.block_table[first:], self.tier.load(keys), strict=False):
                self.tier.loads.append((block_id, kv))
                seq.num_computed_tokens += self.block_size
                self.index.setdefault(key, self.blocks[block_id]).key = key  # as `publish`
        return fits

    def reset_prefix_cache(self) -> None:
        """As `BlockManager.reset_prefix_cache`; the tier is emptied, too."""
        super().reset_prefix_cache()
        self.tier.order.clear()
        self.tier.run("DELETE FROM blocks")


class TierRunner(ModelRunner):
    """A model runner whose pool has a tier."""

    def __init__(self, config: Any, folder: Path, **others: Any) -> None:
        super().__init__(config=config, folder=folder, **others)
        self.tier = Tier(config, folder, self.kv_cache.data)

    def forward(self, inputs: Any) -> torch.Tensor:
        """As `ModelRunner.forward`; blocks are loaded between the moves and the model."""
        self.kv_cache.move_blocks(inputs.moves)
        inputs.moves = Moves()
        for block_id, kv in self.tier.loads:
            stored = torch.frombuffer(bytearray(kv), dtype=torch.uint8)
            self.kv_cache.data[block_id].view(-1).view(torch.uint8).copy_(stored)
        self.tier.loads.clear()
        return super().forward(inputs)


class TierEngine(nanopaged.LLMEngine):
    """An engine with a tier. Its runner has the tier."""

    make_config = TierConfig
    make_block_manager = TierBlockManager
    make_runner = TierRunner

    def __init__(self, config: TierConfig, runner: Any = None) -> None:
        super().__init__(config, runner)
        self.block_manager.tier = vars(self.runner)["tier"]


class LLM(nanopaged.LLM):
    engine_class = TierEngine

    def close_tier(self) -> None:
        """Store the K/V of finished requests, and close the tier: the engine goes on without."""
        self._check_thread()
        with self._engine_in_use():
            manager: Any = self.engine.block_manager
            for block in manager.cached.values():
                manager.tier.store(block)
            manager.tier.close()
