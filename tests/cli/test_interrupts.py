"""Signals at chosen moments: the command ends with one line, keeps its results, and leaves no process."""

import configparser
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.cli.conftest import LINE_BY_LINE, TINY_BENCH
from tests.cli.test_simulate import chats, is_gone, write_trace
from tpu_offload.cli.main import main
from tpu_offload.measure import TransferBench
from tpu_offload.sim import experiment

ROOT = Path(__file__).parents[2]


def entry_point():
    """Python code of the installed `tpu-offload`."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    scripts = config["options.entry_points"]["console_scripts"].split()
    module, function = scripts[scripts.index("tpu-offload") + 2].split(":")
    return f"from {module} import {function}; {function}()"


def expect_interrupted(modules, argv, signum, *, prog="tpu-offload"):
    """A process imports a module from this directory, which prints that it is importing; a signal comes then."""
    with subprocess.Popen(
        [sys.executable, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{modules}{os.pathsep}{ROOT}"},
    ) as process:
        try:
            assert process.stdout.readline() == "importing\n"
            process.send_signal(signum)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, f"{prog}: interrupted\n")


@pytest.mark.parametrize(
    ("prog", "argv"),
    [("tpu-offload", ("-c", entry_point(), "replay")), ("soak", ("-P", "-m", "tests.soak"))],
    ids=["tpu-offload", "soak"],
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_while_modules_are_imported(tmp_path, signum, prog, argv):
    (tmp_path / "jax.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    expect_interrupted(tmp_path, argv, signum, prog=prog)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_while_the_main_thread_blocks_in_an_import(tmp_path, signum):
    """Another thread receives the signal, as if it had come just before the system call: that is not interrupted."""
    (tmp_path / "jax.py").write_text(
        "import signal, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})\n"
        "print('importing', flush=True)\n"
        "time.sleep(600)\n"
    )
    expect_interrupted(tmp_path, ("-c", entry_point(), "replay"), signum)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_while_a_command_imports_packages(tmp_path, signum):
    """numpy is imported when the command runs, and its extension prints the traceback of what interrupts that."""
    (tmp_path / "numpy.py").write_text(
        "import time\n"
        "try:\n"
        "    print('importing', flush=True)\n"
        "    time.sleep(600)\n"
        "except BaseException as e:\n"
        "    import traceback\n"
        "    traceback.print_exc()\n"
        "    raise ImportError('numpy failed to import') from e\n"
    )
    expect_interrupted(tmp_path, ("-c", entry_point(), "doctor"), signum)


INTERRUPTED_WHERE = """
import gc, signal, time, weakref
import click
from tpu_offload.cli.command import run_command, run_process

def interrupt(*args):
    signal.raise_signal(signal.{signum})

class Interrupts:
    __del__ = interrupt

class Plain:
    pass

class Fails:
    def __del__(self):
        raise ValueError("shown")

def in_a_destructor():
    Interrupts()

def in_a_destructor_that_the_collector_calls():
    one = Interrupts()
    one.itself = one
    del one
    gc.collect()

def in_a_callback_of_the_collector():
    gc.callbacks.append(lambda phase, info: (gc.callbacks.clear(), interrupt()))
    gc.collect()

def in_a_callback_of_a_reference():
    one = Plain()
    reference = weakref.ref(one, interrupt)
    del one

class InterruptsTwice:
    def __del__(self):
        Interrupts()
        time.sleep(0.1)

def in_a_destructor_and_in_the_one_that_called_it():
    InterruptsTwice()

def where_it_is_caught():
    for _ in range(5):
        try:
            interrupt()
        except BaseException:
            pass

def beside_a_destructor_that_fails():
    Fails()
    interrupt()

def in_an_extension_that_makes_another_error_of_it():
    try:
        interrupt()
    except BaseException:
        raise ImportError("numpy failed to import") from None

@click.command()
def command():
    {where}()
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        time.sleep(1)
    print("the command went on")

run_process(lambda: run_command(command, [], prog="test"))
"""


def interrupted_where(where, signum="SIGINT"):
    code = INTERRUPTED_WHERE.format(where=where, signum=signum)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("signum", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "where",
    [
        "in_a_destructor",
        "in_a_destructor_that_the_collector_calls",
        "in_a_callback_of_the_collector",
        "in_a_callback_of_a_reference",
        "in_a_destructor_and_in_the_one_that_called_it",
    ],
)
def test_where_python_discards_exceptions(where, signum):
    """The command ends although the first KeyboardInterrupt cannot reach it."""
    assert interrupted_where(where, signum) == (130, "", "test: interrupted\n")


def test_another_error_that_an_interrupt_caused():
    assert interrupted_where("in_an_extension_that_makes_another_error_of_it") == (130, "", "test: interrupted\n")


def test_the_fifth_interrupt_ends_a_command_that_catches_them():
    assert interrupted_where("where_it_is_caught") == (130, "", "")


def test_other_discarded_exceptions_are_shown():
    status, out, err = interrupted_where("beside_a_destructor_that_fails")
    assert (status, out) == (130, "")
    assert "ValueError: shown" in err
    assert err.endswith("test: interrupted\n")


@pytest.mark.parametrize(
    ("signum", "status", "text"),
    [(signal.SIGTERM, 130, "tpu-offload: interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")],
    ids=["SIGTERM", "SIGKILL"],
)
def test_processes_of_a_simulation_end_with_it(tmp_path, signum, status, text):
    path = write_trace(tmp_path / "long.jsonl", chats(random.Random(4), num_requests=2_000, num_chats=200))
    sizes = ",".join(str(i / 1000) for i in range(1, 400))
    flags = ["--trace", str(path), "--sizes", sizes, "--jobs", "2", "--json", str(tmp_path / "r.json")]
    with subprocess.Popen(
        [*LINE_BY_LINE, "simulate", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr.readline().startswith("simulate: 1 of")
            process.send_signal(signum)  # to this process only, as by `kill`
            process.wait(timeout=120)
            assert is_gone(process.pid)
            out, err = process.communicate(timeout=120)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (status, "")
    assert err.endswith(text)
    assert "Traceback" not in err
    assert not (tmp_path / "r.json").exists()


def test_no_interrupt_while_processes_are_started():
    """A library's thread receives the signal; Python handles it in the main thread even if that blocks signals."""
    finish = threading.Event()
    other = threading.Thread(target=finish.wait)
    other.start()
    seen = []

    def start_processes():
        with experiment.deferred_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(200):  # Python checks for signals between instructions
                time.sleep(0.001)
            seen.append("started")

    try:
        with pytest.raises(KeyboardInterrupt):
            start_processes()
    finally:
        finish.set()
        other.join()
    assert seen == ["started"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.fixture
def bench(tmp_path, monkeypatch, small_buffers):
    """Runs `bench` and interrupts it in a round; returns the exit status."""

    def bench(*signals_in_rounds, output=tmp_path / "p.json"):
        left = list(signals_in_rounds)
        real = TransferBench._run_round

        def run_round(self, num_blocks):
            times = real(self, num_blocks)
            if left and left.pop(0):
                signal.raise_signal(signal.SIGINT)
            return times

        with monkeypatch.context() as patch:
            patch.setattr(TransferBench, "_run_round", run_round)
            flags = [*TINY_BENCH, "--rounds", "50", "--paths", "direct", "--step-ms", "0", "--seconds", "600"]
            return main(["bench", *flags, "--output", str(output)])

    return bench


def test_bench_keeps_what_it_has_measured(tmp_path, bench, capsys):
    assert bench(0, 0, 0, 0, 1) == 130
    profile = json.loads((tmp_path / "p.json").read_text())
    assert profile["bench"]["interrupted"] is True
    assert {(one["num_blocks"], one["num_rounds"]) for one in profile["bench"]["figures"]} == {(1, 3)}
    out, err = capsys.readouterr()
    assert "Recommended here" in out
    assert err.endswith("interrupted: the results cover what was measured until then\n")


def test_bench_that_has_measured_nothing_writes_nothing(tmp_path, bench, capsys):
    assert bench(0, 1) == 130
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err.endswith("tpu-offload: interrupted\n")


def test_bench_does_not_replace_a_complete_profile_by_a_partial_one(tmp_path, bench):
    path = tmp_path / "p.json"
    path.write_text("whole")
    assert bench(0, 0, 0, 1) == 130
    assert path.read_text() == "whole"
    assert json.loads((tmp_path / "p.json.interrupted").read_text())["bench"]["interrupted"] is True
