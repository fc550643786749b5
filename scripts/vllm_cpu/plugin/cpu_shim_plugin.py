"""Installs `cpu_shim` in every process that vLLM starts, and faults in our connector's copies where one asks for them.

    CPU_SHIM_FAULTS='{"seed": 7, "load raises": 0.05, "load leaves out a block": 0.02}'

The faults are those of `tests.soak.faults`, each with its probability a copy. They are put where the worker takes
an argument for it; the library does not know of them.
"""

import functools
import json
import os
import time
from typing import Any

_installed = False


def install() -> None:
    """What vLLM's plugin loader calls; a process may load plugins more than once."""
    global _installed
    if not _installed:
        _installed = True
        import cpu_shim

        cpu_shim.install()
        _look_at_models_here()
        if "CPU_SHIM_FAULTS" in os.environ:
            _plant(json.loads(os.environ["CPU_SHIM_FAULTS"]))


def _look_at_models_here() -> None:
    """vLLM asks a process of its own what a model can do, to keep CUDA out of this one: with ten seconds of imports."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


def _plant(settings: dict[str, Any]) -> None:
    from tests.soak.faults import Fault, Faults, FaultyCopier
    from tpu_offload.worker import OffloadWorker

    seed = settings.pop("seed", 0)
    rates = {Fault(name): rate for name, rate in settings.items()}
    faults = Faults(seed, job_timeout_s=1.0, clock=time.monotonic, rates=rates)
    faults.active = True
    make = OffloadWorker.__init__

    @functools.wraps(make)
    def make_faulty(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, wrap_copier=lambda copier, store: FaultyCopier(copier, store, faults), **kwargs)

    OffloadWorker.__init__ = make_faulty  # type: ignore[method-assign]
