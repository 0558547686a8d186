"""The modules of docs/experiments that run the scheduler without a model, for the scripts beside this one."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
import arrivals
from lib import no_model
from lib.no_model import NoModel, make_request, make_scheduler

__all__ = ["NoModel", "arrivals", "make_request", "make_scheduler", "no_model"]
