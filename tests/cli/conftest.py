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


def line_by_line(module):
    """The beginning of a command that runs a module with a line of progress after each request, not every 10 s."""
    code = (
        "import runpy\n"
        "from tpu_offload.cli import tables\n"
        "tables._LINE_INTERVAL_S = 0.0\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return sys.executable, "-c", code


_MAIN = "tpu_offload.cli.main"
LINE_BY_LINE = line_by_line(_MAIN)


def interrupted_run(*argv, path, during, module=_MAIN):
    """Interrupts a command while it serves the run `during`; returns the report that it wrote to `path`."""
    command = [*line_by_line(module), *argv, "--json", str(path)]
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
