"""Installs `cpu_shim` in every process that vLLM starts, and injects faults into our connector's copies on request.

    CPU_SHIM_FAULTS='{"seed": 7, "load raises": 0.05, "load leaves out a block": 0.02}'

The faults are those of `tests.soak.faults`, each with its probability per copy. They are injected through an argument
of the worker; the library has no code for them.
"""

import functools
import json
import os
import time
from typing import Any

_installed = False


def install() -> None:
    """Entry point for vLLM's plugin loader; idempotent, because a process may load plugins more than once."""
    global _installed
    if not _installed:
        _installed = True
        import cpu_shim

        cpu_shim.install()
        _inspect_models_in_process()
        if "CPU_SHIM_FAULTS" in os.environ:
            _inject_faults(json.loads(os.environ["CPU_SHIM_FAULTS"]))


def _inspect_models_in_process() -> None:
    """Makes vLLM inspect models in this process, not in a subprocess with ten seconds of imports (to avoid CUDA
    here).
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda ask: ask()


def _inject_faults(settings: dict[str, Any]) -> None:
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
