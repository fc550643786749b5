"""Shared by the tests of the commands."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY_BENCH = (
    *("--num-layers", "2", "--page-shape", "4", "8", "2", "8", "--devices", "1"),
    *("--num-blocks", "1", "3", "--rounds", "2"),
)

LINE_BY_LINE = (
    sys.executable,
    "-c",
    "import runpy\n"
    "from tpu_offload.cli import tables\n"
    "tables._LINE_INTERVAL_S = 0.0\n"
    "runpy.run_module('tpu_offload.cli.main', run_name='__main__', alter_sys=True)",
)
"""Runs the command with a line of progress after each request, instead of every ten seconds."""


def interrupted_run(*argv, path, during):
    """Interrupts a command while it serves the run `during`; returns the report that it wrote to `path`."""
    command = [*LINE_BY_LINE, *argv, "--json", str(path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "COLUMNS": "100", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any(line.startswith(f"{during}: ") for line in lines), "no progress line before the end"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out
    assert "identical" not in out
    report = json.loads(path.read_text())
    assert report["interrupted"] is True
    assert report["outputs_identical"] is None
    return report
