"""The page of `tpu-offload plan`, from its report."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from tpu_offload.cli.html.charts import (
    BLUE,
    GREEN,
    GREY,
    INK,
    PALETTE,
    RED,
    SKY,
    Axis,
    Chart,
    Series,
    lines,
    log_marks,
    short,
    stacked,
)
from tpu_offload.cli.html.page import Figure, Page, Section

_GB = 2**30


def plan_page(report: Mapping[str, Any], tables: Sequence[Table], advice: Sequence[str]) -> Page:
    """The page.

    Args:
      report: as in the JSON file.
      tables: those that the terminal shows.
      advice: what the figures mean, a sentence each.
    """
    where = f"{report['model']} on {report['machine']}"
    sections = [
        Section("HBM and host memory", charts=_memory_charts(report)),
        Section(
            "When a load is faster than computing",
            f"Prefill at {report['mfu'][0]:g} to {report['mfu'][1]:g} of the chips' peak. Above the band a load wins.",
            _break_even_charts(report),
        ),
        Section("The trace, simulated", charts=_hit_charts(report["hits"], report["host_tokens"])),
        Section("In numbers", " ".join(advice), tables=tables),
        Section("The command", code=report["command"] or ""),
    ]
    return Page(
        f"Plan: {where}",
        report["argv"],
        f"Machine: {report['sources']['machine']}",
        _figures(report),
        [] if report["fits"] else [f"{report['model']} does not fit on {report['machine']}: {report['why_not']}."],
        [section for section in sections if section.charts or section.tables or section.code],
    )


def _figures(report: Mapping[str, Any]) -> list[Figure]:
    if not report["fits"]:
        return [Figure("fits", "no")]
    blocks = f"{report['num_blocks']:,} blocks of {report['block_size']} tokens"
    found = [
        Figure("tokens in HBM", f"{report['hbm_kv_tokens']:,}", blocks),
        Figure("tokens in the host tier", f"{report['host_tokens']:,}", f"{report['host_gb']} GB on each host"),
        Figure("KV of a token", f"{report['kv_nbytes_per_token'] / 1024:,.0f} KiB", "over all devices"),
        Figure(
            "a load pays from",
            f"{short(report['break_even_gbps'])} GB/s",
            f"for a prefix of {report['break_even_prefix']:,} tokens",
        ),
    ]
    if hits := report["hits"]:
        found.append(
            Figure("found in the host tier", f"{hits['host']:.1%}", f"of prompt tokens; in HBM {hits['hbm']:.1%}")
        )
    return found


def _memory_charts(report: Mapping[str, Any]) -> list[Chart]:
    num = report["num_devices"]
    limit = report["hbm_nbytes"] / num
    weights, kv = report["weight_nbytes"] / num, report["hbm_kv_nbytes"] / num
    parts = [("weights", weights, BLUE), ("KV", kv, GREEN), ("other and reserve", max(0, limit - weights - kv), GREY)]
    series = [Series(name, ["HBM"], [nbytes / _GB], color) for name, nbytes, color in parts]
    x = Axis("")
    charts = [stacked("HBM of one device", series, x=x, y=Axis("GiB"), note=f"{limit / _GB:.2f} GiB in all.")]
    if not report["fits"]:
        return charts
    tokens = [
        Series("HBM", ["HBM"], [report["hbm_kv_tokens"]], GREEN),
        Series("host tier", ["host tier"], [report["host_tokens"]], BLUE),
    ]
    charts.append(stacked("Tokens that each tier holds", tokens, x=x, y=Axis("tokens")))
    return charts


def _break_even_charts(report: Mapping[str, Any]) -> list[Chart]:
    by_prefix = {int(end): rates for end, rates in report["break_even_gbps_by_prefix"].items()}
    prefixes = sorted(by_prefix)
    series = [
        Series("computing at the higher utilization", prefixes, [by_prefix[end][1] for end in prefixes], INK),
        Series("at the lower one", prefixes, [by_prefix[end][0] for end in prefixes], INK, dash="dot"),
    ]
    ends = [prefixes[0], prefixes[-1]]
    series += [
        Series(tier["tier"], ends, [tier["gbps"]] * 2, PALETTE[number % len(PALETTE)], dash="dash")
        for number, tier in enumerate(report["tiers"])
    ]
    values = [value for one in series for value in one.y if value is not None]
    x = Axis("tokens of the prefix", log=True, marks=prefixes)
    y = Axis("GB/s, all chips", log=True, marks=log_marks(values))
    note = "A tier whose line is above both black lines loads faster than the chips compute."
    return [lines("Bandwidth from which on a load pays", series, x=x, y=y, note=note, marks=True, tall=True)]


def _hit_charts(hits: Mapping[str, Any] | None, host_tokens: int) -> list[Chart]:
    if not hits:
        return []
    computed = 1 - hits["hbm"] - hits["host"]
    parts = (("hit in HBM", hits["hbm"], SKY), ("loaded", hits["host"], GREEN), ("computed", computed, RED))
    series = [Series(name, ["prompt tokens"], [100 * share], color) for name, share, color in parts]
    share_axis = Axis("of prompt tokens", suffix=" %")
    charts = [stacked("Where prompt tokens come from", series, x=Axis(""), y=share_axis)]
    by_size = {int(tokens): rate for tokens, rate in hits["host_by_tokens"].items()}
    sizes = sorted(by_size)
    if len(sizes) > 1:
        planned = min(host_tokens, sizes[-1])
        rates = [
            Series("host tier", sizes, [100 * by_size[size] for size in sizes], GREEN),
            Series("as planned", [planned], [100 * hits["host"]], BLUE),
            Series("without a limit", [sizes[0], sizes[-1]], [100 * hits["host_bound"]] * 2, INK, dash="dash"),
        ]
        x = Axis("tokens that the host tier holds", log=True, marks=log_marks(sizes))
        charts.append(lines("Hit rate by size of the host tier", rates, x=x, y=share_axis, marks=True))
    return charts
