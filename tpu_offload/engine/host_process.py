"""The process of one host: makes the calls that the engine sends, in the order in which they arrive."""

import contextlib
import dataclasses
import functools
import os
import pickle
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar, final

import jax
from jaxlib import _jax

from tpu_offload import CacheEpoch, CachesLostError, KVLayout, OffloadConfig, OffloadWorker, StepPlan, StepReport
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.runner import ModelRunner, StepOutput, cache_layout
from tpu_offload.engine.shards import make_mesh


@dataclasses.dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a host: a call has raised.

    Attributes:
      error: the exception, in one line.
    """

    STATUS: ClassVar[int] = 3
    """Exit status of its process."""

    error: str


def join_hosts(host: int, num_hosts: int, *, num_devices: int, port: int) -> None:
    """Makes this process one of several that share one model, on the CPU, before JAX has any device.

    Args:
      host: number of this process.
      num_hosts: number of processes.
      num_devices: devices of each.
      port: free port on which process 0 coordinates.
    """
    # Loopback only; by default it listens on the machine's network address.
    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname="127.0.0.1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, num_hosts, host, coordinator_bind_address=address)


def run_host(
    host: int,
    num_hosts: int,
    num_devices: int,
    port: int,
    engine: "Connection[Any, Any]",
    available_nbytes: int | None,
    wrap_copier: Callable[[Any, Any], Any] | None,
) -> None:
    """Runs until the engine closes the connection; arguments as for `Hosts`."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # a Ctrl-C is for the engine, which ends this process
        signal.signal(signum, signal.SIG_IGN)
    _silence_the_runtime()
    status = 0
    try:
        join_hosts(host, num_hosts, num_devices=num_devices, port=port)
        _serve(_Host(host, available_nbytes, wrap_copier), engine)
    except Exception as e:
        status = Failed.STATUS
        with contextlib.suppress(OSError):  # the engine has ended
            engine.send(Failed(f"{type(e).__name__}: {' '.join(str(e).split())}"))
    os._exit(status)  # not an orderly shutdown: it would wait for the other hosts


def _silence_the_runtime() -> None:
    """Keeps stderr for Python: collectives write a line per device, and pages when another host has died."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _serve(host: "_Host", engine: "Connection[Any, Any]") -> None:
    while True:
        try:
            name, args, answers = pickle.loads(engine.recv_bytes())
        except EOFError:
            return
        answer = getattr(host, name)(*args)
        if answers:
            engine.send(answer)


@final
class _Host:
    """The calls of `Hosts`, `HostRunner` and `HostWorkers` on one host."""

    def __init__(self, host: int, available_nbytes: int | None, wrap_copier: Callable[[Any, Any], Any] | None) -> None:
        self._options: dict[str, Any] = {"worker_id": host, "available": available_nbytes}
        if wrap_copier is not None:
            self._options["wrap_copier"] = wrap_copier
        self._mesh = make_mesh(jax.devices())
        self._runner: ModelRunner | None = None
        self._worker: OffloadWorker | None = None
        self._has_lost = False  # the worker knows that the caches are lost
        self._outputs: dict[int, StepOutput] = {}

    def ready(self) -> None:
        """The process has started."""

    def start(self, model_config: ModelConfig, engine_config: EngineConfig, offload: OffloadConfig | None) -> KVLayout:
        self.close_worker()
        self._runner, self._outputs, self._has_lost = None, {}, False
        self._runner = ModelRunner(model_config, engine_config, mesh=self._mesh)
        layout = cache_layout(model_config, engine_config, self._runner.kv_caches)
        if offload is not None:
            self._worker = OffloadWorker(offload, layout, self._runner.kv_caches, **self._options)
        return layout

    # The runner.

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "not started"
        return self._runner

    def step(self, number: int, spans: list[TokenSpan]) -> None:
        self._outputs[number] = self.runner.step(spans)

    def read(self, number: int) -> Any:
        return self._outputs.pop(number).read()

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        self.runner.copy_blocks(copies)

    def renew_caches(self) -> None:
        if self._worker is not None and not self._has_lost:
            self._worker.mark_caches_lost()
        self._has_lost = False
        self.runner.renew_caches()

    def warm_up(self) -> None:
        self.runner.warm_up()

    # The worker.

    @property
    def worker(self) -> OffloadWorker:
        assert self._worker is not None, "offloading is off"
        return self._worker

    def cache_epoch(self) -> CacheEpoch:
        return self.worker.cache_epoch

    def begin_step(self, plan: StepPlan) -> str:
        """Returns the error if the caches are lost."""
        try:
            self.runner.kv_caches = self.worker.begin_step(plan, self.runner.kv_caches)
        except CachesLostError as e:
            self._has_lost = True
            return str(e)
        return ""

    def end_step(self, plan: StepPlan) -> None:
        self.worker.end_step(plan, self.runner.kv_caches)

    def poll(self, wait: bool, wait_s: float) -> StepReport:
        return self.worker.poll(wait=wait, wait_s=wait_s)

    def wait_until_allocated(self) -> None:
        self.worker.wait_until_allocated()

    def close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
