"""Prometheus and promtool for tests: where they are, and a server on the loopback device."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import pytest
import yaml

from tpu_offload.monitoring.files import RULES
from tpu_offload.monitoring.panels import Query

ROOT = Path(__file__).parents[2]
SCRAPE = ROOT / "deploy" / "prometheus" / "scrape.yml"
_UNPACKED = ROOT / ".venv" / "prometheus" / "usr" / "bin"  # scripts/_debian.sh
_START_S = 60.0

Samples = list[tuple[dict[str, str], float]]
"""An instant vector: labels and value of each sample."""


def missing(what: str) -> None:
    """Skips the test, or in CI fails it, because something is not installed."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{what}; in CI this must not be skipped")
    pytest.skip(what)


def binary(name: str) -> str:
    """The path of `prometheus` or `promtool`."""
    found = shutil.which(name) or shutil.which(name, path=_UNPACKED)
    if found is None:
        missing(f"needs {name}: `scripts/test tests/monitoring` fetches it with apt, or install the package prometheus")
    return str(found)


def promtool(*arguments: str) -> str:
    """What it prints; an AssertionError with that if it fails."""
    done = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def configure(folder: Path, instances: Mapping[str, str]) -> Path:
    """The example's configuration with the project's rules, for other addresses, and fast.

    Args:
      folder: for the file.
      instances: address by job; the other jobs are left out.
    """
    config = yaml.safe_load(SCRAPE.read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / RULES)]
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] in instances]
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [instances[job["job_name"]]]}]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def as_grafana_asks(query: Query, instance: str, *, window: str) -> str:
    """The PromQL of a panel with its variables filled in."""
    text = query.expression.text.replace("$__rate_interval", window)
    return text.replace("$model", ".*").replace("$instance", instance)


def is_finite(samples: Samples) -> bool:
    """Whether there is a number to draw, neither nothing nor NaN."""
    return any(math.isfinite(value) for _, value in samples)


@final
class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer of its API; raises AssertionError with its error."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{arguments}: {e.read().decode()}") from e
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> Samples:
        """The instant vector of an expression: labels and value of each sample."""
        found = self.get("query", query=expression)
        assert found["resultType"] == "vector", found
        return [(sample["metric"], float(sample["value"][1])) for sample in found["result"]]

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def running(config: Path, folder: Path, port: int) -> Iterator[Prometheus]:
    """A server with a configuration and an empty database, until the end of the block.

    Args:
      config: its configuration file.
      folder: for its database and log.
      port: a free port.
    """
    command = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = folder / "prometheus.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=folder)
    try:
        server = Prometheus(port)
        end_s = time.monotonic() + _START_S
        while not server.is_ready():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end_s, log.read_text()
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.wait()
