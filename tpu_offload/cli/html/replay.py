"""The page of `tpu-offload replay`, from its report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tpu_offload.cli.html.charts import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    Axis,
    Chart,
    Series,
    distribution,
    lines,
    points,
    short,
    stacked,
    steps,
)
from tpu_offload.cli.html.page import Figure, Page, Section, environment_line

_MIB = 2**20
_NUM_BINS = 40
_SECONDS = Axis("seconds since the start of the run")
_TTFT_MS = Axis("time to first token, ms")
_SIDES = (("baseline", "without offloading", GREY), ("offload", "with offloading", BLUE))
_SOURCES = (("computed_tokens", "computed", RED), ("hbm_tokens", "hit in HBM", SKY), ("host_tokens", "loaded", GREEN))

type Columns = Mapping[str, Sequence[Any]]


def replay_page(report: Mapping[str, Any], table: Table) -> Page:
    """The page of a run without offloading and one with it, also of `--restart`.

    Args:
      report: as in the JSON file.
      table: the one that the terminal shows.
    """
    workload, offload = report["workload"], report["offload"]
    sections = [
        Section("Time to first token", charts=_ttft_charts(report)),
        Section("Where prompt tokens came from", charts=_source_charts(report)),
        Section("The host tier and the staging buffer", charts=_tier_charts(offload, report["engine"]["num_blocks"])),
        Section("Bytes moved", charts=_bytes_charts(offload["timeline"])),
        Section("Requests", charts=_request_charts([(report[key], *rest) for key, *rest in _SIDES])),
        Section("The run in numbers", tables=[table]),
    ]
    return Page(
        f"Replay of {workload['name']}: {workload['num_requests']} requests without and with offloading",
        report["argv"],
        environment_line(report),
        _figures(report),
        run_warnings(report),
        [section for section in sections if section.charts or section.tables],
    )


def swap_page(report: Mapping[str, Any], table: Table, findings: Sequence[str]) -> Page:
    """The page of `--preempt`.

    Args:
      report: as in the JSON file.
      table: the one that the terminal shows.
      findings: its sentences.
    """
    workload, engine = report["workload"], report["engine"]
    named = (("recompute", "recompute", GREY), ("swap", "swap", BLUE))
    last = {key: report["details"][key][-1] for key, *_ in named if report["details"][key]}
    sides = [(last[key], name, color) for key, name, color in named if key in last]
    ratio = report["swap_to_recompute"].get("tokens_per_s")
    sections = [
        Section("Throughput and completion", charts=_preempt_charts(report, named)),
        Section("The last round: requests", charts=_request_charts(sides)),
        Section("The last round: swap pool", charts=_swap_charts(last.get("swap"))),
        Section("The rounds in numbers", " ".join([*report["notes"], *findings]), tables=[table]),
    ]
    return Page(
        f"Swap or recompute: {workload['num_requests']} requests in an HBM of {engine['num_blocks']} blocks",
        report["argv"],
        environment_line(report),
        [
            Figure("tokens/s, swap / recompute", "-" if ratio is None else f"{ratio['median']:.2f}", _range(ratio)),
            _outputs(report),
        ],
        run_warnings(report),
        [section for section in sections if section.charts or section.tables],
    )


def run_warnings(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know before the numbers."""
    said = []
    if report["differences"]:
        said.append(f"OUTPUTS DIFFER in {len(report['differences'])} of {report['num_compared']} requests.")
        said += [difference["text"] for difference in report["differences"][:10]]
    elif not report["num_compared"]:
        said.append("No request finished in both runs, so no output was compared.")
    if report["interrupted"]:
        said.append("Interrupted: the numbers cover the requests finished so far.")
    return said


def _outputs(report: Mapping[str, Any]) -> Figure:
    word = {True: "identical", False: "DIFFER", None: "not compared"}[report["outputs_identical"]]
    return Figure("outputs", word, f"{report['num_compared']} requests compared, bit for bit")


def _range(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['min']:.2f} to {ratio['max']:.2f} over the rounds"


def _figures(report: Mapping[str, Any]) -> list[Figure]:
    baseline, offload = report["baseline"], report["offload"]
    found = []
    for key, label in ("ttft_p50_s", "time to first token, p50"), ("ttft_p99_s", "time to first token, p99"):
        one, other = baseline[key], offload[key]
        if one and other is not None:
            found.append(Figure(label, f"{other * 1e3:.1f} ms", f"{one * 1e3:.1f} ms without: {other / one:.2f} of it"))
    if baseline["tokens_per_s"] and offload["tokens_per_s"]:
        ratio = offload["tokens_per_s"] / baseline["tokens_per_s"]
        found.append(Figure("generated tokens/s", f"{offload['tokens_per_s']:,.0f}", f"{ratio:.2f} of without"))
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        found.append(Figure("loaded from the host", f"{share:.0%}", "of the prompt tokens recomputed without"))
    staging = offload["staging"]
    if staging["budget_blocks"]:
        peak = f"{staging['peak_blocks']} of {staging['budget_blocks']}"
        found.append(Figure("staging blocks, peak", peak, f"{staging['dropped_blocks']} blocks dropped"))
    if again := report.get("restart"):
        asked = again["stored_tokens_asked_again"]
        share = again["found_tokens"] / asked if asked else 0.0
        found.append(Figure("found after the restart", f"{share:.1%}", f"of {asked} stored tokens asked for again"))
    return [*found, _outputs(report)]


def _ttft_charts(report: Mapping[str, Any]) -> list[Chart]:
    over_run, values = [], []
    for key, name, color in _SIDES:
        requests = _with_first_token(report[key]["requests"])
        if requests["ttft_s"]:
            ms = [1e3 * ttft_s for ttft_s in requests["ttft_s"]]
            text = [_describe(requests, i) for i in range(len(ms))]
            over_run.append(Series(name, requests["arrival_s"], ms, color, text=text))
            values.append(Series(name, ms, (), color))
    if not over_run:
        return []
    return [
        points("Time to first token over the run", over_run, x=_SECONDS, y=_TTFT_MS, note="One point a request."),
        distribution("Its distribution", values, x=Axis(_TTFT_MS.title, log=True), note="Further left is faster."),
    ]


def _with_first_token(requests: Columns) -> dict[str, list[Any]]:
    known = [i for i, ttft_s in enumerate(requests["ttft_s"]) if ttft_s is not None]
    return {name: [values[i] for i in known] for name, values in requests.items()}


def _describe(requests: Columns, i: int) -> str:
    sources = ", ".join(f"{requests[column][i]} {name}" for column, name, _ in _SOURCES)
    return f"{requests['request_id'][i]}: {requests['prompt_tokens'][i]} prompt tokens ({sources})"


def _source_charts(report: Mapping[str, Any]) -> list[Chart]:
    charts = []
    arrivals = [at_s for key, *_ in _SIDES for at_s in report[key]["requests"]["arrival_s"]]
    end_s = max(arrivals, default=0.0) or 1.0
    num_bins = max(1, min(_NUM_BINS, len(arrivals) // 2))
    width_s = end_s / num_bins  # the same on both sides
    for key, title, _ in _SIDES:
        requests = report[key]["requests"]
        if not requests["arrival_s"]:
            continue
        bins = [min(int(at_s / width_s), num_bins - 1) for at_s in requests["arrival_s"]]
        middles = [(i + 0.5) * width_s for i in range(num_bins)]
        series = [
            Series(name, middles, _sums(bins, requests[column], num_bins), color) for column, name, color in _SOURCES
        ]
        charts.append(
            stacked(
                title.capitalize(),
                series,
                x=Axis("arrival, seconds since the start of the run"),
                y=Axis("prompt tokens"),
                note=f"Requests that arrived within {short(width_s)} s.",
            )
        )
    return charts


def _sums(bins: Sequence[int], values: Sequence[int], num_bins: int) -> list[int]:
    sums = [0] * num_bins
    for number, value in zip(bins, values, strict=True):
        sums[number] += value
    return sums


def _tier_charts(offload: Mapping[str, Any], num_hbm_blocks: int) -> list[Chart]:
    timeline = offload["timeline"]
    if "num_resident_chunks" not in timeline:
        return []
    at_s, host, staging = timeline["at_s"], offload["host"], offload["staging"]
    occupied = [Series("resident", at_s, timeline["num_resident_chunks"], GREEN)]
    if host["num_chunks"]:
        occupied.append(_limit("slots", at_s, host["num_chunks"]))
    if any(timeline["num_evicted_chunks"]):
        occupied.append(Series("evicted so far", at_s, timeline["num_evicted_chunks"], RED, dash="dot"))
    if any(timeline["num_stored_chunks"]):
        occupied.append(Series("in storage", at_s, timeline["num_stored_chunks"], PURPLE))
    note = f"HBM has {num_hbm_blocks} blocks."
    charts = [lines("Occupancy and evictions of the host tier", occupied, x=_SECONDS, y=Axis("chunks"), note=note)]
    if staging["budget_blocks"]:
        dropped = [
            save + load
            for save, load in zip(timeline["dropped_save_blocks"], timeline["dropped_load_blocks"], strict=True)
        ]
        used = [
            Series("in use after a step", at_s, timeline["staging_reserved_blocks"], BLUE),
            Series("peak so far", at_s, timeline["staging_peak_blocks"], SKY),
            _limit("budget", at_s, staging["budget_blocks"]),
            Series("dropped blocks so far", at_s, dropped, RED, dash="dot"),
        ]
        note = "Staged copies use the buffer; direct copies need none."
        charts.append(lines("Staging buffer against its budget", used, x=_SECONDS, y=Axis("blocks"), note=note))
    return charts


def _limit(name: str, at_s: Sequence[float], value: float) -> Series:
    return Series(name, [at_s[0], at_s[-1]], [value, value], GREY, dash="dash", width=1.5)


def _bytes_charts(timeline: Columns) -> list[Chart]:
    if "saved_nbytes" not in timeline:
        return []
    named = (
        ("saved_nbytes", "saved to host memory", ORANGE),
        ("loaded_nbytes", "loaded from host memory", GREEN),
        ("cascaded_nbytes", "written to storage", RED),
        ("promoted_nbytes", "read from storage", PURPLE),
        ("swapped_out_nbytes", "swapped out", GREY),
        ("swapped_in_nbytes", "swapped in", SKY),
    )
    moved = [(timeline[column], name, color) for column, name, color in named if any(timeline[column])]
    total = [Series(name, timeline["at_s"], [value / _MIB for value in values], color) for values, name, color in moved]
    if not total:
        return []
    return [
        lines("Bytes moved since the start", total, x=_SECONDS, y=Axis("MiB"), note="Finished copies, all devices.")
    ]


def _request_charts(sides: Sequence[tuple[Mapping[str, Any], str, str]]) -> list[Chart]:
    series = []
    for side, name, color in sides:
        timeline = side["timeline"]
        if timeline:
            series += [
                Series(f"running, {name}", timeline["at_s"], timeline["num_active"], color),
                Series(f"waiting, {name}", timeline["at_s"], timeline["num_waiting"], color, dash="dot", width=1.2),
            ]
    return [steps("Requests in the engine", series, x=_SECONDS, y=Axis("requests"))] if series else []


def _preempt_charts(report: Mapping[str, Any], named: Sequence[tuple[str, str, str]]) -> list[Chart]:
    rates, completions = [], []
    for key, name, color in named:
        rounds = report[key]["rounds"]
        rates.append(Series(name, [run["round"] for run in rounds], [run["tokens_per_s"] for run in rounds], color))
        values = [value for run in report["details"][key] for value in run["requests"]["completion_s"]]
        if values:
            completions.append(Series(name, values, (), color))
    numbers = sorted({number for one in rates for number in one.x})
    charts = [points("Generated tokens/s by round", rates, x=Axis("round", marks=numbers), y=Axis("tokens/s"))]
    if completions:
        title = "Completion time of all rounds"
        charts.append(distribution(title, completions, x=Axis("seconds from arrival to the last token")))
    return charts


def _swap_charts(last: Mapping[str, Any] | None) -> list[Chart]:
    timeline = last["timeline"] if last else {}
    if not any(timeline.get("swap_held_blocks", ())):
        return []
    held = Series("blocks in the pool", timeline["at_s"], timeline["swap_held_blocks"], BLUE)
    return [
        lines("Occupancy of the swap pool", [held], x=_SECONDS, y=Axis("blocks")),
        *_bytes_charts(timeline),
    ]
