"""Tensor parallelism: several processes, the ranks, compute a model together.

Rank 0 is the engine's process. The other ranks, its workers, have only a model runner. A single
process needs none of this: its runner has `decoder.OneRank` in the place of `Ranks`.

    rank 0    schedule ─▶ send ─▶ forward ─▶ logits ─▶ sample, update
    rank 1                 └────▶ forward ─▶ logits (of both ranks)

A rank has a share of the attention heads, of the columns of the MLP and of the rows of the
vocabulary. An all-reduce adds up the partial results after `o_proj` and `down_proj` (Megatron-LM,
arXiv 1909.08053). The block tables are the same on all ranks. Each rank stores the K/V of its own
heads in the blocks, so ranks never send K/V to each other (PagedAttention, §4.6).

A rank that fails or is lost ends the engine. Ranks that `start_ranks` starts meet by a file, and
gloo listens on 127.0.0.1 alone. Under torchrun the ports are open to the network, and a message is
a pickle, which can run code (docs/reference/ranks.md).
"""

import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

# Within a step, rank 0 waits this many seconds for the others.
STEP_TIMEOUT = float(os.getenv("NANOPAGED_STEP_TIMEOUT", "30"))
NUM_THREADS = torch.get_num_threads()  # before any engine has changed it
UNDER_TORCHRUN = dist.is_torchelastic_launched()
CPU = torch.device("cpu")
CONNECTED = weakref.WeakSet[Any]()  # this process's ranks that have met others


@dataclass(eq=False)
class Ranks:
    """This process as one of the `size` ranks of a model, which find each other by the `store`.

    Attributes:
        workers: on rank 0, PyTorch's context of the processes that `start_ranks` has started.
        failure: which rank has failed and how, "" while the engine runs.
        messages, group: the connections for messages and for tensors, once the ranks have met.
    """

    rank: int
    size: int
    store: Any
    workers: Any = None
    failure: str = ""
    messages: Any = None
    group: Any = None

    def meet(self, device: torch.device) -> None:
        """Wait until all ranks are ready, and connect them for the tensors of `device`.

        The runner calls it when the model is loaded. A fork's `make_model` may have called it.
        """
        if self.group is not None:
            return
        CONNECTED.add(self)
        self.store.add("ready", 1)
        while int(self.store.get("ready")) < self.size:
            self.check()
            time.sleep(0.02)
        # Only rank 0 stops waiting. The others then end, because their connections are closed.
        timeout = timedelta(seconds=STEP_TIMEOUT if self.rank == 0 else 1e7)
        options: Any = timeout  # gloo then takes the interface that GLOO_SOCKET_IFNAME names
        if not UNDER_TORCHRUN:
            torch.set_num_threads(max(1, NUM_THREADS // self.size))  # the ranks share the cores
            options = dist.ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.messages = dist.ProcessGroupGloo(self.store, self.rank, self.size, options)
        self.group = self.messages
        if device.type == "cuda":
            # A lost rank must abort the collectives of the others, not end their processes.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
            self.group = dist.ProcessGroupNCCL(
                dist.PrefixStore("nccl", self.store),
                self.rank,
                self.size,
                timeout,  # ty: ignore[invalid-argument-type]  # the stubs have only options here
            )

    # ── what a step needs ─────────────────────────────────────────────────────────────────────────

    @contextmanager
    def step(self, inputs: object) -> Iterator[None]:
        """Around a step of rank 0: send its inputs to the workers, where `receive` returns them.

        If the step fails, the engine ends.
        """
        try:
            self.check()
            dist.broadcast_object_list([inputs], group=self.messages, group_src=0, device=CPU)
            yield
            # On a GPU, sums may be wrong without an error if a rank is lost, so wait for them.
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            self.check()
        except BaseException as error:
            self.end(error)
            # Later steps also fail, because some ranks may have computed this one and others not.
            self.failure = f"rank 0 failed within a step: {error!r}"
            if isinstance(error, Exception):  # Ctrl-C itself passes through
                self.check()
            raise

    def receive(self) -> Any:
        """Wait for the inputs of rank 0's next step. The process ends when rank 0 does."""
        messages = [None]
        try:
            dist.broadcast_object_list(messages, group=self.messages, group_src=0, device=CPU)
        except RuntimeError:  # the connection is closed
            raise SystemExit from None
        return messages[0]

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Replace x by the sum of the x of all ranks, or by their minimum, …"""
        self.group.allreduce([x], op).wait()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """The x [n, columns] of all ranks as one [n, size · columns], on each rank."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    # ── the end ───────────────────────────────────────────────────────────────────────────────────

    def check(self, seconds: float = 0.0) -> None:
        """Raise RuntimeError if a rank has failed, or if a worker fails within `seconds`."""
        try:
            if self.workers is not None and not self.failure:
                self.workers.join(seconds)  # ends all workers if one has failed
        except ProcessException as error:  # counts the workers from 0
            self.failure = f"rank {error.error_index + 1} has failed: {error.msg.strip()}"
        if self.failure:
            raise RuntimeError(f"the engine has ended: {self.failure}")

    def end(self, error: BaseException) -> None:
        """End the workers after an error. Raise RuntimeError if one of them has caused it."""
        try:
            if isinstance(error, RuntimeError):
                self.check(seconds=3.0)  # a connection may end before its process does
        finally:
            self.workers = None  # `_end_workers` ends them
            if self.group is not self.messages:
                self.group.abort()


# ── starting ──────────────────────────────────────────────────────────────────────────────────────


def start_ranks(size: int, make_runner: Any) -> Any:
    """Start the ranks. Returns the model runner of rank 0, `make_runner(ranks=…)`.

    Under torchrun each process is a rank. In a worker this call ends the process when rank 0 ends.
    If a worker cannot start, the RuntimeError has its traceback.
    """
    if size == 1:
        return make_runner()
    if UNDER_TORCHRUN:
        store, rank, num_processes = next(dist.rendezvous("env://"))
        if size != num_processes or store.add("engines", 1) > num_processes:
            raise ValueError(
                "under torchrun a program can have one engine, whose tensor_parallel_size is the"
                f" number of processes, {num_processes}, not {size}"
            )
        ranks = Ranks(rank, size, store)
        if rank > 0:
            make_runner(ranks=ranks).serve()
    else:
        folder = tempfile.mkdtemp(prefix="nanopaged-")
        ranks = Ranks(0, size, store=dist.FileStore(f"{folder}/store"))
        try:
            ranks.workers = spawn(
                _work,
                args=(size, folder, make_runner),
                nprocs=size - 1,
                join=False,
                daemon=True,
            )
        except BaseException:
            shutil.rmtree(folder)
            raise
        # It is called when nothing refers to `workers` any more, or when the program ends.
        weakref.finalize(ranks.workers, _end_workers, os.getpid(), ranks.workers.processes, folder)
    try:
        return make_runner(ranks=ranks)
    except BaseException as error:
        ranks.end(error)
        raise


def _work(index: int, size: int, folder: str, make_runner: Any) -> None:
    """Serve as one of the workers that `start_ranks` has started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    # A store whose file is missing waits for minutes, and no other thread can run meanwhile. So it
    # is made before the thread starts that removes the folder.
    ranks = Ranks(index + 1, size, store=dist.FileStore(f"{folder}/store"))
    threading.Thread(target=_end_with_rank_0, args=(folder,), daemon=True).start()
    make_runner(ranks=ranks).serve()


def _end_with_rank_0(folder: str) -> None:
    """End this worker when rank 0's process has ended, which may not have removed the folder."""
    multiprocessing.parent_process().join()  # ty: ignore[missing-union-attribute]
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _end_workers(pid: int, processes: list[Any], folder: str) -> None:
    """Kill the workers that the process `pid` has started, unless this is a child of it."""
    if os.getpid() == pid:
        for process in processes:
            process.kill()
            process.join(5)
        shutil.rmtree(folder, ignore_errors=True)


# ── if the program calls os.fork ──────────────────────────────────────────────────────────────────

# A child process has copies of the objects of this module, but the workers belong to its parent.
# When the child ends, `_end_workers` leaves them alone, but multiprocessing would kill them. And
# gloo's connections, when they are destroyed, would wait forever for threads that a child lacks.


def _leave_to_parent() -> None:
    """In a child process, forget the workers, and never destroy a connection."""
    multiprocessing.process._children.clear()  # ty: ignore[missing-attribute]
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(list(CONNECTED)))  # one reference too many


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_leave_to_parent)
