"""Numbers of a replay (comparison, avoidable prefill), and tables."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from tpu_offload.cli import replay, tables
from tpu_offload.engine import PromptTokens, RequestStats
from tpu_offload.metrics import OffloadStats
from tpu_offload.replay import comparison
from tpu_offload.replay.serving import Record, ServedRun


def record(name, tokens=(), *, prompt=(), arrival_s=0.0, ttft_s=1.0, sources=PromptTokens()):  # noqa: B008 (frozen)
    first_token_s = None if ttft_s is None else arrival_s + ttft_s
    return Record(
        name,
        tuple(prompt),
        tuple(tokens),
        RequestStats(
            arrival_s=arrival_s, first_token_s=first_token_s, finish_s=9.0, prompt_tokens=sources, num_preemptions=0
        ),
    )


def test_equal_outputs_in_any_order():
    one = [record("a", (1, 2)), record("b", (3,))]
    assert comparison.find_differences(one, one[::-1]) == ([], 2)


@pytest.mark.parametrize(
    ("tokens", "position"), [((1, 2, 4), 2), ((9, 2, 3), 0), ((1, 2), 2), ((1, 2, 3, 3), 3), ((), 0)]
)
def test_a_difference_is_found_and_placed(tokens, position):
    ((difference,), num_compared) = comparison.find_differences(
        [record("a", (7,)), record("b", (1, 2, 3))], [record("b", tokens), record("a", (7,))]
    )
    assert (difference.request_id, difference.position, num_compared) == ("b", position, 2)
    assert f"request b differs from token {position} on" in str(difference)


def test_a_log_probability_differs_in_its_last_bit():
    one = [dataclasses.replace(record("a", (1, 2)), logprobs=(-0.5, 0.0))]
    same, other = ([dataclasses.replace(one[0], logprobs=(-0.5, x))] for x in (0.0, -0.0))
    assert comparison.find_differences(one, same) == ([], 1)
    ((difference,), _) = comparison.find_differences(one, other, names=("reference", "swap"))
    assert (difference.what, difference.position) == ("logprob", 1)
    assert "reference [0.0], swap [-0.0]" in str(difference)


def test_only_what_both_runs_finished_is_compared():
    assert comparison.find_differences([record("a", (1,))], [record("b", (2,))]) == ([], 0)
    assert comparison.find_differences([record("a", (1,)), record("b", (1,))], [record("b", (1,))]) == ([], 1)


def test_recomputed_counts_full_blocks_that_were_computed_before():
    history = tuple(range(8))
    records = [
        record("late", prompt=(*history, 50, 60, 60, 60, 1), arrival_s=2.0, sources=PromptTokens(hbm=4)),
        record("early", (50, 60, 60, 60, 60), prompt=history, arrival_s=1.0),
    ]
    # 12 tokens of the second prompt were computed before, including KV of the answer; 4 of them hit.
    assert comparison.count_recomputed(records, block_size=4) == 8
    # The whole prompt is never reusable: its last token must be computed.
    again = [record("a", prompt=history, arrival_s=1.0), record("b", prompt=history, arrival_s=2.0)]
    assert comparison.count_recomputed(again, block_size=4) == 7
    loaded = [again[0], record("b", prompt=history, arrival_s=2.0, sources=PromptTokens(host=4))]
    assert comparison.count_recomputed(loaded, block_size=4) == 3
    assert (
        comparison.count_recomputed([record("a", prompt=range(8)), record("b", prompt=range(1, 9))], block_size=4) == 0
    )


def test_numbers_of_a_run():
    sources = PromptTokens(computed=3, hbm=4, host=5)
    records = tuple(record(str(i), (0,) * 2, prompt=range(12), ttft_s=float(i), sources=sources) for i in range(101))
    numbers = comparison.run_numbers(ServedRun(records, wall_s=4.0, complete=True), block_size=4)
    assert numbers["ttft_p50_s"] == 50
    assert numbers["ttft_p99_s"] == 99
    assert numbers["tokens_per_s"] == 202 / 4
    assert numbers["total_tokens_per_s"] == 101 * 14 / 4
    del numbers["prompt_tokens"]["recomputed"]
    assert numbers["prompt_tokens"] == {"computed": 303, "hbm": 404, "host": 505}


def test_numbers_of_a_run_that_was_not():
    numbers = comparison.run_numbers(ServedRun((), wall_s=0.0, complete=False), block_size=4)
    assert numbers["ttft_p50_s"] is numbers["ttft_p99_s"] is numbers["tokens_per_s"] is None
    json.dumps(numbers, allow_nan=False)


def test_offload_numbers():
    stats = OffloadStats(
        staging_budget_blocks=8,
        staging_peak_blocks=5,
        dropped_save_blocks=2,
        dropped_load_blocks=1,
        saved_nbytes=10,
        loaded_nbytes=20,
    )
    numbers = comparison.offload_numbers(stats)
    assert numbers["staging"]["budget_blocks"] == 8
    assert numbers["staging"]["peak_blocks"] == 5
    assert numbers["staging"]["dropped_blocks"] == 3
    assert (numbers["transfers"]["saved_nbytes"], numbers["transfers"]["loaded_nbytes"]) == (10, 20)


def test_hits_are_compared_with_the_same_requests():
    baseline = ServedRun((record("a", ttft_s=8.0), record("b", ttft_s=2.0)), 1.0, True)
    offload = ServedRun((record("b", ttft_s=1.0), record("a", ttft_s=3.0, sources=PromptTokens(host=16))), 1.0, True)
    assert comparison.hit_ttfts(baseline, offload) == {
        "num_requests": 1,
        "baseline_ttft_p50_s": 8.0,
        "offload_ttft_p50_s": 3.0,
    }


def test_a_row_has_a_cell_for_each_side():
    sides = {"a": {"b": 2**20, "c": 2**21}, "s": 0.25}, {"a": {"b": 0}, "s": None}
    assert tables.Row("one", "a.b").cells(sides) == ("one", "1,048,576", "0")
    assert tables.Row("two", ("a.b", "a.c"), "MiB").cells(sides) == ("two", "1.0 + 2.0", "0.0 + -")
    assert tables.Row("of", ("a.b", "a.c"), "id", " of ", only_last=True).cells(sides) == ("of", "", "0 of -")
    assert tables.Row("time", "s", "s").cells(sides) == ("time", "250.0 ms", "-")
    assert tables.Row("text", lambda side: f"<{side['s']}>").cells(sides) == ("text", "<0.25>", "<None>")


def test_comparison_table(capsys):
    baseline = ServedRun((record("a", (1,), prompt=range(8), ttft_s=2.0),), 2.0, True)
    hit = record("a", (1,), prompt=range(8), ttft_s=0.5, sources=PromptTokens(hbm=0, host=4, computed=4))
    numbers = {
        "workload": {"name": "w", "num_requests": 1},
        "host_hits": comparison.hit_ttfts(baseline, ServedRun((hit,), 1.0, True)),
        "baseline": comparison.run_numbers(baseline, block_size=4),
        "offload": comparison.run_numbers(ServedRun((hit,), 1.0, True), block_size=4)
        | comparison.offload_numbers(OffloadStats(staging_budget_blocks=1000, saved_nbytes=2**20)),
    }
    Console(width=100).print(replay.comparison_table(numbers))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    for line in (
        ["requests finished", "1", "1", ""],
        ["prompt tokens loaded from host", "0", "4", ""],
        ["p50 of 1 with a host hit", "2000.0 ms", "500.0 ms", "0.25"],
        ["generated tokens/s", "0.5", "1.0", "2.00"],
        ["staging peak of budget, blocks", "", "0 of 1000", ""],
        ["saved, MiB", "", "1.0", ""],
    ):
        assert line in lines


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        ([0.1, 9.9], []),
        ([1, 11, 12, 22, 30], ["verify: 2 of 5 records", "verify: 4 of 5 records"]),
    ],
)
def test_progress_in_a_log_begins_after_an_interval(monkeypatch, capsys, seconds, lines):
    times = [100.0]
    monkeypatch.setattr(tables, "time", SimpleNamespace(monotonic=lambda: times[-1]))
    with tables.progress(len(seconds), what="records") as start:
        on_finish = start("verify")
        for s in seconds:
            times.append(100.0 + s)
            on_finish()
    assert capsys.readouterr().err.splitlines() == lines
