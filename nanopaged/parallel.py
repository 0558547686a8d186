"""Tensor parallelism: several processes, the ranks, hold a share of each layer and compute steps together.

Rank 0 is the engine's process. The other ranks, its workers, have only a model runner.

    rank 0    schedule ─▶ send ─▶ forward ─▶ logits ─▶ sample, update
    rank 1                 └────▶ forward ─▶ logits ─┘ gathered

A rank has a share of the attention heads, of the columns of the MLP and of the rows of the vocabulary. The
partial results are added up (all-reduce) after `o_proj` and `down_proj` (Megatron-LM, arXiv 1909.08053). A
rank stores the K/V of its own heads in the same physical blocks as the others: block tables are the same
everywhere, and K/V is never sent (PagedAttention, §4.6).

A rank that fails or is lost ends the engine. Ranks that are started here meet by a file, and open ports on
127.0.0.1 alone (except NCCL's, on GPUs). Under torchrun ports are open to the network, and a message is a
pickle, which can run code (docs/reference/ranks.md).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

# Seconds that ranks wait for each other within a step; a rank that takes longer is lost.
STEP_TIMEOUT = float(os.environ.get("NANOPAGED_STEP_TIMEOUT", 30))
NUM_THREADS = torch.get_num_threads()  # before any engine has changed it
UNDER_TORCHRUN = (
    "TORCHELASTIC_RUN_ID" in os.environ
)  # it has started this process, and all other ranks

MADE_IN: set[int] = (
    set()
)  # this process, if it has made engines, and those from which it was forked


def pick_device(name: str, local_rank: int | None = None) -> torch.device:
    """The torch device of that name, with its number; each rank of this machine has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is not None and name.startswith("cuda"):
        name = f"cuda:{local_rank}"
    try:
        device = torch.empty(
            0, device=name
        ).device  # "cuda" becomes "cuda:0": some functions need the number
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {name!r} cannot be used here: PyTorch has no such device"
        ) from error
    if device.type not in ("cpu", "cuda", "mps") or (
        local_rank is not None and device.type == "mps"
    ):
        raise ValueError(
            f"device {name!r} cannot be used here: only cpu, cuda and, by one rank, mps can"
        )
    return device


class Ranks:
    """This process as one of the `size` ranks of a model, which find each other by the `store`."""

    def __init__(
        self, rank: int, size: int, store: Any, device: torch.device, folder: str = ""
    ) -> None:
        self.rank, self.size, self.store, self.device = rank, size, store, device
        self.lost: str | None = None  # why the engine has ended
        self.failed: str | None = None  # why a worker has
        self.workers: Any = None  # on rank 0, those it has started; None if torchrun has
        self.processes: list[Any] = []  # theirs
        self.messages: Any = None  # the group for messages, and …
        self.group: Any = None  # … for tensors
        # It runs as this object goes, or as the program ends.
        self.end_workers = weakref.finalize(self, _end_workers, os.getpid(), folder, self.processes)

    def meet(self) -> None:
        """Connect all ranks, once all of them are ready."""
        self.store.set(f"ready/{self.rank}", "")
        while not self.store.check([f"ready/{rank}" for rank in range(self.size)]):
            if reason := self.failure():
                raise RuntimeError(reason)
            time.sleep(0.02)
        gloo, options = dist.ProcessGroupGloo, dist.ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
        # Under torchrun, ports are on the interface that GLOO_SOCKET_IFNAME names.
        here = (
            gloo.create_default_device()
            if UNDER_TORCHRUN
            else gloo.create_device(hostname="127.0.0.1")
        )
        options._devices, options._timeout = [here], timedelta(seconds=STEP_TIMEOUT)
        store = dist.PrefixStore("gloo", self.store)
        self.group = self.messages = gloo(store, self.rank, self.size, options)
        if self.device.type == "cuda":
            os.environ.setdefault(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
            )  # abort, do not end the process
            options, store = dist.ProcessGroupNCCL.Options(), dist.PrefixStore("nccl", self.store)
            options._timeout = timedelta(seconds=STEP_TIMEOUT)
            self.group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    # ── what a step needs ─────────────────────────────────────────────────────────────────────────

    def send(self, message: object) -> None:
        """Send the workers what `receive` returns there."""
        if self.lost is not None:
            raise RuntimeError(self.lost)
        data = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        for x in (torch.tensor([len(data)], dtype=torch.int64, device="cpu"), data):
            self.messages.broadcast([x]).wait()

    def receive(self) -> Any:
        """In a worker, the next message of rank 0. The process ends if rank 0 does."""
        size, options = torch.empty(1, dtype=torch.int64, device="cpu"), dist.BroadcastOptions()
        options.timeout = timedelta(days=100)
        try:
            self.messages.broadcast([size], options).wait()
        except RuntimeError:  # the connection is closed
            raise SystemExit from None
        data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.messages.broadcast([data]).wait()
        return pickle.loads(data.numpy().tobytes())

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of x, in place."""
        self.group.allreduce([x]).wait()
        return x

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks have."""
        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        self.group.allreduce([numbers], dist.ReduceOp.MIN).wait()
        return int(numbers)

    def gather(self, x: Tensor) -> Tensor:
        """On rank 0, the x [n, columns] of all ranks side by side: [n, size · columns]. Elsewhere, x."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self.group.gather([parts] if parts else [], [x.contiguous()]).wait()  # to rank 0
        return torch.cat(parts, dim=-1) if parts else x

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def failure(self, seconds: float = 0.0) -> str | None:
        """The traceback of a worker that failed, or how one died. None: all that were started here live."""
        try:
            if self.workers is not None and self.failed is None:
                self.workers.join(seconds)  # it ends all workers if one has failed
        except ProcessException as error:  # its message counts the workers from 0
            number = error.error_index
            self.failed = error.msg.strip().replace(
                f"rocess {number} ", f"rocess of rank {number + 1} "
            )
        return self.failed

    def check(self) -> None:
        """On a GPU an all-reduce may end without an error, with wrong sums, if other ranks are gone."""
        torch.cuda.synchronize()
        if self.failure():
            raise RuntimeError("a rank did not take part in the whole step")

    def end(self, error: BaseException) -> None:
        """End the engine after a failure within a step. Raises RuntimeError, as every later step does."""
        if self.lost is None:  # else `send` has raised it
            # A connection may end before its process does.
            reason = self.failure(3.0) if isinstance(error, RuntimeError) else None
            self.lost = (
                f"the engine has ended: {reason or f'rank 0 failed within a step: {error!r}'}"
            )
            self.close()
        if isinstance(error, Exception):
            raise RuntimeError(self.lost) from error

    def close(self) -> None:
        """End the workers, and this rank's connections to them."""
        self.end_workers()
        if self.group is not None and self.device.type == "cuda":
            self.group.abort()
        self.messages = self.group = None


def _end_workers(pid: int, folder: str, processes: list[Any]) -> None:
    """Kill the workers that were started here; torchrun's end as their connections close."""
    if os.getpid() == pid:  # a fork leaves them to its parent
        for process in processes:
            process.kill()
            process.join(5)
        shutil.rmtree(folder, ignore_errors=True)


# ── starting ──────────────────────────────────────────────────────────────────────────────────────


def start(size: int, device_name: str, make_runner: Callable[..., Any]) -> Any:
    """The model runner of rank 0, `make_runner(ranks=…, device=…)`; of the only rank, if `size` is 1.

    Under torchrun each process is a rank: in the workers this call ends the process when rank 0 ends.
    Otherwise the workers are started here. A RuntimeError has the traceback of one that cannot start.
    """
    # A fork has none of PyTorch's threads, and would wait for them.
    if MADE_IN - {os.getpid()} and torch.get_num_threads() > 1:
        raise RuntimeError(
            "a fork of an engine's process would hang: use 'spawn', or set_num_threads(1)"
        )
    MADE_IN.add(os.getpid())
    if size == 1:
        return make_runner()
    device = pick_device(device_name, int(os.environ["LOCAL_RANK"]) if UNDER_TORCHRUN else 0)
    if UNDER_TORCHRUN:
        store, rank, num_launched = next(dist.rendezvous("env://"))
        if num_launched != size:
            raise ValueError(
                f"tensor_parallel_size is {size}, but torchrun started {num_launched} processes"
            )
        ranks = Ranks(rank, size, store, device)
        if rank > 0:
            make_runner(ranks=ranks, device=device).serve()
        if store.add("num_engines", 1) > 1:
            raise ValueError(
                "under torchrun a program can have one engine: its workers serve no other"
            )
    else:
        if device.type == "cpu":  # all ranks share the cores
            torch.set_num_threads(min(torch.get_num_threads(), max(1, NUM_THREADS // size)))
        folder = tempfile.mkdtemp(prefix="nanopaged-")
        ranks = Ranks(0, size, dist.FileStore(f"{folder}/store", size), device, folder)
    try:
        if not UNDER_TORCHRUN:
            arguments = size, device_name, folder, torch.get_num_threads(), make_runner
            ranks.workers = spawn(_worker, arguments, size - 1, join=False, daemon=True)
            ranks.processes += ranks.workers.processes
        return make_runner(ranks=ranks, device=device)
    except BaseException as error:
        reason = ranks.failure(3.0) if isinstance(error, RuntimeError) else None
        ranks.close()
        if reason is None:
            raise
        raise RuntimeError(f"the engine cannot start: {reason}") from error


def _worker(
    index: int, size: int, device_name: str, folder: str, threads: int, make_runner: Any
) -> None:
    """The life of a worker that was started here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    parent: Any = multiprocessing.parent_process()
    # When rank 0's process has ended, however it did, this one ends.
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    rank, device = index + 1, pick_device(device_name, index + 1)
    ranks = Ranks(rank, size, dist.FileStore(f"{folder}/store", size), device)
    make_runner(ranks=ranks, device=device).serve()
