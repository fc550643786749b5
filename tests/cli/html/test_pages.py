"""The HTML reports in a real browser: they draw what was measured, need no network, and fit small windows."""

import json
from typing import Any

import pytest

from tests.cli.conftest import TINY_BENCH
from tests.cli.test_replay import TINY
from tests.cli.test_simulate import write_trace
from tpu_offload.cli.main import main


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs a command once; returns its report and its page."""
    folder = tmp_path_factory.mktemp("pages")
    runs: dict[tuple[object, ...], Any] = {}

    def make(*argv, json_flag="--json", status=0):
        if argv not in runs:
            report, page = folder / f"{len(runs)}.json", folder / f"{len(runs)}.html"
            assert main([*map(str, argv), json_flag, str(report), "--html", str(page)]) == status
            runs[argv] = json.loads(report.read_text()), page
        return runs[argv]

    return make


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    lists = [[i % 7, 100 + i % 5, 200 + i] for i in range(90)]
    return write_trace(tmp_path_factory.mktemp("trace") / "<b>t&amp;.jsonl", lists)


REPLAY = ("replay", *TINY, "--requests", "9", "--turns", "3")


def check_page(browser, page):
    """What holds for each page."""
    browser.open(page)
    num_charts = browser.run("return document.querySelectorAll('.chart').length")
    assert browser.run(
        "return [...document.querySelectorAll('.chart')].filter(c => c.querySelector('svg')).length"
    ) == (num_charts)
    assert num_charts > 0
    assert browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)") == []
    for width in (1200, 500):
        browser.open(page, width=width)
        # Tables scroll by themselves.
        assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth"), width


def test_replay(browser, made):
    report, page = made(*REPLAY)
    check_page(browser, page)
    charts = browser.charts()
    over_run = charts["Time to first token over the run"]
    for side, name in ("baseline", "without offloading"), ("offload", "with offloading"):
        requests = report[side]["requests"]
        assert over_run[name] == (requests["arrival_s"], [pytest.approx(1e3 * s) for s in requests["ttft_s"]])
        x, y = charts["Its distribution"][name]
        assert x == sorted(x)
        assert y[-1] == 100
        sources = charts[name.capitalize()]
        for part, field in ("computed", "computed"), ("hit in HBM", "hbm"), ("loaded", "host"):
            assert sum(sources[part][1]) == report[side]["prompt_tokens"][field]
    timeline, host = report["offload"]["timeline"], report["offload"]["host"]
    occupancy = charts["Occupancy and evictions of the host tier"]
    assert occupancy["resident"] == (timeline["at_s"], timeline["num_resident_chunks"])
    assert occupancy["resident"][1][-1] == host["num_resident_chunks"] > 0
    assert set(occupancy["slots"][1]) == {host["num_chunks"]}
    moved = charts["Bytes moved since the start"]
    assert moved["saved to host memory"][1][-1] == report["offload"]["transfers"]["saved_nbytes"] / 2**20
    assert moved["loaded from host memory"][1][-1] == report["offload"]["transfers"]["loaded_nbytes"] / 2**20
    staging = charts["Staging buffer against its budget"]
    assert set(staging["budget"][1]) == {report["offload"]["staging"]["budget_blocks"]}
    assert browser.run("return document.querySelector('h1').textContent").startswith("Replay of chat: 9 requests")
    assert "identical" in browser.run("return document.querySelector('.figures').textContent")
    assert browser.run("return document.querySelectorAll('[role=alert]').length") == 0


def test_pointing_at_a_request_names_it(browser, made):
    report, page = made(*REPLAY)
    browser.open(page)
    browser.run("Plotly.Fx.hover('chart-0', [{curveNumber: 1, pointNumber: 3}])")
    shown = browser.run("return document.querySelector('#chart-0 .hoverlayer').textContent")
    requests = report["offload"]["requests"]
    assert f"{requests['request_id'][3]}: {requests['prompt_tokens'][3]} prompt tokens" in shown


def test_the_table_is_that_of_the_terminal(browser, made):
    report, page = made(*REPLAY)
    browser.open(page)
    rows = browser.run("return [...document.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))")
    computed = [report[side]["prompt_tokens"]["computed"] for side in ("baseline", "offload")]
    assert ["prompt tokens computed", *(f"{n:,}" for n in computed), f"{computed[1] / computed[0]:.2f}"] in rows


@pytest.mark.wide
def test_swap(browser, made):
    report, page = made("replay", "--preempt", "--rounds", "2", "--requests", "10", *TINY, "--concurrency", "8")
    check_page(browser, page)
    charts = browser.charts()
    rates = charts["Generated tokens/s by round"]
    for side in ("recompute", "swap"):
        rounds = report[side]["rounds"]
        assert rates[side] == ([1, 2], [run["tokens_per_s"] for run in rounds])
        assert len(charts["Completion time of all rounds"][side][0]) == sum(run["num_requests"] for run in rounds)
    held = charts["Occupancy of the swap pool"]["blocks in the pool"][1]
    assert 0 < max(held) <= report["swap"]["rounds"][-1]["swap"]["swap_peak_blocks"]


def test_simulate(browser, made, trace):
    flags = ("--sizes", "0.1", "0.3", "--policies", "lru,arc,density,belady", "--hbm", "4", "--storage", "0.5")
    report, page = made("simulate", "--trace", trace, *flags)
    check_page(browser, page)
    charts = browser.charts()
    for name, policy in ("lru", "lru"), ("density (default)", "density"), ("belady (the bound)", "belady"):
        rows = [row for row in report["results"] if row["policy"] == policy]
        sizes = [pytest.approx(100 * row["size_share"]) for row in rows]
        assert charts["Prefix hit rate"][name] == (sizes, [pytest.approx(100 * r["prefix_hit_rate"]) for r in rows])
    sources = charts["Prompt blocks by source, density"]
    assert [pytest.approx(100)] * 2 == [sum(values) for values in zip(*(y for _, y in sources.values()), strict=True)]
    assert list(sources) == ["hit in HBM", "loaded from the host tier", "read from storage", "computed"]
    assert "<b>t&amp;.jsonl" in browser.run("return document.querySelector('h1').textContent"), "the name as it is"


def test_hits_over_the_trace_add_up(made, trace):
    report, _ = made(
        *("simulate", "--trace", trace, "--sizes", "0.1", "0.3", "--policies", "lru,arc,density,belady"),
        *("--hbm", "4", "--storage", "0.5"),
    )
    num = len(report["bins_s"]) - 1
    blocks = [0] * num
    for line in trace.read_text().splitlines():
        at_s = json.loads(line)["timestamp"] / 1000
        blocks[min(num - 1, sum(at_s >= end for end in report["bins_s"][1:-1]))] += 3
    for row in report["results"]:
        hits = sum(n * rate for n, rate in zip(blocks, row["hit_rate_over_time"], strict=True) if n)
        assert hits == pytest.approx(row["prefix_hit_rate"] * report["num_blocks"])


def test_bench(browser, made, small_buffers):
    profile, page = made("bench", *TINY_BENCH, json_flag="--output")
    check_page(browser, page)
    figures = profile["bench"]["figures"]
    rates = browser.charts()["Rate"]  # the last of the two: loads
    for path in ("direct", "staged"):
        mine = [one for one in figures if (one["path"], one["direction"]) == (path, "load")]
        assert rates[path] == (
            [one["num_blocks"] for one in mine],
            [pytest.approx(one["gb_per_s"]["median"]) for one in mine],
        )
    assert f"TPU_OFFLOAD_LOAD_PATH={profile['entries'][0]['load'][0]}" in browser.run("return document.body.innerText")


def test_plan(browser, made, trace):
    report, page = made("plan", "--model", "Llama-3.1-8B", "--machine", "v6e-8", "--trace", trace)
    check_page(browser, page)
    charts = browser.charts()
    parts = {name: y[0] for name, (_, y) in charts["HBM of one device"].items()}
    assert parts["KV"] == pytest.approx(report["hbm_kv_nbytes"] / 8 / 2**30)
    assert sum(parts.values()) == pytest.approx(report["hbm_nbytes"] / 8 / 2**30)
    assert charts["Bandwidth from which on a load pays"]["host memory"][1] == [report["tiers"][0]["gbps"]] * 2
    hits = report["hits"]
    assert charts["Where prompt tokens come from"]["loaded"][1] == [pytest.approx(100 * hits["host"])]
    assert browser.run("return document.querySelector('pre').textContent") == report["command"]


def test_a_plan_that_does_not_fit_says_so_first(browser, made):
    report, page = made("plan", "--model", "DeepSeek-V3", "--machine", "v5e-8", status=1)
    check_page(browser, page)
    assert report["why_not"] in browser.run("return document.querySelector('[role=alert]').textContent")
