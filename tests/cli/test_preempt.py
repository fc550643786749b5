"""`replay --preempt`: the sides of the comparison, their numbers, and the findings."""

import dataclasses
import json

import pytest

from tests.cli.conftest import interrupted_run
from tpu_offload.cli.main import main
from tpu_offload.engine import PromptTokens, RequestStats
from tpu_offload.metrics import OffloadStats
from tpu_offload.replay import preempt
from tpu_offload.replay import setup as replay_setup
from tpu_offload.replay.serving import Record, ServedRun
from tpu_offload.replay.workloads import decode_workload

pytestmark = pytest.mark.usefixtures("clean_environment")

TINY = (
    *("--num-layers", "1", "--d-model", "32", "--num-heads", "2", "--num-kv-heads", "1", "--head-dim", "16"),
    *("--d-ff", "32", "--block-size", "16", "--max-num-batched-tokens", "64"),
)
SIDES = ("recompute", "swap")


@pytest.fixture
def chats(tmp_path):
    """Six short requests, four in flight; with 10 blocks some are preempted."""
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps([{"role": "user", "content": chr(97 + i) * 20}]) + "\n" for i in range(6)))
    return "--prompts", str(path), "--max-tokens", "40", "--concurrency", "4", "--num-blocks", "10"


def replay(*flags):
    return main(["replay", "--preempt", *TINY, *flags])


def report_of(tmp_path, *flags, status=0):
    path = tmp_path / "r.json"
    assert replay(*flags, "--json", str(path)) == status
    return json.loads(path.read_text())


def sides_of(report):
    return report["recompute"], report["swap"], report["control"]["off"], report["control"]["on"]


def test_generated_workload(tmp_path, capsys, monkeypatch):
    """Four requests in an HBM for their prompts: at least a third are preempted, and all counts add up."""
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_MODE", "swap")
    report = report_of(tmp_path, "--requests", "4", "--concurrency", "8", "--rounds", "2")
    out = capsys.readouterr().out
    assert report["workload"]["name"] == "decode"
    assert report["outputs_identical"] is True
    assert "Outputs identical: every token and log-probability" in out
    assert (report["num_compared"], report["num_runs_compared"]) == (4 * 8, 8)
    assert report["interrupted"] is False
    for side in sides_of(report):
        assert [run["round"] for run in side["rounds"]] == [1, 2]
        for run in side["rounds"]:
            assert run["complete"]
            assert run["num_requests"] == 4
            assert 0 < run["ttft_p50_s"] <= run["completion_p50_s"] <= run["completion_p99_s"] <= run["wall_s"]
            swap = run["swap"]
            # Every swapped-out request is swapped in or lost; one preempted while being swapped in is not counted
            # twice.
            assert swap["num_swapped_out"] == swap["num_swapped_in"] + swap["num_lost_swaps"]
            assert swap["num_recomputed"] + swap["num_swapped_out"] <= run["num_preemptions"]
            assert run["preempted_share"] == run["num_preempted_requests"] / 4
    for side in ("off", "on"):
        assert report["control"][side]["median"]["num_preemptions"] == 0
    for name in SIDES:
        assert report[name]["median"]["preempted_share"] >= 1 / 3
    recompute, swap = (report[name]["median"] for name in SIDES)
    assert recompute["swap"]["num_swapped_out"] == recompute["num_swaps"] == 0
    assert recompute["swap"]["num_recomputed"] == recompute["num_preemptions"]
    assert swap["num_swaps"] > 0
    assert swap["prompt_tokens"]["computed_again"] < recompute["prompt_tokens"]["computed_again"]
    assert report["config"]["swap_gb"] == "auto"
    assert report["config"]["num_cpu_chunks"] == 0
    ratios = report["swap_to_recompute"]["tokens_per_s"]
    assert ratios["rounds"][0] == swap_ratio(report, 0)
    assert ratios["min"] <= ratios["median"] <= ratios["max"]


def swap_ratio(report, i):
    one, other = (report[name]["rounds"][i]["tokens_per_s"] for name in SIDES)
    return other / one


def test_default_sizes_cause_enough_preemptions():
    """HBM holds the prompts of the requests in flight, and less than half of the requests themselves."""
    for seed in range(3):
        workload = decode_workload(num_requests=replay_setup.DEFAULT_NUM_DECODE_REQUESTS, seed=seed)
        full = sum(conversation.longest_request for conversation in workload.conversations) / workload.num_requests
        prompt = sum(workload.prompt_lens) / workload.num_requests
        held = preempt.DEFAULT_CONCURRENCY * prompt / full
        assert held < 0.5 * preempt.DEFAULT_CONCURRENCY
        assert workload.num_requests >= preempt.DEFAULT_CONCURRENCY


@pytest.mark.wide
def test_other_sources(tmp_path, chats):
    report = report_of(tmp_path, *chats, "--temperature", "0.8", "--top-k", "20", "--rounds", "1", "--seed", "3")
    assert report["workload"]["num_requests"] == 6
    assert report["outputs_identical"] is True
    assert report["swap"]["median"]["num_preemptions"] > 0
    trace = tmp_path / "t.jsonl"
    request = {"timestamp": 0, "input_length": 900, "output_length": 60, "hash_ids": [0, 1]}
    trace.write_text("".join(json.dumps(request | {"hash_ids": [i, i + 9]}) + "\n" for i in range(4)))
    report = report_of(tmp_path, "--trace", str(trace), "--rounds", "1", "--concurrency", "2")
    assert report["outputs_identical"] is True


@pytest.mark.parametrize("what", ["token", "logprob"])
def test_any_difference_is_reported(tmp_path, monkeypatch, capsys, chats, what):
    """One token of one request of one run, or the last bit of its log-probability, is changed in the output."""
    serve, num_runs = replay_setup.serve, iter(range(9))  # type: ignore[attr-defined]

    def serve_and_spoil(*args, **kwargs):
        served = serve(*args, **kwargs)
        if next(num_runs) != 4:  # the reference, then off, on, recompute, swap
            return served
        record = served.records[2]
        if what == "token":
            record = dataclasses.replace(record, tokens=(*record.tokens[:-1], 319))
        else:
            record = dataclasses.replace(record, logprobs=(*record.logprobs[:-1], record.logprobs[-1] - 1e-6))
        return dataclasses.replace(served, records=(*served.records[:2], record, *served.records[3:]))

    monkeypatch.setattr(replay_setup, "serve", serve_and_spoil)
    report = report_of(tmp_path, *chats, "--rounds", "1", status=1)
    out = capsys.readouterr().out
    assert "OUTPUTS DIFFER in 1 of 24 requests" in out
    assert report["outputs_identical"] is False
    (difference,) = report["differences"]
    assert (difference["run"], difference["round"], difference["what"]) == ("swap", 1, what)
    assert difference["position"] == 39
    assert difference["text"] in out.replace("\n", " ")


def test_swap_turned_off_by_a_variable(tmp_path, monkeypatch, capsys, chats):
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_GB", "0")
    report = report_of(tmp_path, *chats, "--rounds", "1")
    assert report["config"]["swap_gb"] == "auto"
    assert "TPU_OFFLOAD_SWAP_GB=0" in capsys.readouterr().out


def test_sizes_and_modes_of_the_user_are_kept(tmp_path, monkeypatch, chats):
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_GB", "0.001")
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_MODE", "swap")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "100")
    report = report_of(tmp_path, *chats, "--rounds", "1")
    config = report["config"]
    assert (config["swap_gb"], config["swap_mode"], config["num_cpu_chunks"]) == (0.001, "swap", 100)
    assert report["outputs_identical"] is True
    assert report["notes"] == ["The host tier is on and serves prompts on both sides."]


def test_recompute_forced(tmp_path, monkeypatch, capsys, chats):
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_MODE", "recompute")
    monkeypatch.setenv("TPU_OFFLOAD_SWAP_GB", "0.001")
    report = report_of(tmp_path, *chats, "--rounds", "1")
    out = capsys.readouterr().out
    assert "Both sides are the same: TPU_OFFLOAD_SWAP_MODE=recompute." in out
    assert "TPU_OFFLOAD_SWAP_GB=0" not in out
    assert report["config"]["swap_gb"] == 0.001
    assert report["swap"]["median"]["num_swaps"] == 0


def test_nothing_preempted(tmp_path, capsys, chats):
    report = report_of(tmp_path, *chats[:-1], "40", "--rounds", "1")
    assert report["swap"]["median"]["num_preempted_requests"] == 0
    assert "No request was preempted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--preempt --rounds 0", "'--rounds': 0 is not"),
        ("--rounds 2", "--rounds 2 requires --preempt"),
        ("--preempt --turns 2", "--turns 2 has no effect here; it requires --workload chat"),
        ("--preempt --max-tokens 8", "--max-tokens 8 has no effect here; it requires --prompts"),
        ("--preempt --workload decode --trace x", "not allowed with"),
        ("--preempt --num-blocks 3", "--num-blocks 3 is under the"),
        ("--preempt --concurrency 600", "max_num_batched_tokens=512"),
        ("--preempt --json no-such-folder/r.json", "there is no directory"),
    ],
)
def test_wrong_flag(capsys, tmp_path, monkeypatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay_setup, "serve", None)  # the error comes before anything is served
    assert main(["replay", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tpu-offload: error: ")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.wide
def test_interrupt_reports_what_is_finished(tmp_path):
    flags = "replay", "--preempt", *TINY, "--requests", "400", "--concurrency", "4"
    page = tmp_path / "r.html"
    report = interrupted_run(*flags, "--html", str(page), path=tmp_path / "r.json", during="reference")
    assert "Interrupted: the numbers cover the requests finished so far." in page.read_text()
    assert report["num_reference_requests"] > 0
    assert report["swap"] == {"rounds": [], "median": {}, "tokens_per_s_range": None}


# --- numbers ------------------------------------------------------------------------------------


def record(name, *, computed, num_preemptions=0, num_swaps=0, finish_s=9.0):
    stats = RequestStats(
        arrival_s=0.0,
        first_token_s=1.0,
        finish_s=finish_s,
        prompt_tokens=PromptTokens(computed=computed),
        num_preemptions=num_preemptions,
        num_swaps=num_swaps,
    )
    return Record(name, (1, 2, 3), (4, 5), stats, (-1.0, -2.0))


def numbers(*records, round_number=1, wall_s=4.0, complete=True):
    run = ServedRun(records, wall_s=wall_s, complete=complete)
    return preempt.side_numbers(run, OffloadStats(num_recomputed=3), round_number=round_number)


def test_numbers_of_a_run():
    run = numbers(
        record("a", computed=3),
        record("b", computed=5, num_preemptions=2, num_swaps=1, finish_s=3.0),
    )
    assert run["tokens_per_s"] == 1.0
    assert run["prompt_tokens"]["computed_again"] == 2
    assert (run["num_preempted_requests"], run["preempted_share"]) == (1, 0.5)
    assert (run["num_preemptions"], run["num_swaps"]) == (2, 1)
    assert run["completion_p50_s"] == 6.0
    assert run["swap"]["num_recomputed"] == 3


def test_numbers_of_a_run_that_was_not():
    run = numbers(wall_s=0.0, complete=False)
    assert run["tokens_per_s"] is run["preempted_share"] is run["completion_p99_s"] is None
    json.dumps(preempt.summary([run]), allow_nan=False)


def test_only_complete_runs_count():
    whole = [numbers(record("a", computed=3), round_number=i + 1, wall_s=s) for i, s in enumerate((1.0, 2.0))]
    stopped = numbers(record("a", computed=3), round_number=3, wall_s=9.0, complete=False)
    side = preempt.summary([*whole, stopped])
    assert side["median"]["tokens_per_s"] == 1.5
    assert side["tokens_per_s_range"] == [1.0, 2.0]
    assert len(side["rounds"]) == 3
    assert preempt.summary([stopped])["median"]["num_requests"] == 1


def test_ratios_are_of_equal_rounds():
    def side(*wall_s):
        return preempt.summary(
            [numbers(record("a", computed=3), round_number=i, wall_s=s, complete=s < 9) for i, s in wall_s]
        )

    ratios = preempt.ratios(side((1, 2.0), (2, 4.0), (3, 8.0)), side((2, 1.0), (1, 1.0), (3, 9.0)))
    assert ratios["tokens_per_s"] == {"rounds": [4.0, 2.0], "median": 3.0, "min": 2.0, "max": 4.0}
    assert preempt.ratios(side(), side())["tokens_per_s"] is None
