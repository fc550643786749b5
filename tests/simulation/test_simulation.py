"""The simulation itself: traces, shrinking, the command."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.compiled import interpreted_only
from tests.grids import few
from tests.simulation import cli, shrink, trace
from tests.simulation.groups import make_groups
from tests.simulation.memory import Junk, Prefixes, Violation, kv
from tests.simulation.model import Model
from tests.simulation.places import Places
from tests.simulation.trace import Setup, generate
from tests.simulation.world import World, run
from tpu_offload.core.transfers import Transfers


@pytest.fixture
def bug(monkeypatch):
    """A bug: failed saves are published."""
    monkeypatch.setattr(Transfers, "_bad_slots", lambda self, job: set())


def first_failing(num_steps=200):
    for seed in range(40):
        setup, actions = generate(seed, num_steps)
        if shrink.failure(setup, actions)[0]:
            return seed, setup, actions
    raise AssertionError("no seed finds the bug")


def test_names_of_kv_are_equal_only_for_equal_prefixes_and_weights():
    prefixes, junk = Prefixes(), Junk()
    a = prefixes.child(prefixes.root(0), 1)
    assert a == prefixes.child(prefixes.root(0), 1)
    others = {prefixes.child(prefixes.root(1), 1), prefixes.child(prefixes.root(0), 2), prefixes.child(a, 1)}
    values = {kv(node, epoch) for node in (a, *others) for epoch in (0, 1)}
    assert len(values) == 8
    assert len({*values, *junk.block(4), junk.one(), *junk.block(2)}) == 15


def groups_of(**settings):
    setup = Setup(**({"block_size": 4, "num_blocks": 60} | settings))
    return setup, make_groups(setup)


def test_what_a_window_needs():
    _, (full, window) = groups_of(windows=(6,))
    assert [list(full.needed(n)) for n in (0, 1, 8, 9)] == [[], [0], [0, 1], [0, 1, 2]]
    # The token after n others attends to the five before it.
    assert [list(window.needed(n)) for n in (0, 4, 8, 9, 13)] == [[], [0], [0, 1], [1, 2], [2, 3]]
    assert [list(window.loaded(0, n)) for n in (1, 2, 4)] == [[0], [0, 1], [2, 3]]
    assert list(window.loaded(3, 4)) == [3], "HBM has the block before"
    values = list(range(100, 113))
    blocks, first, expected = window.reads([0, 0, 7, 8], values, 13, 14)
    assert (blocks, first, len(expected)) == ((7, 8), 0, 5)
    assert expected == window.content(values[8:])
    assert set(expected).isdisjoint(full.content(values)), "each layer group has its own KV"


def test_a_window_of_one_token_needs_nothing_at_a_boundary():
    _, (_, window) = groups_of(windows=(1,))
    assert [list(window.needed(n)) for n in (4, 6)] == [[], [1]]
    assert window.pieces(8, 2) == []


def test_pieces_of_windows_are_whole_chunks():
    _, (_, window) = groups_of(windows=(6,))
    assert window.pieces(16, 1) == [range(2, 3), range(3, 4)]
    assert window.pieces(24, 3) == [range(3, 6)]
    assert window.pieces(12, 3) == [range(0, 3)]


def test_a_state_is_one_row():
    setup, (_, state) = groups_of(num_rows=4, segment_slots=1, num_slots=3, blocks_per_chunk=2)
    assert [list(state.needed(n)) for n in (0, 1, 4, 5)] == [[], [0], [0], [1]]
    assert list(state.loaded(0, 4)) == [3]
    assert state.pieces(16, 2) == [range(3, 4)]
    # At a boundary the next step takes another row; inside a block it takes the row along.
    assert (list(state.granted(4, 7)), state.moved(4, 7)) == ([1], None)
    assert (list(state.granted(5, 9)), state.moved(5, 9)) == ([], (1, 2))
    assert (list(state.granted(5, 7)), state.moved(5, 7)) == ([1], None)
    places = Places(setup)
    assert (places.slot_of(5), places.slot_of(6), places.of_slot(3)) == (2, 3, range(6, 7))


def test_a_longer_run_begins_like_a_shorter_one():
    assert generate(5, 300)[1][: len(generate(5, 100)[1])] == generate(5, 100)[1]
    assert generate(5, 100)[0] == generate(5, 300)[0]


def test_a_trace_can_be_saved_and_read(tmp_path):
    setup, actions = generate(7, 50)
    trace.save(tmp_path / "t.json", setup, actions)
    assert trace.load(tmp_path / "t.json") == (setup, actions)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"setup": {}, "actions": [["step"]]}', '{"setup": {"x": 1}, "actions": []}']
)
def test_a_file_that_is_no_trace_is_an_error(tmp_path, text, capsys):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011
        trace.load(tmp_path / "t.json")
    assert cli.main(["--replay", str(tmp_path / "t.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_workers": 0}, "num_workers=0; expected 1 to 4"),
        ({"num_workers": 9}, "num_workers=9; expected 1 to 4"),
        ({"num_workers": True}, "num_workers=True; expected 1 to 4"),
        ({"num_blocks": "x"}, "num_blocks='x'; expected 1 to"),
        ({"num_blocks": 2}, "too few for a request"),
        ({"num_staging_blocks": 1, "blocks_per_chunk": 2}, "under one chunk"),
        ({"windows": [5, 0]}, "windows=0; expected 1 to 1000"),
        ({"windows": [5] * 4}, "expected up to three windows"),
        ({"windows": [5, 5]}, "in each of 3 layer groups"),
        ({"windows": [5], "save_on": "compute,eviction"}, "expected compute, preemption or both"),
        ({"num_rows": 2, "segment_slots": 1}, "num_rows=2, max_drafts=0; expected 3 or more, and 0"),
        ({"num_rows": 4, "segment_slots": 4, "max_drafts": 1}, "max_drafts=1; expected 3 or more, and 0"),
        ({"num_rows": 4}, "expected segments for rows in HBM and a host tier"),
        ({"num_rows": 4, "segment_slots": 3}, "num_slots=8 in segments of 3; expected 45 or more"),
        ({"state_share": 1}, "state_share=1; expected 0.01 to 0.99"),
        ({"hbm_cache": 1}, "hbm_cache=1; expected true or false"),
        ({"swap_mode": "maybe"}, "swap_mode='maybe'; expected one of auto, swap, recompute"),
        ({"delays": [1, 2]}, "delays=(1, 2); expected four"),
        ({"delays": [0, 0, 0, -1]}, "delays=-1; expected 0 to 100"),
        ({"breaker_retry_s": 0.0}, "breaker_retry_s=0.0; expected"),
        ({"breaker_retry_s": float("nan")}, "breaker_retry_s=nan; expected"),
    ],
)
def test_an_invalid_setup_is_one_line(change, expected, tmp_path, capsys):
    setup = dataclasses.asdict(Setup()) | change
    assert replay_status(tmp_path, {"setup": setup, "actions": []}) == 2
    assert_one_line(capsys, tmp_path, expected)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (["dance", 0, 0], "'dance' is not an action; expected one of step, arrive"),
        ([["step"], 0, 0], "is not an action"),
        (["step", 0], "expected two from 0"),
        (["step", 0, -1], "expected two from 0"),
        (["step", 0, 1.5], "expected two from 0"),
        (7, "is not a trace"),
        ([], "is not a trace"),
    ],
)
def test_an_invalid_action_is_one_line(action, expected, tmp_path, capsys):
    assert replay_status(tmp_path, {"setup": {}, "actions": [action]}) == 2
    assert_one_line(capsys, tmp_path, expected)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'{"setup": {"growth": 1e999}}'])
def test_a_file_of_anything_is_one_line(content, tmp_path, capsys):
    (tmp_path / "t.json").write_bytes(content)
    assert cli.main(["--replay", str(tmp_path / "t.json")]) == 2
    assert_one_line(capsys, tmp_path, "is not a trace")


def replay_status(directory, data):
    (directory / "t.json").write_text(json.dumps(data))
    return cli.main(["--replay", str(directory / "t.json")])


def assert_one_line(capsys, directory, expected):
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"simulate: error: {directory / 't.json'} ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_every_action_of_a_trace_is_known():
    assert set(World(Setup()).actions) == set(trace.KINDS)


def test_requests_finish_when_no_worker_reports_again():
    setup = Setup(num_blocks=24, num_swap_blocks=16, hbm_cache=False)
    step = ("step", 0, 0)
    actions = [("arrive", 0, 19), *[step] * 30, ("arrive", 0, 19), step, ("dead", 0, 0), ("arrive", 0, 19), step]
    world = run(setup, actions)
    assert world.dead == {0}
    assert world.counts["steps with all workers dead"]
    assert world.engine.counts["finished"] == 3


def test_any_part_of_a_trace_can_be_run():
    setup, actions = generate(3, 120)
    for part in (actions[::2], actions[1::2], actions[60:], [a for a in actions if a[0] != "step"]):
        run(setup, part)


def test_a_request_that_a_reset_finds_after_a_swap_is_not_saved():
    """Too rare for a small campaign: the request had no full chunk before the swap."""
    setup = Setup(block_size=4, blocks_per_chunk=3, max_batch=3, num_swap_blocks=16, num_blocks=24)
    step = ("step", 0, 0)
    run(setup, [step, ("arrive", 0, 69), step, ("preempt", 0, 1), step, step, ("reset", 1, 0), step])


def a_load_of_a_state():
    """A request, and a second one that loads what it left: three blocks and a row."""
    setup = Setup(num_rows=4, num_slots=48, segment_slots=2, hbm_cache=False, ahead=2)
    step = ("step", 0, 0)
    return setup, [("arrive", 0, 7), *[step] * 8, ("arrive", 0, 7), step]


def test_a_load_of_a_state_may_take_longer_than_one_timeout():
    """Its row may be a piece of its own, so it has the time of two pieces."""
    setup, actions = a_load_of_a_state()
    lines: list[str] = []
    world = run(setup, [*actions, ("tick", 2, 0), ("step", 0, 0)], log=lines.append)
    assert lines[lines.index("11 s pass") + 1 :][:3] == ["faults stop", "worker 0 reported 5 finished", "r2 finishes"]
    assert world.totals()["num_timed_out_jobs"] == 0


def test_a_load_that_times_out_at_another_time_is_found(monkeypatch):
    monkeypatch.setattr(Model, "_num_pieces", lambda self, job: 3)
    with pytest.raises(Violation, match=r"^load 5 times out at 120.9 s; expected 130.9 s$"):
        run(*a_load_of_a_state())


def test_an_unknown_action_is_an_error():
    with pytest.raises(ValueError, match="is not an action"):
        World(Setup()).act(("dance", 0, 0))


@interpreted_only
@pytest.mark.wide
def test_a_failing_trace_is_shrunk(bug):
    _, setup, actions = first_failing()
    small_setup, small, violation = shrink.minimal(setup, actions)
    assert len(small) < len(actions) / 4
    assert shrink.failure(small_setup, small)[0] == violation
    lines = shrink.explain(small_setup, small)
    assert lines[-1] == f"VIOLATION: {violation}"
    assert lines[1].startswith("1. ")


@interpreted_only
def test_a_violation_is_saved_and_replays(bug, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shrink, "minimal", functools.partial(shrink.minimal, num_runs=10))
    seed, _, _ = first_failing()
    argv = ["--first-seed", str(seed), "--seeds", "1", "--jobs", "1", "--save", str(tmp_path)]
    assert cli.main(argv) == 1
    out = capsys.readouterr().out
    assert f"scripts/simulate --seed {seed} --steps 200" in out
    assert out.splitlines()[-1].endswith("; 1 violations")
    (saved,) = tmp_path.iterdir()
    assert f"scripts/simulate --replay {saved}" in out
    assert cli.main(["--replay", str(saved)]) == 1
    assert "VIOLATION" in capsys.readouterr().out
    assert cli.main(["--seed", str(seed), "--save", str(tmp_path)]) == 1


def test_a_good_campaign_ends_with_one_line(capsys, tmp_path):
    assert cli.main(["--seeds", "12", "--steps", "40", "--jobs", "2", "--save", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("12 seeds, ")
    assert captured.out.endswith("; 0 violations\n")
    assert captured.out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_good_seed_is_explained(capsys):
    assert cli.main(["--seed", "4", "--steps", "30"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("setup: ")
    assert lines[-1] == "no violation"


@pytest.mark.parametrize(
    "argv",
    [["--seeds", "0"], ["--seeds", "x"], ["--bogus"], ["--seed", "1", "--seeds", "2"], ["--steps", "-1"],
     ["--jobs", "0"], ["--replay", "/nonexistent/file"], ["--save", "/nonexistent"], ["--first-seed", "-1"], ["what"],
     ["--first-seed", "3", "--seed", "1"], ["--first-seed", "0", "--replay", "x"]],
)  # fmt: skip
def test_a_bad_flag_is_one_line(argv, capsys):
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("simulate: error: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("jobs", few([1, 2], 2))
def test_ctrl_c_ends_with_the_totals_so_far(jobs, tmp_path):
    # Not by preexec_fn, which would fork. Children of a background process ignore Ctrl-C.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.simulation import cli\n"
        "from tpu_offload.cli import tables; tables._LINE_INTERVAL_S = 0.0\n"
        "from tpu_offload.cli.command import run_process\n"
        f"run_process(lambda: cli.main(['--seeds', '1000000', '--jobs', '{jobs}']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr.readline().endswith(" of 1000000 seeds\n")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert out.startswith("interrupted: ")
    assert out.count("\n") == 1
    assert "Traceback" not in err


def test_leftover_entries_are_found():
    from tests.simulation import leftovers

    world = World(Setup(num_swap_blocks=4))
    world.finish()
    assert leftovers.non_empty_tables(world.scheduler, late_jobs=False) == {}
    world.scheduler.match("r1", [], num_tokens=5, num_computed_tokens=0)
    left = leftovers.non_empty_tables(world.scheduler, late_jobs=False)
    assert any(path.startswith("._context.requests") for path in left), left


def test_setups_differ():
    setups = [dataclasses.asdict(generate(seed, 1)[0]) for seed in range(100)]
    for name in setups[0]:
        assert len({str(setup[name]) for setup in setups}) > 1, name
