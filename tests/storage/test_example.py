"""The tier of one's own that docs/tiers.md shows: as any other tier, in an engine, and for `tpu-offload tier`."""

import dataclasses
import importlib
import json
import sys

import pytest

from tests.engine.helpers import TINY, rounds, serve_rounds, tokens_of
from tests.storage import stores
from tests.storage.conformance import CHECKS, NUM_CHUNKS, SPEC, key_of
from tests.storage.example import NAME, write_module
from tests.storage.memory_tier import NAME as WITHOUT_INSPECTOR
from tests.storage.test_engine import TIGHT, make_offload, serve_slowly
from tpu_offload.cli.main import main
from tpu_offload.engine import Engine
from tpu_offload.errors import ConfigError
from tpu_offload.storage import Verdict, make_tier, open_inspector


@pytest.fixture(autouse=True)
def kv(tmp_path, monkeypatch):
    """A directory for the tier, whose module has the name that the document gives it."""
    (tmp_path / "modules").mkdir()
    write_module(tmp_path / "modules")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    (tmp_path / "kv").mkdir()
    yield tmp_path / "kv"
    sys.modules.pop("sqlite_tier", None)


def make(kv, **changes):
    return make_tier(NAME, dataclasses.replace(SPEC, options=str(kv), **changes))


@pytest.fixture
def stored(kv):
    """With five chunks of worker 0, and three of worker 1."""
    for worker_id, num in enumerate((5, 3)):
        tier = make(kv, worker_id=worker_id)
        for i in range(num):
            stores.put(tier, key_of(i), i)
        tier.close()
    return kv


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(kv, check):
    check(lambda spec: make_tier(NAME, dataclasses.replace(spec, options=str(kv))))


def test_a_smaller_tier_keeps_what_was_written_last(kv):
    tier = make(kv)
    for i in range(NUM_CHUNKS):
        stores.put(tier, key_of(i), i)
    stores.put(tier, key_of(0), 0)  # again
    tier.close()
    tier = make(kv, num_chunks=3)
    assert tier.stored_keys() == [key_of(NUM_CHUNKS - 2), key_of(NUM_CHUNKS - 1), key_of(0)]
    tier.close()


def test_a_second_engine_is_one_clear_line(kv):
    tier = make(kv)
    with pytest.raises(ConfigError, match=r"sqlite_tier:SQLiteTier: it cannot be made \(OperationalError: .*locked"):
        make(kv)
    tier.close()


def test_it_outlives_the_engine(kv):
    offload = make_offload(storage_tier=NAME, storage_options=str(kv))
    expected = tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))
    for restored in (False, True):
        engine = Engine(TINY, TIGHT, offload=offload)
        assert (engine.offload_stats().restored_chunks > 0) == restored
        assert tokens_of(serve_slowly(engine, rounds())) == expected
        stats = engine.offload_stats()
        assert stats.promoted_chunks > 0
        assert stats.failed_storage_chunks == 0
        engine.close()
    assert stores.verdicts(open_inspector(str(kv), NAME)) == {Verdict.GOOD: stats.num_stored_chunks}


def test_tpu_offload_tier(stored, tmp_path, capsys):
    def run(*argv, status=0):
        path = tmp_path / "report.json"
        assert main(["tier", *map(str, argv), "--tier", NAME, "--json", str(path)]) == status
        capsys.readouterr()
        return json.loads(path.read_text())

    assert sorted(holding["num_chunks"] for holding in run("ls", stored)["generations"]) == [3, 5]
    report = run("stats", stored)
    assert [file["file"] for file in report["files"]] == [f"{stored}/worker-{i}.sqlite" for i in (0, 1)]
    assert run("verify", stored)["num_damaged"] == 0
    assert run("clear", stored, "--yes")["num_deleted_chunks"] == 8
    for worker_id in (0, 1):
        tier = make(stored, worker_id=worker_id)
        assert tier.stored_keys() == []
        tier.close()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ls", "{kv}/none", "--tier", NAME], "none has no worker-N.sqlite; expected"),
        (["ls", "{kv}", "--tier", "sqlite_tier:SQLite"], "--tier sqlite_tier:SQLite: SQLite in sqlite_tier is None"),
        (["ls", "{kv}", "--tier", "no_tier:Tier"], "--tier no_tier:Tier: no_tier cannot be imported"),
        (["ls", "{kv}", "--tier", "files"], "--tier files: there is no storage tier of this name; expected one of fil"),
        (["ls", "{kv}", "--tier", WITHOUT_INSPECTOR], "MemoryTier cannot be inspected; expected a class that impleme"),
        (["ls", "gs://bucket", "--tier", "file"], "bucket cannot be read: No such file"),
        (["clear", "{kv}", "--tier", NAME, "--yes"], "worker-0.sqlite: database is locked"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(stored, capsys, argv, message):
    tier = make(stored, worker_id=0)  # an engine
    assert main(["tier", *(word.format(kv=stored) for word in argv)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tpu-offload: error: ")
    assert err.count("\n") == 1
    assert message in err
    tier.close()


@pytest.mark.parametrize(
    ("before", "after"),
    [('return "files", [', "return 1 / 0, ["), ("self.where = options", "self.where = 1 / 0")],
    ids=["in use", "while it is opened"],
)
def test_a_bug_in_it_is_one_line(stored, monkeypatch, capsys, before, after):
    code = (stored.parent / "modules" / "sqlite_tier.py").read_text()
    assert before in code
    (stored.parent / "modules" / "broken_tier.py").write_text(code.replace(before, after))
    monkeypatch.delitem(sys.modules, "broken_tier", raising=False)
    importlib.invalidate_caches()
    assert main(["tier", "stats", str(stored), "--tier", "broken_tier:SQLiteTier"]) == 2
    assert capsys.readouterr().err == (
        "tpu-offload: error: --tier broken_tier:SQLiteTier: ZeroDivisionError: division by zero\n"
    )
