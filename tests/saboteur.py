"""A model runner of which a worker does what a file says. A worker imports nothing else of the tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from nanopaged.attention.metadata import StepInputs
from nanopaged.model_runner import ModelRunner


class Saboteur(ModelRunner):
    def __init__(self, *args: Any, orders: Path, **kwargs: Any) -> None:
        self.orders = orders
        self.obey("start")
        super().__init__(*args, **kwargs)

    def forward(self, inputs: StepInputs) -> tuple[torch.Tensor, ...]:
        self.obey("step")
        return super().forward(inputs)

    def obey(self, when: str) -> None:
        order = self.orders.read_text(encoding="utf-8") if self.orders.exists() else ""
        if not order.startswith(when) or os.getpid() == int(os.environ["TEST_PID"]):
            return
        self.orders.write_text("", encoding="utf-8")
        if "raise" in order:
            raise ValueError("sabotage")
        if "die" in order:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in order:
            time.sleep(1000)
