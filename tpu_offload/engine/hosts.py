"""An engine on several hosts: one process for each, all running the same steps, and the calls that reach them.

The engine's scheduler and the `OffloadScheduler` stay in the process of the engine, which has none of the caches. Each
host is a process with a `ModelRunner` and an `OffloadWorker` (`host_process`); the caches are global arrays, so that
every host must dispatch the same programs in the same order. `HostRunner` and `HostWorkers` have the calls of those
two: a call is pickled once and sent to every host, which makes its calls in the order in which they arrive. A
`StepPlan` goes down like that, and a `StepReport` comes back from each host.

A host that dies leaves the others waiting in a collective. So a thread watches the processes: when one has ended, it
kills the others, the engine's connections break, and the call at hand raises `HostError`.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, final

import numpy as np

from tpu_offload import (
    CacheEpoch,
    CachesLostError,
    FusedOutcome,
    FusedStep,
    KVLayout,
    OffloadConfig,
    OffloadError,
    StepPlan,
    StepReport,
)
from tpu_offload.engine.batch import TokenSpan
from tpu_offload.engine.config import EngineConfig, ModelConfig
from tpu_offload.engine.host_process import Failed, run_host

_ANSWER_S = 600.0  # most time for one call, compilation included, of a host that lives
_END_S = 10.0

Array = np.ndarray[Any, Any]
Caches = list[Any]


class HostError(OffloadError):
    """A process of the engine has died, refuses its settings or does not answer; the engine cannot continue."""


@final
class Hosts:
    """Starts the processes, sends them calls, and ends them. Use it as a context manager.

    The processes are on this machine and have the devices of JAX's CPU backend.

    Args:
      num_hosts: number of processes.
      num_devices: devices of each.
      available_nbytes: free host memory for the library in each process; None lets each measure it.
      wrap_copiers: for tests, by host the `wrap_copier` of its `OffloadWorker`, picklable.
    Raises:
      HostError: a process does not start.
    """

    def __init__(
        self,
        num_hosts: int,
        num_devices: int,
        *,
        available_nbytes: int | None = None,
        wrap_copiers: Mapping[int, Callable[[Any, Any], Any]] | None = None,
    ) -> None:
        self.num_hosts = num_hosts
        self.num_devices = num_devices
        self.runner = HostRunner(self)
        self.workers = HostWorkers(self)
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection[Any, Any]] = []
        self._dead = -1  # the host that has ended first
        self._errors: dict[int, str] = {}  # that hosts have sent
        self._is_closing = False
        context = multiprocessing.get_context("spawn")
        port, wrap_copiers = _free_port(), wrap_copiers or {}
        try:
            for host in range(num_hosts):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=run_host,
                    args=(host, num_hosts, num_devices, port, theirs, available_nbytes, wrap_copiers.get(host)),
                    name=f"tpu_offload-host-{host}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
            self.ask("ready")
        except BaseException:
            self.close(by_force=True)
            raise

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.close(by_force=error is not None)

    @property
    def process_ids(self) -> list[int]:
        """Of the hosts, in their order."""
        return [process.pid or 0 for process in self._processes]

    def start(self, model_config: ModelConfig, engine_config: EngineConfig, offload: OffloadConfig | None) -> KVLayout:
        """Makes model, caches and worker on every host, in place of those of the engine before.

        Raises:
          HostError: a host refuses the settings.
        """
        layouts: list[KVLayout] = self.ask("start", model_config, engine_config, offload)
        return layouts[0]

    def tell(self, name: str, *args: Any) -> None:
        """Has every host make a call without an answer."""
        self._send(name, args, answers=False)

    def ask(self, name: str, *args: Any) -> list[Any]:
        """Has every host make a call; returns the answers, in the order of the hosts.

        Raises:
          HostError: a host has died, its call has raised, or it does not answer.
        """
        self._send(name, args, answers=True)
        return [self._receive(host) for host in range(self.num_hosts)]

    def close(self, *, by_force: bool = False) -> None:
        """Ends the processes; kills them with `by_force`, or if they do not exit."""
        self._is_closing = True
        for connection in self._connections:
            connection.close()  # makes them exit
        for process in self._processes:
            process.join(0 if by_force else _END_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _send(self, name: str, args: Sequence[Any], *, answers: bool) -> None:
        message = pickle.dumps((name, args, answers), pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            try:
                connection.send_bytes(message)
            except OSError as e:
                raise self._error() from e

    def _receive(self, host: int) -> Any:
        connection = self._connections[host]
        try:
            if not connection.poll(_ANSWER_S):
                raise HostError(f"host {host} of {self.num_hosts} has not answered for {_ANSWER_S:g} s")
            answer = connection.recv()
        except (EOFError, OSError) as e:
            raise self._error() from e
        if isinstance(answer, Failed):
            self._errors[host] = answer.error
            raise self._error()
        return answer

    def _error(self) -> HostError:
        """Why the connections are broken: what the first host that ended has said, or how it ended."""
        if self._is_closing:
            return HostError("the hosts are closed; expected no call after close()")
        self._watcher.join()
        host = self._dead
        return HostError(
            f"host {host} of {self.num_hosts} {self._last_words(host)}: the engine cannot continue without it"
        )

    def _watch(self) -> None:
        """Waits for the end of any process, and kills the others."""
        ended = multiprocessing.connection.wait([process.sentinel for process in self._processes])
        if self._is_closing:
            return
        first = [host for host, process in enumerate(self._processes) if process.sentinel in ended]
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        # Of several, one that was killed is the cause, and the errors of the others its consequence.
        killed = [host for host in first if self._processes[host].exitcode not in (0, Failed.STATUS)]
        self._dead = (killed or first)[0]

    def _last_words(self, host: int) -> str:
        status, connection = self._processes[host].exitcode or 0, self._connections[host]
        with contextlib.suppress(EOFError, OSError):
            while status == Failed.STATUS and host not in self._errors and connection.poll():
                answer = connection.recv()
                if isinstance(answer, Failed):
                    self._errors[host] = answer.error
        if host in self._errors:
            return f"has failed ({self._errors[host]})"
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return f"has died ({how})"


@final
class HostOutput:
    """A step that the hosts have dispatched; see `StepOutput`.

    Args:
      hosts: they have the arrays.
      number: of the step.
    """

    copied = None  # copies inside the forward pass are for one host

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts, self._number = hosts, number

    def read(self) -> tuple[Array, Array]:
        """See `StepOutput.read`.

        Raises:
          HostError: two hosts have computed different tokens, so that they have not run the same programs.
        """
        first, *others = self._hosts.ask("read", self._number)
        for host, other in enumerate(others, 1):
            if any(one.tobytes() != another.tobytes() for one, another in zip(first, other, strict=True)):
                raise HostError(f"hosts 0 and {host} have computed different tokens in step {self._number}")
        tokens, logprobs = first
        return tokens, logprobs


@final
class HostRunner:
    """The `ModelRunner`s of all hosts.

    Attributes:
      kv_caches: empty: the hosts have the arrays.
    """

    def __init__(self, hosts: Hosts) -> None:
        self.kv_caches: Caches = []
        self._hosts = hosts
        self._num_steps = 0

    def step(self, spans: Sequence[TokenSpan], fused: FusedStep | None = None) -> HostOutput:
        """See `ModelRunner.step`; there are no fused copies."""
        assert fused is None or fused.inputs is None, "fused copies are for one host"
        self._num_steps += 1
        self._hosts.tell("step", self._num_steps, spans)
        return HostOutput(self._hosts, self._num_steps)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `ModelRunner.copy_blocks`."""
        if copies:
            self._hosts.tell("copy_blocks", copies)

    def renew_caches(self) -> None:
        """See `ModelRunner.renew_caches`; what the other hosts still have is useless, and lost too."""
        self._hosts.tell("renew_caches")

    def warm_up(self, fused_shapes: Sequence[FusedStep] = ()) -> None:
        """See `ModelRunner.warm_up`."""
        self._hosts.ask("warm_up")


@final
class HostWorkers:
    """The `OffloadWorker`s of all hosts; see there."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    @property
    def num_hosts(self) -> int:
        """Number of workers."""
        return self._hosts.num_hosts

    @property
    def cache_epochs(self) -> list[CacheEpoch]:
        """Of every worker."""
        return self._hosts.ask("cache_epoch")

    def begin_step(self, plan: StepPlan, kv_caches: Caches, *, fuse: bool = False) -> Caches:
        """See `OffloadWorker.begin_step`.

        Raises:
          CachesLostError: a load has destroyed the caches of a host. No host has dispatched anything after that;
            continue with new caches on all of them.
        """
        errors: list[str] = self._hosts.ask("begin_step", plan)
        for host, error in enumerate(errors):
            if error:
                raise CachesLostError(f"host {host} of {self.num_hosts}: {error}")
        return kv_caches

    def end_step(self, plan: StepPlan, kv_caches: Caches, outcome: FusedOutcome | None = None) -> None:
        """See `OffloadWorker.end_step`."""
        self._hosts.tell("end_step", plan)

    def poll(self, *, wait: bool = False, wait_s: float = math.inf) -> list[StepReport]:
        """The reports of all workers; with `wait`, each waits for its own copies, no longer than `wait_s`."""
        return self._hosts.ask("poll", wait, wait_s)

    def fused_step(self) -> FusedStep:
        """No copies: those inside the forward pass are for one host."""
        return FusedStep()

    def fused_shapes(self) -> list[FusedStep]:
        """None, likewise."""
        return []

    def wait_until_allocated(self) -> None:
        """See `OffloadWorker.wait_until_allocated`."""
        self._hosts.ask("wait_until_allocated")

    def close(self) -> None:
        """See `OffloadWorker.close`."""
        self._hosts.ask("close_worker")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
