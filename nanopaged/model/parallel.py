"""Tensor parallelism: several processes, the ranks, hold a share of each layer and compute steps together.

Rank 0 is the process of the engine. It alone has the scheduler, the block manager and the sampler. The other
ranks, its workers, have a model runner and wait for messages.

    rank 0    schedule ─▶ message ─▶ forward ─▶ logits ─▶ sample, update
    rank 1                   └────▶ forward ─▶ logits ─┘ gathered

A rank has the attention heads, the columns of the MLP and the rows of the vocabulary that are its share. Its
layers give partial results, which are added up over all ranks (all-reduce) twice a layer: after `o_proj` and
after `down_proj` (Megatron-LM, arXiv 1909.08053). A rank stores the K/V of its own heads, in the same
physical blocks as the others: block tables are the same everywhere, and K/V is never sent (PagedAttention,
§4.6).

This module knows no sequences and no layers. Ranks find each other, and messages are passed, through a
`TCPStore` of rank 0: a dictionary that all ranks can read and write.

Nothing is encrypted, and no rank proves who it is. The ports of ranks that are started here are open on
127.0.0.1 alone (NCCL's, on GPUs, are its own). Under torchrun they are open to the network: a stranger who
reaches them can read the tokens of every step and send messages of his own. See docs/ranks.md.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import multiprocessing.process
import os
import signal
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from multiprocessing.process import BaseProcess
from os.path import commonprefix
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanopaged.attention.metadata import AttentionMetadata, StepInputs
from nanopaged.kernels.devices import pick_device
from nanopaged.kv_cache import take_rows

# Seconds that ranks wait for each other within a step; a rank that takes longer is lost.
STEP_TIMEOUT = float(os.environ.get("NANOPAGED_STEP_TIMEOUT", 30))
START_TIMEOUT = 600.0  # seconds that ranks wait for each other to start and to load their weights
FOREVER = timedelta(days=365)
NUM_THREADS = torch.get_num_threads()  # before any engine has changed it
METADATA_ARRAYS = "query_lens", "context_lens", "slot_mapping"
LOOPBACK = "127.0.0.1"  # other machines cannot reach a port of this address
METHODS = ("cheaper_preemption",)  # of a worker, which a message may name


class Worker(Protocol):
    """What the other ranks run."""

    model: Any  # `Model.logits` computes this rank's share of the logits

    def forward(self, inputs: StepInputs) -> Tensor:
        """Move blocks and run the model → hidden states [num_tokens, hidden_size]."""

    def cheaper_preemption(self) -> str:
        """Take part in a measurement."""


@contextmanager
def ignoring_ctrl_c() -> Iterator[None]:
    """Do not let a second Ctrl-C leave the block half done."""
    if threading.current_thread() is not threading.main_thread():  # only there it raises anything
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)  # None: not a handler of Python


class Ranks:
    """This process as one of the `size` ranks of a model.

    Args:
        store: the store of rank 0.
        device: where the tensors of this rank are.
        processes: on rank 0, the workers that it has started; [] if a launcher started them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: dist.Store,
        device: torch.device,
        processes: list[BaseProcess],
    ) -> None:
        self.rank, self.size, self.store, self.device = rank, size, store, device
        self.processes = processes
        self.lost: str | None = None  # why the engine has ended
        self.in_step = False  # whether the other ranks may be in a step
        self.meeting = -1
        self.message_bytes = 0  # of the last message
        self.group: Any = None  # Gloo's or NCCL's; torch's types lack the methods that both have
        if rank == 0:
            self.finalizer = weakref.finalize(self, end_workers, store, processes)  # or as the program ends
            if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
                forked = weakref.WeakMethod(self._forked)
                os.register_at_fork(after_in_child=lambda: (call := forked()) and call())

    def _forked(self) -> None:
        """In a process that was forked from rank 0's, which alone has the workers: leave them to it.

        Neither this module nor `multiprocessing`, which kills daemonic processes, may end them as the child
        ends. The connections must never be closed here: that waits for threads which a fork does not copy.
        """
        forked = f"this engine belongs to process {os.getppid()}, from which this one was forked"
        self.lost = self.lost or f"{forked}: make another here"
        self.finalizer.detach()
        multiprocessing.process._children.difference_update(self.processes)  # ty: ignore[missing-attribute]
        for connection in (self.store, self.group):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # one more, so that it never becomes 0

    # ── what layers need ──────────────────────────────────────────────────────────────────────────

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of x, in place."""
        self._group().allreduce([x]).wait()
        return x

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks have."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        numbers = torch.tensor([number], device=self.device)
        self._group().allreduce([numbers], options).wait()
        return int(numbers)

    def gather(self, x: Tensor) -> Tensor:
        """On rank 0, the x [n, columns] of all ranks side by side: [n, size · columns]. Elsewhere, x."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._group().gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1) if parts else x

    def _group(self) -> Any:
        if self.group is None:
            raise RuntimeError("the ranks do not compute together now")
        return self.group

    # ── rank 0: send messages ─────────────────────────────────────────────────────────────────────

    @contextmanager
    def together(self, work: StepInputs | str) -> Iterator[None]:
        """Have the workers compute `work` (a step, or a method of theirs) while rank 0 computes the same.

        If the block fails on any rank, all ranks leave it and meet again, so that the next step can be tried.

        Raises:
            RuntimeError: a worker failed or is lost; the message names the rank and has its traceback.
        """
        if self.rank > 0:
            yield
            return
        if self.lost is not None:
            raise RuntimeError(self.lost)
        if self.in_step:  # a second Ctrl-C came before `_recover`
            self._recover()
        self.in_step = True
        try:
            self.message_bytes = send(self.store, self.encode(work) if isinstance(work, StepInputs) else work)
            yield
            # On a GPU an all-reduce whose other ranks are gone may end without an error, but with wrong sums.
            if self.device.type == "cuda" and why_failed(None, self.store, self.meeting, self.processes):
                raise RuntimeError("a rank did not take part in the whole step")
        except BaseException as error:
            reason = why_failed(error, self.store, self.meeting, self.processes)
            self._recover()
            if reason is not None:
                raise RuntimeError(f"a step failed: {reason}") from error
            raise
        self.in_step = False

    @ignoring_ctrl_c()
    def _recover(self) -> None:
        """After a failed step, meet again.

        A worker may still be in the step, waiting for another rank. It is freed when that rank leaves, as it
        closes its connections. It then waits for the last message or for the one after it.
        """
        try:
            self._leave()
            last = self.store.add("num_messages", 0)
            self.store.set(f"message/{last}", json.dumps(self.meeting + 1))
            send(self.store, self.meeting + 1)
            self.meet(self.meeting + 1, STEP_TIMEOUT + 5)
            self.in_step = False
        except BaseException as error:
            self.lost = f"the engine has ended: {str(error) or type(error).__name__}"
            end_workers(self.store, self.processes)
            raise

    def meet(self, meeting: int = 0, seconds: float = START_TIMEOUT) -> None:
        """Connect all ranks, once all of them are ready. The tables sent before are forgotten."""
        self.meeting, self.tables = meeting, {}
        self.store.set(f"ready/{meeting}/{self.rank}", "")
        if self.rank == 0:
            deadline = time.monotonic() + seconds
            for rank in range(1, self.size):
                while not self.store.check([f"ready/{meeting}/{rank}"]):
                    if reason := why_failed(None, self.store, meeting, self.processes):
                        raise RuntimeError(reason)
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"rank {rank} has not answered for {seconds:.0f} seconds")
                    time.sleep(0.01)
            self.store.set(f"all ready/{meeting}", "")
        self.store.wait([f"all ready/{meeting}"], timedelta(seconds=seconds))
        store, timeout = dist.PrefixStore(f"group/{meeting}", self.store), timedelta(seconds=STEP_TIMEOUT)
        if self.device.type == "cuda":
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # abort, do not end the process
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        elif under_torchrun():  # perhaps on several machines
            self.group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        else:
            options = dist.ProcessGroupGloo._Options()  # ty: ignore[missing-attribute]
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
            self.group = dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _leave(self) -> None:
        """Close this rank's connections, so that ranks which wait for it fail at once."""
        if self.group is not None and self.device.type == "cuda":
            self.group.abort()
        self.group = None

    # ── workers: receive messages ─────────────────────────────────────────────────────────────────

    def serve(self, worker: Worker) -> None:
        """Do what rank 0 says, until it ends."""
        for number in count(1):
            try:
                self.store.wait([f"message/{number}"], FOREVER)
                message = json.loads(self.store.get(f"message/{number}"))
            except dist.DistError:
                return  # rank 0 was killed
            if message is None:
                return
            try:
                if isinstance(message, dict):
                    inputs = self.decode(message)
                    with torch.inference_mode():
                        hidden = worker.forward(inputs)
                        for rows in filter(None, inputs.logit_rows):  # in the order of `ModelRunner.execute`
                            worker.model.logits(take_rows(hidden, rows))
                elif message in METHODS:
                    getattr(worker, message)()
                elif isinstance(message, str):
                    raise ValueError(f"a message names the method {message!r}, but may name {METHODS} alone")
                elif message > self.meeting:
                    self.meet(message, STEP_TIMEOUT + 5)
            except Exception:
                self.report()

    def report(self) -> None:
        """Tell rank 0 of the exception that is being handled, and leave the others."""
        report_failure(self.store, self.rank, self.meeting)
        self._leave()

    # ── the message of a step ─────────────────────────────────────────────────────────────────────

    def encode(self, inputs: StepInputs) -> dict[str, Any]:
        """The inputs as plain lists. Of each block table only what is new since the last message is sent.

        sent before 5 2, now 5 2 7: [2, [7]], "keep 2, then 7"        sent before 0, now 4: [0, [4]]
        """
        metadata, tables, changes = inputs.metadata, {}, []
        for seq_id, table in zip(metadata.seq_ids, metadata.block_tables, strict=True):
            old = self.tables.get(seq_id, [])
            num_same = len(old) if table[: len(old)] == old else len(commonprefix([old, table]))
            changes.append([num_same, table[num_same:]])
            tables[seq_id] = list(table)
        self.tables = tables
        return {
            "moves": inputs.moves,
            "logit_rows": inputs.logit_rows,
            "num_decodes": metadata.num_decodes,
            "seq_ids": metadata.seq_ids,
            "block_tables": changes,
            **{name: getattr(inputs, name).tolist() for name in ("input_ids", "positions")},
            **{name: getattr(metadata, name).tolist() for name in METADATA_ARRAYS},
        }

    def decode(self, message: dict[str, Any]) -> StepInputs:
        """The inputs again."""
        seq_ids = message["seq_ids"]
        self.tables = {
            seq_id: self.tables.get(seq_id, [])[:num_same] + new
            for seq_id, (num_same, new) in zip(seq_ids, message["block_tables"], strict=True)
        }
        arrays = {name: np.array(message[name], dtype=np.int64) for name in METADATA_ARRAYS}
        tables = list(self.tables.values())
        return StepInputs(
            moves=message["moves"],
            input_ids=np.array(message["input_ids"], dtype=np.int64),
            positions=np.array(message["positions"], dtype=np.int64),
            metadata=AttentionMetadata(
                **arrays, block_tables=tables, num_decodes=message["num_decodes"], seq_ids=seq_ids
            ),
            logit_rows=message["logit_rows"],
        )


# ── starting ──────────────────────────────────────────────────────────────────────────────────────


def start(size: int, device_name: str, make_runner: Callable[..., Any]) -> Any:
    """The model runner of rank 0, among `size` ranks; of the only one, if `size` is 1.

    Started by a launcher with `size` processes (torchrun), each process is a rank: in the workers this call
    does not return, but ends the process when rank 0 ends. Otherwise the workers are started here.

    Args:
        make_runner: make_runner(ranks=…, device=…) gives the model runner of a rank; can be pickled.

    Raises:
        RuntimeError: a worker cannot start; the message has its traceback. Or as `make_runner`.
        ValueError: torchrun has started another number of processes, or this process may start none.
    """
    if size == 1:
        return make_runner()
    launched = under_torchrun()
    if launched and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # or all ranks would open a context on GPU 0
    device = pick_device(device_name)
    if launched:
        store, rank, num_launched = next(dist.rendezvous("env://"))
        if num_launched != size:
            raise ValueError(f"tensor_parallel_size is {size}, but torchrun started {num_launched} processes")
        device = rank_device(device, int(os.environ["LOCAL_RANK"]))
        if rank > 0:
            _work(rank, size, store, device, make_runner)
            raise SystemExit
        if store.add("num_engines", 1) > 1:
            raise ValueError("under torchrun a program can have one engine: its workers serve no other")
        workers = []
    else:
        if multiprocessing.current_process().daemon:
            raise ValueError(
                f"tensor_parallel_size is {size}, but this process is daemonic, and Python lets it start no "
                "workers: make it with multiprocessing.Process(daemon=False) or "
                "concurrent.futures.ProcessPoolExecutor (not multiprocessing.Pool), or use torchrun"
            )
        store = make_store()
        if device.type == "cpu":  # all ranks share the cores
            torch.set_num_threads(min(torch.get_num_threads(), max(1, NUM_THREADS // size)))
        workers = _make_workers(size, store.port, device, make_runner)
        device = rank_device(device, 0)
    processes: list[BaseProcess] = []
    try:
        for process in workers:
            process.start()
            processes.append(process)
        ranks = Ranks(0, size, store, device, processes)
        return make_runner(ranks=ranks, device=device)
    except BaseException as error:
        reason = why_failed(error, store, 0, processes)
        end_workers(store, processes)
        if reason is not None:
            hint = "; is the program a file, with its work under if __name__ == '__main__'?"
            hint = hint if "(exit code 1)" in reason else ""
            raise RuntimeError(f"the engine cannot start: {reason}{hint}") from error
        raise


def under_torchrun() -> bool:
    """Whether torchrun has started this process, and all other ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def make_store() -> dist.TCPStore:
    """A store on a free port.

    torch would open the port on all addresses of this machine, so the socket is made here. (With libuv, torch
    2.7 takes no socket; every version, on every system, has the backend without libuv.)
    """
    listener = socket.create_server((LOOPBACK, 0))
    port, fd = listener.getsockname()[1], listener.detach()  # the store closes it
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, use_libuv=False
    )


def rank_device(device: torch.device, local_rank: int) -> torch.device:
    """The device of a rank: each has a GPU of its own, or all share the CPU."""
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ValueError(f"tensor_parallel_size needs a CUDA GPU a rank, or device='cpu', not {device}")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel_size needs a GPU for each rank; this machine has {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


def _make_workers(
    size: int, port: int, device: torch.device, make_runner: Callable[..., Any]
) -> list[BaseProcess]:
    Process, num_threads = multiprocessing.get_context("spawn").Process, torch.get_num_threads()
    return [
        Process(
            target=_worker_main,
            args=(rank, size, port, rank_device(device, rank), make_runner, num_threads),
            daemon=True,
            name=f"rank {rank}",
        )
        for rank in range(1, size)
    ]


def _worker_main(
    rank: int, size: int, port: int, device: torch.device, make_runner: Callable[..., Any], num_threads: int
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    torch.set_num_threads(num_threads)
    store = dist.TCPStore(LOOPBACK, port, is_master=False, use_libuv=False)
    _work(rank, size, store, device, make_runner)


def _work(
    rank: int, size: int, store: dist.Store, device: torch.device, make_runner: Callable[..., Any]
) -> None:
    try:
        ranks = Ranks(rank, size, store, device, [])
        worker = make_runner(ranks=ranks, device=device)
    except Exception:
        report_failure(store, rank, 0)
        raise  # torchrun may end rank 0 before it can tell
    ranks.serve(worker)


def report_failure(store: dist.Store, rank: int, meeting: int) -> None:
    """Tell rank 0 of the exception that is being handled, unless another rank has failed before."""
    store.compare_set(f"failure/{meeting}", "", f"rank {rank}:\n{traceback.format_exc()}")


def why_failed(
    error: BaseException | None, store: dist.Store, meeting: int, processes: list[BaseProcess]
) -> str | None:
    """What the first worker that failed since the `meeting` has reported, or which one died; None if none.

    Args:
        error: of rank 0. Only a RuntimeError can be the effect of a worker's failure.
    """
    if error is not None and not isinstance(error, RuntimeError):
        return None
    deadline = time.monotonic() + (0 if error is None else 3)  # a connection may end before its process does
    while True:
        if store.check([f"failure/{meeting}"]):
            return store.get(f"failure/{meeting}").decode()
        for rank, process in enumerate(processes, start=1):
            if not process.is_alive():
                return f"rank {rank} died (exit code {process.exitcode}): see its output"
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.05)


def send(store: dist.Store, message: Any) -> int:
    """Send a message from rank 0 to all workers, as JSON. Returns its bytes.

    A dict has the inputs of a step, a str is one of METHODS, a number is that of a meeting, None is the end.
    """
    data, number = json.dumps(message), store.add("num_messages", 1)
    store.set(f"message/{number}", data)
    store.delete_key(f"message/{number - 100}")  # read long ago
    return len(data)


def end_workers(store: dist.Store, processes: list[BaseProcess]) -> None:
    """Kill the workers that were started here, and tell those of a launcher to end."""
    if not processes:
        send(store, None)
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)
