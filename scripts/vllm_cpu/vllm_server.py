"""Runs a real `vllm serve` of the tiny model on the CPU (API process and engine process), for tests and benchmarks.

    with Folder() as folder, Server(folder, num_blocks=80, connector=OURS) as server:
        server.wait_until_ready()
        ...

Both processes load the shim through vLLM's plugin loader: `plugin/` is on their PYTHONPATH only, so other users of the
environment are not affected. A server listens on 127.0.0.1 only and writes to its folder only.
"""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

_HERE = Path(__file__).resolve().parent
if str(_HERE) not in sys.path:
    sys.path.append(str(_HERE))
import tiny_model  # noqa: E402

MODEL = "m"
BLOCK_SIZE = 16
OURS: Mapping[str, Any] = {
    "kv_connector": "TPUOffloadConnector",
    "kv_connector_module_path": "tpu_offload.adapters.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"num_cpu_chunks": 2048, "decode_save": True},
}
"""The configuration of docs/vllm.md, with generated tokens saved, as for chats."""

START_LIMIT_S = 900.0  # mostly imports: 25 s on two idle cores, many times that on busy ones
_ANSWER_LIMIT_S = 300.0
_END_LIMIT_S = 60.0
_DROPPED = ("TPU_OFFLOAD_", "VLLM_", "XLA_", "JAX_", "PYTHON", "CPU_SHIM_")  # not inherited from the parent process
_TRACKER_LIMIT_S = 5.0


class ServerError(Exception):
    """A server did not start or exited unexpectedly; the message has the end of its log."""


class Folder:
    """A temporary folder for servers of one model: weights, compiled programs, logs, sockets.

    Its path is short, because paths of Unix sockets must be.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self.model = self.path / "model"
        tiny_model.make(self.model)
        for name in ("home", "tmp"):
            (self.path / name).mkdir()

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()


class Server:
    """One server, started on construction; see `wait_until_ready`.

    Args:
      folder: folder for all files; servers of one folder share compiled programs.
      num_blocks: KV blocks in HBM, of `BLOCK_SIZE` tokens.
      connector: vLLM's `--kv-transfer-config`; None for no connector.
      arguments: additional arguments of `vllm serve`; they override those here.
      environ: additional environment variables of its processes.

    Attributes:
      port, url: its address.
      log_path: output of its processes.
      environ: the whole environment of its processes; also for vLLM's own clients.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        num_blocks: int,
        connector: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder.path / f"log-{self.port}.txt"
        command = [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.cli.main", "serve", str(folder.model)]
        command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-model-len", "1024", "--max-num-seqs", "8", "--max-num-batched-tokens", "256"]
        command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(num_blocks)]
        command += ["--gpu-memory-utilization", "0.5", "--enforce-eager", "--dtype", "bfloat16"]
        command += ["--enable-prompt-tokens-details", *arguments]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        self.environ = _environment(folder) | dict(environ or {})
        # When this process ends, in any way, the pipe closes and the keeper kills the server.
        self._keeper = subprocess.Popen(
            [sys.executable, str(_HERE / "vllm_server.py")], stdin=subprocess.PIPE, start_new_session=True
        )
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder.path,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(f"{self._process.pid}\n".encode())
        self._keeper.stdin.flush()
        self._seen: set[psutil.Process] = {psutil.Process(self._process.pid)}

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Blocks until the server answers.

        Raises:
          ServerError: it exited, or did not answer in time.
        """
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise ServerError(
                    f"vllm serve ended with status {self._process.returncode}; {self._cause()}\n{self.log_tail()}"
                )
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.request("GET", "/health")[0] == 200:
                    self.processes()
                    return
            time.sleep(0.1)
        raise ServerError(f"vllm serve does not answer after {limit_s:.0f} s:\n{self.log_tail()}")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Sends a request; returns status and text of the answer.

        Raises:
          OSError: connection refused or broken.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_LIMIT_S)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def reset_prefix_cache(self, *, external: bool) -> None:
        """Resets vLLM's prefix cache, with `external` also the host tier; retries while blocks are held.

        Raises:
          ServerError: blocks are still held at the end of the limit.
        """
        path = f"/reset_prefix_cache?reset_external={'true' if external else 'false'}"
        end_s = time.monotonic() + _ANSWER_LIMIT_S
        while time.monotonic() < end_s:
            status, text = self.request("POST", path)
            if status == 200 and json.loads(text)["success"]:
                return
            time.sleep(0.05)
        raise ServerError(f"the prefix cache cannot be reset: {status} {text}")

    def metrics(self, **labels: str) -> dict[str, float]:
        """Samples of `/metrics` with these labels, by name, summed over all other labels."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.request("GET", "/metrics")[1]):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    def log(self) -> str:
        """The whole log."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, num_lines: int = 100) -> str:
        """The end of the log."""
        return "\n".join(self.log().splitlines()[-num_lines:])

    def _cause(self) -> str:
        """The last error of the engine process, in one line; the API process's later messages do not have it."""
        errors = [line for line in self.log().splitlines() if line.startswith("(EngineCore") and "Error: " in line]
        return errors[-1] if errors else "its log ends so:"

    def processes(self) -> list[psutil.Process]:
        """Its running processes."""
        for process in list(self._seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update(process.children(recursive=True))
        return [process for process in self._seen if _is_running(process)]

    def cpu_s(self) -> float:
        """CPU seconds that its running processes have used."""
        total_s = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def engine(self) -> psutil.Process:
        """The engine process.

        Raises:
          ServerError: it does not run.
        """
        for process in self.processes():
            if process.pid != self._process.pid and "EngineCore" in _command(process):
                return process
        raise ServerError(f"no engine process runs:\n{self.log_tail()}")

    def shared_memory(self) -> set[Path]:
        """Files in /dev/shm that its processes have open or mapped."""
        return {path for process in self.processes() for path in _shared_memory(process.pid)}

    def send(self, sign: signal.Signals) -> None:
        """Sends a signal to the API process."""
        self.processes()
        self._process.send_signal(sign)

    def wait(self, limit_s: float = _END_LIMIT_S) -> int:
        """Waits until the API process exits; returns its exit status.

        Raises:
          ServerError: it does not exit in time.
        """
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired as e:
            raise ServerError(f"vllm serve still runs after {limit_s:.0f} s:\n{self.log_tail()}") from e

    def wait_for_processes(self, limit_s: float = _END_LIMIT_S) -> list[psutil.Process]:
        """Waits until all its processes exit; returns those that still run at the limit."""
        end_s = time.monotonic() + limit_s
        while (left := self.processes()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return left

    def kill(self) -> None:
        """Kills all its processes; idempotent."""
        _kill_all(self.processes())
        self._process.wait()
        if self._keeper.poll() is None:
            self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()


def _environment(folder: Folder) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    return kept | {
        "HOME": str(folder.path / "home"),
        "TMPDIR": str(folder.path / "tmp"),
        "VLLM_RPC_BASE_PATH": str(folder.path / "tmp"),
        "PYTHONPATH": os.pathsep.join(
            str(path) for path in (_HERE / "stubs", _HERE / "plugin", _HERE, _HERE.parents[1])
        ),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        # Every server compiles the same programs: cache them, however small.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "-1",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def _free_port() -> int:
    """One below those that Linux gives to connections, which could take it before the server listens."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _kill_all(processes: Sequence[psutil.Process]) -> None:
    """Kills processes; resource trackers first get time to remove the others' semaphores from /dev/shm."""
    trackers = [process for process in processes if "resource_tracker" in _command(process)]
    for process in processes:
        if process not in trackers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    for process in psutil.wait_procs(trackers, _TRACKER_LIMIT_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _kill_server_at_end() -> None:
    """Main of the keeper: waits until the parent process has ended, and kills the process group that it named."""
    group = int(sys.stdin.read() or 0)
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if group and os.getpgid(process.pid) == group:
                members.append(process)
    _kill_all(members)


def _is_running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _shared_memory(pid: int) -> Iterator[Path]:
    names: set[str] = set()
    with contextlib.suppress(OSError):
        names |= {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                names.add(os.readlink(link))
    for name in names:
        if name.startswith("/dev/shm/") and not name.endswith(" (deleted)"):
            yield Path(name)


if __name__ == "__main__":
    _kill_server_at_end()
