"""Starts the processes of the rig, exchanges messages with them, and ends them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from tests.ports import free_port

_ROOT = Path(__file__).parents[2]
_START_S, _ANSWER_S, _END_S = 180.0, 240.0, 10.0  # generous limits of waits
_NUM_TRIES = 3  # another process may take the free port first


class ClusterError(Exception):
    """A process died or does not answer; the message has its last output."""


@final
class Cluster:
    """Processes that share one model over `jax.distributed`.

    Args:
      num_processes: number of processes.
      num_devices: devices per process.
    """

    def __init__(self, num_processes: int, num_devices: int) -> None:
        self.num_processes = num_processes
        self.num_devices = num_devices
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection[Any, Any]] = []
        self._logs: list[Any] = []
        for attempt in range(1, _NUM_TRIES + 1):
            try:
                self._start()
                return
            except ClusterError:
                self.close(by_force=True)
                if attempt == _NUM_TRIES:
                    raise
            except BaseException:
                self.close(by_force=True)
                raise

    def send(self, rank: int, message: object) -> None:
        """Sends a message to one process, which may still be processing earlier ones."""
        try:
            self._connections[rank].send(message)
        except OSError as e:
            raise ClusterError(self._story(rank, f"cannot be reached ({e})")) from e

    def receive(self, rank: int, *, timeout_s: float = _ANSWER_S) -> Any:
        """Receives the next message of one process."""
        if not self._connections[rank].poll(timeout_s):
            self._processes[rank].send_signal(signal.SIGUSR1)  # makes it dump its stacks
            time.sleep(0.5)
            raise ClusterError(self._story(rank, f"has not answered for {timeout_s:g} s"))
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError) as e:
            raise ClusterError(self._story(rank, "has died")) from e

    def close(self, *, by_force: bool = False) -> None:
        """Ends the processes; kills them with `by_force`, or if they do not exit."""
        for connection in self._connections:
            connection.close()  # makes them exit
        until_s = time.monotonic() + (0.0 if by_force else _END_S)
        for process in self._processes:
            try:
                process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self._connections, self._processes, self._logs = [], [], []

    def _start(self) -> None:
        port = free_port()
        environ = {
            **os.environ,
            "PYTHONPATH": str(_ROOT),
        }
        for rank in range(self.num_processes):
            ours, theirs = multiprocessing.Pipe()
            log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
            words = [str(word) for word in (rank, self.num_processes, self.num_devices, port, theirs.fileno())]
            self._connections.append(ours)
            self._logs.append(log)
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "tests.multiprocess.worker", *words],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C reaches only the engine's process
                )
            )
            theirs.close()
        for rank in range(self.num_processes):
            self.receive(rank, timeout_s=_START_S)

    def _story(self, rank: int, what: str) -> str:
        stories = []
        for other, log in enumerate(self._logs):
            log.seek(0)
            tail = log.read().decode(errors="replace")[-4000:]
            stories.append(f"--- process {other} (exit status {self._processes[other].poll()}) wrote:\n{tail}")
        return "\n".join([f"process {rank} of {self.num_processes} {what}", *stories])


@contextmanager
def cluster(num_processes: int, num_devices: int) -> Iterator[Cluster]:
    """A context manager that closes the cluster."""
    processes = Cluster(num_processes, num_devices)
    try:
        yield processes
    except BaseException:
        processes.close(by_force=True)
        raise
    processes.close()
