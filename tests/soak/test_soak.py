"""The soak passes, each of its checks can fail, and its numbers add up."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from tests.cli.conftest import interrupted_run
from tests.soak import faults as faults_lib
from tests.soak import report as soak_report
from tests.soak import soak
from tests.soak.cli import main
from tests.soak.container_census import SizeHistory
from tests.soak.faults import Fault
from tests.soak.report import Round
from tpu_offload.engine import Engine

pytestmark = pytest.mark.usefixtures("clean_environment")

TINY = ("--num-layers", "1", "--d-model", "32", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16")
SMALL = (*TINY, "--d-ff", "32", "--requests", "12", "--turns", "2")


def report_of(tmp_path, *flags, status=0):
    path = tmp_path / "r.json"
    assert main([*flags, "--json", str(path)]) == status
    return json.loads(path.read_text())


@pytest.mark.wide
def test_all_engines(tmp_path, capsys, steps_as_time):
    # In 10 s there were 0 to 11 preemptions: it depends on the moments at which copies end.
    report = report_of(tmp_path, "30", *SMALL)
    out = capsys.readouterr().out
    assert "Soak passed" in out
    assert report["outputs_identical"] is True
    assert report["num_compared"] == report["num_requests"] > 12
    assert len(report["engines"]) == 3
    assert sum(report["faults"].values()) > 20
    assert report["faults"]["cache is reset"] >= 3, "at least one per engine, however short the soak"
    assert report["num_rounds"] == len(report["rounds"])
    assert report["num_jobs_left"] == 0
    assert report["rounds"][-1]["at_s"] >= 30
    assert not report["interrupted"]
    sums = {name: sum(e[name] for e in report["engines"].values()) for name in ("num_preemptions", "loaded_blocks")}
    assert min(sums.values()) > 0, f"no pressure: {sums}"
    assert report["log_lines"]


def test_settings_of_the_user_are_kept(tmp_path, monkeypatch, direct, steps_as_time):
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "70")
    monkeypatch.setenv("TPU_OFFLOAD_STAGING_BUFFER_TOKENS", "160")
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_GB", "0")
    report = report_of(tmp_path, "1", *SMALL, "--num-blocks", "40")
    (engine,) = report["engines"].values()
    assert (engine["num_host_chunks"], engine["staging_budget_blocks"], engine["swap_pool_blocks"]) == (70, 10, 0)


def test_wrong_bytes_are_noticed(tmp_path, monkeypatch, capsys, direct, steps_as_time):
    """Loaded blocks are overwritten."""
    load = faults_lib.FaultyCopier.load

    def damaging(self, segment_id, rows, kv_caches):
        flight, kv_caches = load(self, segment_id, rows, kv_caches)
        return flight, [cache.at[jnp.asarray(rows.block_ids)].set(1.0) for cache in kv_caches]

    monkeypatch.setattr(faults_lib.FaultyCopier, "load", damaging)
    monkeypatch.setattr(faults_lib, "RATES", {})
    # Two rounds at least: aborts make the first one long, and how many copies end in it depends on the machine.
    report = report_of(tmp_path, "12", *SMALL, status=1)
    assert report["engines"]["direct saves, direct loads"]["loaded_blocks"] > 0
    assert report["outputs_identical"] is False
    assert "SOAK FAILED: outputs differ in" in capsys.readouterr().out


def test_an_engine_that_crashes_is_noticed(tmp_path, monkeypatch, capsys, direct):
    step, num_steps = Engine.step, iter(range(10**6))

    def fails(self):
        if next(num_steps) == 900:
            raise RuntimeError("no more")
        return step(self)

    monkeypatch.setattr(Engine, "step", fails)
    report = report_of(tmp_path, "60", *SMALL, status=1)
    out = capsys.readouterr().out
    assert "an engine crashed or hangs" in out
    assert "RuntimeError: no more" in out
    assert report["wall_s"] < 50


def test_an_engine_that_hangs_is_noticed(tmp_path, monkeypatch, capsys, direct):
    monkeypatch.setattr(soak, "_STUCK_S", 0.5)
    step, num_steps = Engine.step, iter(range(10**9))
    monkeypatch.setattr(Engine, "step", lambda self: step(self) if next(num_steps) < 900 else [])
    report_of(tmp_path, "60", *SMALL, status=1)
    assert "no request ended for 0.5 s" in capsys.readouterr().out


def test_a_table_that_grows_is_noticed(tmp_path, monkeypatch, capsys, direct, steps_as_time):
    step = Engine.step

    def leaking(self):
        self._rejected_before = [*getattr(self, "_rejected_before", ()), len(self._samples)]
        return step(self)

    monkeypatch.setattr(Engine, "step", leaking)
    report_of(tmp_path, "4", *SMALL[:-4], "--workload", "chat", "--requests", "2", "--turns", "1", status=1)
    assert "_rejected_before grew from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("0", "'[SECONDS]': 0 is not in the range x>=1"),
        ("--seconds 0", "'--seconds': 0 is not"),
        ("5 --seconds 5", "'--seconds'"),
        ("", "SECONDS or --seconds is required"),
        ("5 --preempt", "No such option '--preempt'"),
        ("5 --rounds 2", "No such option '--rounds'"),
        ("--seconds 5 --num-blocks 3", "--num-blocks 3 is under the"),
        ("5 --trace no-such-file", "cannot read no-such-file: No such file"),
        ("5 --workload decode --turns 2", "--turns 2 has no effect here; it requires --workload chat"),
        ("5 --json no-such-folder/r.json", "cannot write no-such-folder/r.json: there is no directory"),
    ],
)
def test_wrong_flag(capsys, flags, expected):
    assert main(flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("soak: error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_help_names_every_default(capsys):
    assert main(["--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("Usage: soak ")
    assert "tokens in a block (16)" in out
    assert "requests in flight (6)" in out


# --- numbers ------------------------------------------------------------------------------------


def make_rounds(num, *, mib=lambda i: 400.0, **changes):
    done = Round(engine="e", num_requests=10, num_compared=10, differences=(), num_jobs_left=0, error="")
    return [
        dataclasses.replace(done, at_s=2.0 * i, rss_nbytes=int(mib(i) * 2**20), num_entries=5, **changes)
        for i in range(num)
    ]


def numbers(rounds):
    report = soak_report.numbers(rounds, SizeHistory())
    json.dumps(report, allow_nan=False)
    return report | {"interrupted": False}


def test_memory_that_grows_is_a_failure():
    report = numbers(make_rounds(40, mib=lambda i: 400 + 2.0 * i))
    memory = report["memory"]
    assert memory["growth_mib"] == pytest.approx(2.0 * 19)
    assert memory["growth_mib_per_1000_requests"] == pytest.approx(200)
    assert soak_report.failures(report) == ["memory grew by 38.0 MiB, more than 5"]


def test_memory_that_has_warmed_up_is_flat():
    memory = numbers(make_rounds(40, mib=lambda i: min(400 + 30 * i, 800) + 40 * (i == 30)))["memory"]
    assert memory["growth_mib"] == 0
    assert memory["flat"] is True
    assert (memory["start_mib"], memory["half_mib"], memory["end_mib"]) == (400, 800, 800)


@pytest.mark.parametrize("num", [0, 1, 2, 1500])
def test_any_number_of_rounds(num):
    report = numbers(make_rounds(num))
    assert soak_report.failures(report) == []
    assert report["outputs_identical"] is (True if num else None)


def test_jobs_without_an_end_are_a_failure():
    report = numbers([*make_rounds(3), *make_rounds(1, num_jobs_left=2)])
    assert soak_report.failures(report) == ["2 jobs or slots were not released when an engine was idle"]


@pytest.mark.wide
def test_interrupt_reports_what_is_there(tmp_path):
    flags = "300", *TINY, "--requests", "400"
    report = interrupted_run(*flags, path=tmp_path / "r.json", during="baseline", module="tests.soak")
    assert report["num_baseline_requests"] > 0
    assert report["faults"] == dict.fromkeys((fault.value for fault in Fault), 0)
