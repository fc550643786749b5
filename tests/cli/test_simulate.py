"""The command end to end: flags in, tables, a file and a plot out."""

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import LINE_BY_LINE
from tests.core.policies import example
from tests.sim.traces import chats, write_trace
from tpu_offload.cli.main import main
from tpu_offload.core.policies import DEFAULT_POLICY, POLICIES
from tpu_offload.sim import BOUND, TierSetup, belady_hits, read_traces, replay

MODEL = ("--num-layers", "4", "--num-kv-heads", "2", "--head-size", "128")


@pytest.fixture
def trace_path(tmp_path):
    return write_trace(tmp_path / "chats.jsonl", chats(random.Random(4), num_requests=200))


def simulate(path, *flags):
    return main(["simulate", "--trace", str(path), "--jobs", "1", *flags])


def report_of(tmp_path, path, *flags):
    assert simulate(path, "--json", str(tmp_path / "r.json"), *flags) == 0
    return json.loads((tmp_path / "r.json").read_text())


@pytest.fixture
def error_of(capsys):
    """Runs a command that must end with one line and status 2; returns the line."""

    def run(path, *flags):
        capsys.readouterr()
        assert simulate(path, *flags) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("tpu-offload: error: ")
        assert err.count("\n") == 1
        return err

    return run


def test_json_has_all_policies_and_sizes(tmp_path, trace_path, capsys):
    report = report_of(tmp_path, trace_path)
    trace = read_traces([trace_path])
    rows = {(row["policy"], row["size_share"]): row for row in report["results"]}
    shares = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1]
    assert list(rows) == [(policy, share) for policy in (*POLICIES, BOUND) for share in shares]
    assert {row["policy"] for row in report["results"] if row["default"]} == {DEFAULT_POLICY}
    for (policy, share), row in rows.items():
        num_chunks = max(1, round(share * trace.num_unique_blocks))
        assert row["num_chunks"] == num_chunks
        if policy == BOUND:
            hits = tuple(belady_hits(trace, num_chunks))
        else:
            hits = replay(trace, POLICIES[policy](), TierSetup(num_chunks)).host_hits
        assert row["prefix_hit_rate"] == sum(hits) / trace.num_blocks
        assert row["prefix_hit_rate"] <= rows[BOUND, share]["prefix_hit_rate"]
        assert row["saved_nbytes"] is None
    assert report["num_hbm_blocks"] == 0
    assert report["num_unique_blocks"] == trace.num_unique_blocks
    out = capsys.readouterr().out
    assert f"│ {DEFAULT_POLICY} * " in out
    assert f"200 requests, {trace.num_blocks} prompt blocks, {trace.num_unique_blocks} unique" in out


def test_policies_and_sizes_with_commas_or_spaces(tmp_path, trace_path):
    one = report_of(tmp_path, trace_path, "--policies", "lru,belady", "--sizes", "0.1", "0.3,1")
    other = report_of(tmp_path, trace_path, "--policies", "lru", "belady", "lru", "--sizes", "0.1,0.3", "1")
    assert [(row["policy"], row["size_share"]) for row in one["results"]] == [
        (policy, share) for policy in ("lru", "belady") for share in (0.1, 0.3, 1)
    ]
    assert [row | {"run_s": 0} for row in one["results"]] == [row | {"run_s": 0} for row in other["results"]]


def test_parts_and_split(tmp_path, trace_path):
    flags = ("--policies", "lru", "--sizes", "0.3")
    trace = read_traces([trace_path])  # requests 0 to 199, a second apart
    hits = replay(trace, POLICIES["lru"](), TierSetup(round(0.3 * trace.num_unique_blocks))).host_hits

    def rate(first, end):
        return sum(hits[first:end]) / sum(len(request.blocks) for request in trace.requests[first:end])

    (row,) = report_of(tmp_path, trace_path, *flags)["results"]
    assert row["first_part_hit_rate"] == rate(0, 100)
    assert row["second_part_hit_rate"] == rate(100, 200)
    assert row["prefix_hit_rate"] == rate(0, 200)
    for split in ("0.8040201", "160"):  # of 199 seconds
        (row,) = report_of(tmp_path, trace_path, *flags, "--split", split)["results"]
        assert row["first_part_hit_rate"] == rate(0, 160)
        assert row["prefix_hit_rate"] == row["second_part_hit_rate"] == rate(160, 200)


def test_many_jobs_start_no_process_for_little_work(tmp_path, trace_path, monkeypatch):
    monkeypatch.setattr("tpu_offload.sim.experiment.ProcessPoolExecutor", None)
    one = report_of(tmp_path, trace_path)
    assert results_of(report_of(tmp_path, trace_path, "--jobs", "100")) == results_of(one)


def test_time_range(tmp_path, trace_path):
    report = report_of(tmp_path, trace_path, "--policies", "lru", "--sizes", "1", "--start", "50", "--end", "80")
    assert report["num_requests"] == 30
    assert (report["first_request_s"], report["last_request_s"], report["second_part_s"]) == (50, 79, 65)
    assert report["num_unique_blocks"] < read_traces([trace_path]).num_unique_blocks


def test_several_traces(tmp_path, trace_path):
    report = report_of(tmp_path, trace_path, "--trace", str(trace_path), str(trace_path), "--policies", "belady")
    assert report["traces"] == [str(trace_path)] * 3
    assert report["num_unique_blocks"] == 3 * read_traces([trace_path]).num_unique_blocks


def test_sizes_in_gb(tmp_path, trace_path, capsys):
    """A chunk is 512 tokens x 4 layers x 2 heads x 128 x keys and values x 2 bytes: 2 MiB."""
    flags: tuple[str, ...] = ("--policies", "lru", "--hbm", "0.05GB", *MODEL)
    report = report_of(tmp_path, trace_path, *flags, "--sizes-gb", "0.1,0.5")
    assert report["chunk_nbytes"] == 2 * 2**20
    assert report["num_hbm_blocks"] == 25
    assert [row["num_chunks"] for row in report["results"]] == [51, 256]
    for row in report["results"]:
        assert row["saved_nbytes"] == row["num_saved_chunks"] * report["chunk_nbytes"]
        assert row["loaded_nbytes"] == row["num_loaded_chunks"] * report["chunk_nbytes"]
    out = capsys.readouterr().out
    assert "Saved GB" in out
    assert "0.5 GB" in out
    assert "HBM in front: 25 blocks" in out
    flags += ("--dtype", "float8_e4m3fn", "--trace-block-tokens", "1024")
    assert report_of(tmp_path, trace_path, *flags, "--sizes-gb", "1")["chunk_nbytes"] == 2 * 2**20


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float8_e4m3fn", 2**20), ("int4", 2**19), ("float4_e2m1fn", 2**19), ("float32", 2**22)]
)
def test_bits_of_the_type(tmp_path, trace_path, dtype, nbytes):
    flags = ("--policies", "lru", "--sizes", "1", *MODEL, "--dtype", dtype)
    assert report_of(tmp_path, trace_path, *flags)["chunk_nbytes"] == nbytes


@pytest.mark.parametrize("save_on", ["compute", "eviction"])
def test_huge_tiers_are_as_good_as_those_that_hold_all(tmp_path, trace_path, save_on):
    """They also take no more memory, although 10**12 chunks would not fit."""
    flags: tuple[str, ...] = ("--save-on", save_on)
    num_unique = read_traces([trace_path]).num_unique_blocks
    sizes = []
    for flag in ("--hbm", "--storage"):
        for size in (num_unique, 10**12):
            hbm = ("--hbm", "9") if flag == "--storage" else ()
            sizes.append(report_of(tmp_path, trace_path, *flags, *hbm, flag, str(size), "--sizes", "0.05"))
        assert results_of(sizes[-1]) == results_of(sizes[-2])
    assert [report["num_hbm_blocks"] for report in sizes] == [num_unique, 10**12, 9, 9]
    flags += ("--save-after-sightings", "2", "--hbm", "9")
    all_ = report_of(tmp_path, trace_path, *flags, "--sizes", "1")
    huge = report_of(tmp_path, trace_path, *flags, "--sizes-gb", "1e9", *MODEL)
    assert {row["num_chunks"] for row in huge["results"]} == {10**9 * 2**30 // 2**21}
    for name in ("prefix_hit_rate", "num_saved_chunks", "num_evicted_chunks", "num_dropped_chunks"):
        assert [row[name] for row in huge["results"]] == [row[name] for row in all_["results"]]


def results_of(report):
    """Without the sizes of storage, and how long it took."""
    tiers = [[tier | {"num_chunks": 0} for tier in row["storage"]] for row in report["results"]]
    return [row | {"run_s": 0, "storage": storage} for row, storage in zip(report["results"], tiers, strict=True)]


def test_sizes_and_admission_of_storage(tmp_path, trace_path, capsys):
    flags = ("--policies", "lru", "belady", "--sizes", "0.1", "--storage", "20", "0.5")
    written = {}
    for admission in ("all", "second_sighting", "after_hit"):
        report = report_of(tmp_path, trace_path, *flags, "--storage-admission", admission)
        assert report["storage_admission"] == [admission]
        rows = report["results"]
        assert [row["policy"] for row in rows] == ["lru", "lru", "belady"], "the bound has no storage"
        sizes = [[tier["num_chunks"] for tier in row["storage"]] for row in rows]
        assert sizes == [[20], [round(report["num_unique_blocks"] / 2)], []]
        assert rows[0]["storage_hit_rate"] < rows[1]["storage_hit_rate"]
        written[admission] = rows[1]["storage"][0]["num_written_chunks"]
    assert 0 < written["after_hit"] < written["all"] > written["second_sighting"] > 0
    out = capsys.readouterr().out
    assert "Prefix hit rate of all tiers" in out
    assert "lru + 20" in out


def test_a_name_that_is_no_text(tmp_path, trace_path):
    path = trace_path.rename(tmp_path / os.fsdecode(b"\xff.jsonl"))
    page = tmp_path / "page.html"
    assert report_of(tmp_path, path, "--policies", "lru", "--sizes", "0.5", "--html", str(page))
    assert b"\\udcff.jsonl" in page.read_bytes()


def test_a_stack(tmp_path, trace_path, capsys):
    flags: tuple[str, ...] = ("--policies", "lru", "belady", "--sizes", "0.1", *MODEL)
    flags += ("--storage", "30;0.9", "50;90 ;1GB", "--storage-admission", "all")
    report = report_of(tmp_path, trace_path, *flags)
    two, three, bound = report["results"]
    assert [tier["num_chunks"] for tier in two["storage"]] == [30, round(0.9 * report["num_unique_blocks"])]
    assert [tier["num_chunks"] for tier in three["storage"]] == [50, 90, 2**30 // report["chunk_nbytes"]]
    assert bound["storage"] == []
    for row in (two, three):
        assert row["storage"][-1]["hit_rate"] > 0, (
            "those written on save that are no larger than the host tier have none"
        )
        assert row["storage_hit_rate"] == pytest.approx(sum(tier["hit_rate"] for tier in row["storage"]))
        num_read = sum(tier["num_read_chunks"] for tier in row["storage"])
        assert row["num_loaded_chunks"] > num_read > 0
        assert row["loaded_nbytes"] == row["num_loaded_chunks"] * report["chunk_nbytes"]
    out = capsys.readouterr().out
    for title in ("Prefix hit rate of storage tier 2", "Written to storage tier 0, GB", "Read from storage tier 1, GB"):
        assert title in out
    flags = ("--policies", "lru", "--sizes", "0.1", "--storage", "30;0.9")
    one = report_of(tmp_path, trace_path, *flags, "--storage-write-on", "eviction;save")["results"][0]
    assert [tier["write_on"] for tier in one["storage"]] == ["eviction", "save"]
    assert [tier["admission"] for tier in one["storage"]] == ["all", "all"]
    assert one["storage"][0]["num_written_chunks"] < two["storage"][0]["num_written_chunks"]


def test_hbm_and_storage(tmp_path, trace_path, capsys):
    flags = ("--policies", "lru", "--sizes", "0.1", "--hbm", "0.05", "--save-on", "eviction")
    report = report_of(tmp_path, trace_path, *flags, "--storage", "200", "--storage-write-on", "eviction")
    (row,) = report["results"]
    assert row["hbm_hit_rate"] > 0
    assert row["prefix_hit_rate"] > 0
    assert row["storage_hit_rate"] > 0
    assert row["storage"][0]["num_written_chunks"] > 0
    out = capsys.readouterr().out
    assert "saved on eviction" in out
    assert "Prefix hit rate of storage" in out


def test_a_policy_of_ones_own(tmp_path, trace_path, error_of, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "simulated_policy.py").write_text(example.source())
    flags = ("--policies", "simulated_policy:FIFOPolicy,s3fifo", "--sizes", "0.3")
    report = report_of(tmp_path, trace_path, *flags)
    trace = read_traces([trace_path])
    setup = TierSetup(round(0.3 * trace.num_unique_blocks))
    hits = [sum(replay(trace, make(), setup).host_hits) for make in (example.load(), POLICIES["s3fifo"])]
    assert [row["policy"] for row in report["results"]] == ["simulated_policy:FIFOPolicy", "s3fifo"]
    assert [row["prefix_hit_rate"] for row in report["results"]] == [num / trace.num_blocks for num in hits]
    assert hits[0] != hits[1]
    others = report_of(tmp_path, trace_path, *flags, "--jobs", "2")["results"]
    assert [row | {"run_s": 0} for row in others] == [row | {"run_s": 0} for row in report["results"]]
    wrong = error_of(trace_path, "--policies", "simulated_policy:LIFOPolicy")
    assert "'--policies': simulated_policy:LIFOPolicy: simulated_policy has no LIFOPolicy; did you mean FIFO" in wrong
    assert "EVICTION_POLICY" not in wrong


def test_a_policy_of_ones_own_that_fails(tmp_path, trace_path, error_of, monkeypatch):
    """One line says where. What fails in a policy of the library is a fault of the library, with a traceback."""
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "failing_policy.py"
    fails = "\n\ndef fail(*args):\n    raise ValueError('no room')\n\n\nFIFOPolicy.insert = fail\n"
    module.write_text(example.source() + fails)
    line = module.read_text().splitlines().index("    raise ValueError('no room')") + 1
    flags = ("--policies", "failing_policy:FIFOPolicy", "--sizes", "0.3", "0.4")
    error = error_of(trace_path, *flags)
    assert f"policy failing_policy:FIFOPolicy failed: ValueError: no room ({module}, line {line}); expected" in error
    monkeypatch.setitem(POLICIES, "failing_policy:FIFOPolicy", sys.modules["failing_policy"].FIFOPolicy)
    with pytest.raises(ValueError, match="no room"):
        simulate(trace_path, *flags)


def test_wrong_flags(tmp_path, trace_path, error_of):
    assert f"'clock'; expected one of {', '.join(POLICIES)}, belady" in error_of(trace_path, "--policies", "clock")
    assert "'0'; expected a share of the unique blocks, above 0 and at most 1" in error_of(trace_path, "--sizes", "0")
    assert "'2'; expected a share" in error_of(trace_path, "--sizes", "2")
    assert "'40TB'; expected a share of the unique blocks (0.05), a num" in error_of(trace_path, "--hbm", "40TB")
    assert "needs a model: set --num-layers, --num-kv-heads, --head-size" in error_of(trace_path, "--hbm", "40GB")
    assert "a model needs --head-size as well" in error_of(trace_path, *MODEL[:4])
    assert "is smaller than a chunk of" in error_of(trace_path, "--sizes-gb", "0.001", *MODEL)
    for dtype in ("bf17", "str", "bool", "complex64", "object", "(2,)f4", "f4,(2", "timedelta64"):
        error = error_of(tmp_path / "none.jsonl", "--dtype", dtype)  # before reading the trace
        assert f"--dtype {dtype!r}; expected the name of a type of real numbers" in error
    for size in ("99999999999999999999", "9" * 400, "9" * 5000):
        for flag in ("--hbm", "--storage"):
            assert f"{size!r}; expected at most 1000000000000 chunks" in error_of(trace_path, flag, size)
    assert "'1e30'; expected at most 1000000000 GB" in error_of(trace_path, "--sizes-gb", "1e30", *MODEL)
    assert "'1e308'; expected at most 1000000000 GB" in error_of(trace_path, "--sizes-gb", "1e308", *MODEL)
    assert "set its size with --hbm" in error_of(trace_path, "--save-on", "eviction")
    assert "no effect without --storage" in error_of(trace_path, "--storage-write-on", "eviction")
    assert "no effect without --storage" in error_of(trace_path, "--storage-admission", "after_hit;all")
    several = ("--storage", "5;0.5;9", "--storage-write-on", "save;eviction")
    assert "has 2 values, and --storage 5 chunks;0.5;9 chunks 3; expected 1 or 3" in error_of(trace_path, *several)
    assert "'save;'; expected one of save, eviction" in error_of(trace_path, "--storage-write-on", "save;")
    assert "''; expected a share of the unique blocks (0.05), a num" in error_of(trace_path, "--storage", "5;")
    assert "not allowed with '--sizes-gb'" in error_of(trace_path, "--sizes", "1", "--sizes-gb", "1")
    assert "no request from 900 s" in error_of(trace_path, "--start", "900")
    assert "the last request is at 199 s" in error_of(trace_path, "--split", "200")
    assert "there is no directory" in error_of(trace_path, "--json", str(tmp_path / "none" / "a.json"))
    assert "it is a directory" in error_of(trace_path, "--html", str(tmp_path))
    assert "cannot read" in error_of(tmp_path / "none.jsonl")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert f"cannot write {loop}: {os.strerror(errno.ELOOP)}" in error_of(trace_path, "--json", str(loop))
    assert "cannot read" in error_of(loop)


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_no_trace_is_written_over(tmp_path, trace_path, error_of, flag):
    trace_path = trace_path.rename(tmp_path / "chats.html")
    before = trace_path.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(trace_path)
    for path, other in ((trace_path, trace_path), (trace_path, link), (link, tmp_path / "." / "chats.html")):
        error = error_of(tmp_path / "none.jsonl", "--trace", str(path), flag, str(other))  # no file is read
        assert f"{flag} {other} is the same file as the trace {path}; expected another file" in error
    assert trace_path.read_bytes() == before
    assert link.is_symlink()


def test_the_two_outputs_are_two_files(tmp_path, trace_path, error_of):
    path, link = tmp_path / "r.html", tmp_path / "link.html"
    link.symlink_to(path)
    error = error_of(trace_path, "--json", str(path), "--html", str(link))
    assert f"--html {link} is the same file as --json {path}; expected another file" in error
    assert not path.exists()


def test_bad_traces(tmp_path, error_of):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2}\n')
    assert f'{path} line 2: "hash_ids" is missing; expected a list' in error_of(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert f"{path} is compressed (gzip)" in error_of(path)
    assert "no request has a block" in error_of(write_trace(tmp_path / "empty.jsonl", [[], []]))


def test_notes_are_printed(tmp_path, capsys, caplog):
    path = write_trace(tmp_path / "plain.jsonl", [[1, 2], [2, 1]])
    assert simulate(path, "--policies", "lru", "--sizes", "1") == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} line 2: hash_ids are not prefix-chained; id 2 follows another block than before; an id counts as "
        "a different block after each prefix"
    ]


def test_a_trace_in_which_all_comes_at_once(tmp_path, capsys):
    path = write_trace(tmp_path / "t.jsonl", [[1], [1]], times_ms=[5, 5])
    (row,) = report_of(tmp_path, path, "--policies", "lru", "--sizes", "1")["results"]
    assert (row["prefix_hit_rate"], row["first_part_hit_rate"], row["second_part_hit_rate"]) == (0.5, None, 0.5)


def run_command(*argv, hash_seed):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": hash_seed, "COLUMNS": "100"}
    command = [sys.executable, "-m", "tpu_offload.cli.main", "simulate", *argv]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_results_depend_on_no_hash_seed(tmp_path, trace_path):
    flags = (
        "--sizes",
        "0.05",
        "0.2",
        "--save-after-sightings",
        "2",
        "--hbm",
        "30",
        "--storage",
        "40;90",
        "--jobs",
        "1",
    )
    processes = [
        run_command("--trace", str(trace_path), *flags, "--json", str(tmp_path / f"{seed}.json"), hash_seed=seed)
        for seed in ("1", "2")
    ]
    outs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    one, other = (json.loads((tmp_path / f"{seed}.json").read_text())["results"] for seed in ("1", "2"))
    assert [row | {"run_s": 0} for row in one] == [row | {"run_s": 0} for row in other]
    assert outs[0][0] == outs[1][0]


def test_ctrl_c_ends_it_at_once(tmp_path):
    """While processes are running; the signal goes to all of them, as from a terminal."""
    path = write_trace(tmp_path / "long.jsonl", chats(random.Random(4), num_requests=4_000, num_chats=500))
    sizes = ",".join(str(i / 1000) for i in range(1, 400))
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [*LINE_BY_LINE, "simulate", "--trace", str(path), "--sizes", sizes]
    with subprocess.Popen(
        [*command, "--jobs", "2", "--json", str(tmp_path / "r.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            assert process.stderr.readline().startswith("simulate: 1 of")
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)  # the whole takes many minutes
        finally:
            process.kill()
    assert process.returncode == 130
    assert (out, err.splitlines()[-1:]) == ("", ["tpu-offload: interrupted"])
    assert all(line.startswith("simulate: ") for line in err.splitlines()[:-1])
    assert not (tmp_path / "r.json").exists()
    assert is_gone(process.pid)


def is_gone(process_group):
    for _ in range(200):
        try:
            os.killpg(process_group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
