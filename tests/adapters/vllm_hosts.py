"""A vLLM executor for several hosts on one machine, in place of the one for Ray.

Each host is a process with a real tpu-inference worker (`vllm_host`); together they have one model on the devices of
all. As in tpu-inference's `RayDistributedExecutorV2`, one pickled call goes to every worker, with async scheduling more
follow before it is answered, vLLM's `KVOutputAggregator` joins what the connectors answer, and the engine learns from
the workers how many states there are.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-not-found, unused-ignore]
from tpu_inference.core.hybrid_coordinator import MambaPoolSyncExecutorMixin, maybe_install_hybrid_coordinator_hooks
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import FutureWrapper

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
_ANSWER_S = 240.0


class HostsError(Exception):
    """A host has died or does not answer; the message has the end of its log."""


class NodesOfRay:
    """A Ray cluster of so many nodes, as far as the connector asks Ray."""

    def __init__(self, num_hosts: int) -> None:
        self._num_hosts = num_hosts

    def install(self) -> None:
        import ray
        from vllm.platforms import current_platform

        node = {"Alive": True, "Resources": {current_platform.ray_device_key: 1.0}}
        ray.nodes = lambda: [node] * self._num_hosts


class HostsExecutor(MambaPoolSyncExecutorMixin, Executor):
    """See the module."""

    num_hosts = 2
    num_devices = 1
    available_nbytes = 0, 0
    """By host, the free host memory that it measures; 0 is what there is."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        maybe_install_hybrid_coordinator_hooks(self.vllm_config)
        self._futures: deque[Any] = deque()  # of calls without an answer, the last one first
        self._children: list[subprocess.Popen[bytes]] = []
        self._connections: list[Any] = []
        self._logs: list[Any] = []
        port = free_port()
        for host in range(self.num_hosts):
            ours, theirs = multiprocessing.Pipe()
            log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
            available = self.available_nbytes[host]
            words = [str(word) for word in (host, self.num_hosts, self.num_devices, port, available, theirs.fileno())]
            self._children.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.adapters.vllm_host", *words],
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._connections.append(ours)
            self._logs.append(log)
        for host in range(self.num_hosts):
            self._receive(host)
        kwargs = {
            "vllm_config": self.vllm_config,
            "local_rank": 0,
            "rank": 0,
            "distributed_init_method": "",
            "is_driver_worker": True,
            "shared_worker_lock": None,
        }
        self.collective_rpc("init_worker", kwargs={"all_kwargs": [kwargs]})
        self.collective_rpc("init_device")
        self.collective_rpc("load_model")

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        return self._call(method, args, kwargs, non_block=non_block)

    def _call(
        self,
        method: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        non_block: bool,
        aggregate: Callable[[list[Any]], Any] = list,
    ) -> Any:
        message = cloudpickle.dumps((method, args, kwargs or {}))
        for host, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError as e:
                raise self._error(host) from e
        future = FutureWrapper(self._futures, self._receive_all, aggregate)
        return future if non_block else future.result()

    def _receive_all(self) -> list[Any]:
        return [self._receive(host) for host in range(self.num_hosts)]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self._joined("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._joined("sample_tokens", grammar_output, non_block)

    def kill(self, host: int) -> None:
        self._children[host].send_signal(signal.SIGKILL)

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        for connection in self._connections:
            connection.close()
        for child in self._children:
            child.kill()
            child.wait()
        for log in self._logs:
            log.close()
        self._children, self._connections, self._logs = [], [], []

    def _joined(self, method: str, argument: Any, non_block: bool) -> Any:
        """The output of the first host, with what the connectors of all hosts report, as in vLLM's own executors."""
        aggregator = self.kv_output_aggregator

        def join(outputs: list[Any]) -> Any:
            return outputs[0] if aggregator is None else aggregator.aggregate(outputs, 0)

        return self._call(method, (argument,), non_block=non_block, aggregate=join)

    def _receive(self, host: int) -> Any:
        """The next answer of a host. Any host that ends meanwhile, ends the wait."""
        connection = self._connections[host]
        pidfds = {os.pidfd_open(child.pid): i for i, child in enumerate(self._children) if child.poll() is None}
        try:
            ready: list[Any] = multiprocessing.connection.wait([connection, *pidfds], _ANSWER_S)
            if connection in ready:
                message = connection.recv_bytes()
                return cloudpickle.loads(message) if message else None
        except (EOFError, OSError) as e:
            raise self._error(host) from e
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
        if not ready:
            raise HostsError(f"host {host} has not answered for {_ANSWER_S:g} s: {self._tails()}")
        raise self._error(pidfds[ready[0]])

    def _error(self, host: int) -> HostsError:
        self._children[host].wait()
        # When one is killed, the others end in their next collective.
        killed = (i for i, child in enumerate(self._children) if (child.poll() or 0) < 0)
        host = next(killed, host)
        status = self._children[host].returncode
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}: {self._tails()}"
        return HostsError(f"host {host} of {self.num_hosts} has died ({how})")

    def _tails(self) -> str:
        tails = []
        for host, log in enumerate(self._logs):
            log.seek(0)
            tails.append(f"--- host {host} wrote:\n{log.read().decode(errors='replace')[-6000:]}")
        return "\n".join(tails)
