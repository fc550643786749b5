"""`tpu-offload replay`: serves one workload without and with offloading, and compares outputs and times.

With `--preempt` it compares request swap with recompute of preempted requests. With `--restart` it serves with
offloading twice, by two engines with one storage tier.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from tpu_offload.cli.files import check_outputs, write_file
from tpu_offload.cli.html.flag import check_html, html_flag
from tpu_offload.cli.html.replay import replay_page, swap_page
from tpu_offload.cli.options import Command, number
from tpu_offload.cli.serving import ENGINE_FLAGS, MODEL_FLAGS, SOURCES, make_report, serving_flags, serving_options
from tpu_offload.cli.tables import ReportConsole, Row, at_path, build_table, format_number, print_outcome, progress
from tpu_offload.config import LoadMode, OffloadConfig
from tpu_offload.engine import EngineConfig, ModelConfig
from tpu_offload.errors import InputError
from tpu_offload.measure import check_backend
from tpu_offload.replay import comparison, preempt, restart, setup

_DEFAULT_NUM_DEVICES = 4
_MAX_PROCESSES = 64
_SIZES = dataclasses.asdict(EngineConfig()) | dataclasses.asdict(ModelConfig())
_PREEMPT_SIZES = preempt.ENGINE | dataclasses.asdict(preempt.MODEL)
_DEFAULTS = {
    "workload": "chat; with --preempt decode",
    "requests": f"chat: {setup.DEFAULT_NUM_CHAT_REQUESTS}, decode: {setup.DEFAULT_NUM_DECODE_REQUESTS}",
    "turns": setup.DEFAULT_NUM_TURNS,
    "concurrency": f"{comparison.DEFAULT_CONCURRENCY}; with --preempt {preempt.DEFAULT_CONCURRENCY}",
    "num_blocks": "for --concurrency longest requests, at most half the workload; with --preempt for that many prompts",
    **{name: f"{int(_SIZES[name])}; with --preempt {_PREEMPT_SIZES[name]}" for name in (*ENGINE_FLAGS, *MODEL_FLAGS)},
}


@click.command(cls=Command, exclusive=[SOURCES])
@click.option("--preempt", "is_preempt", is_flag=True, help="compare swap with recompute under preemption instead")
@click.option(
    "--restart",
    "restarts",
    is_flag=True,
    help="serve with offloading, stop, and serve again from storage (TPU_OFFLOAD_LOAD_MODE=load unless it is set)",
)
@number("--rounds", f"--preempt: rounds ({preempt.DEFAULT_NUM_ROUNDS})")
@number("--processes", "processes that share the model, on the CPU (1)", high=_MAX_PROCESSES, default=1)
@number("--devices", f"--processes: devices of each ({_DEFAULT_NUM_DEVICES})", high=_MAX_PROCESSES)
@serving_flags(_DEFAULTS)
@html_flag()
@click.pass_obj
def command(
    argv: list[str],
    /,
    *,
    is_preempt: bool,
    restarts: bool,
    rounds: int | None,
    processes: int,
    devices: int | None,
    json: Path | None,
    html: Path | None,
    **flags: Any,
) -> int:
    """Serves a workload twice, without and with offloading, in an HBM too small for it. The TPU_OFFLOAD_* variables
    apply. Exit status 1 if any output token differs.
    """
    if rounds is not None and not is_preempt:
        raise InputError(f"--rounds {rounds} requires --preempt")
    if processes > 1 and is_preempt:
        raise InputError(f"--processes {processes} with --preempt; expected one of them")
    if devices is not None and processes == 1:
        raise InputError(f"--devices {devices} requires --processes of at least 2")
    if restarts and is_preempt:
        raise InputError("--restart with --preempt; expected one of them")
    check_outputs(_inputs(flags), json=json, html=html)
    check_html(html)
    offload = OffloadConfig.from_env()
    if restarts and not offload.has_storage:
        raise InputError("--restart without a storage tier; set TPU_OFFLOAD_STORAGE_TIER, such as file, and its size")
    if restarts and offload.load_mode is None:  # so small a model often computes KV faster than storage has it
        offload = offload.model_copy(update={"load_mode": LoadMode.LOAD})
    check_backend()
    if is_preempt:
        options = serving_options(flags, engine=preempt.ENGINE, model=preempt.MODEL)
        rounds = rounds or preempt.DEFAULT_NUM_ROUNDS
        compared = preempt.build_comparison(options, offload, num_rounds=rounds)
        return _print_preempt_report(_report(preempt.compare, compared, compared.constrained, json, argv), html)
    num_devices = processes * (devices or _DEFAULT_NUM_DEVICES) if processes > 1 else 1
    options = serving_options(flags, engine=_SIZES, model=_model_for(num_devices))
    sized = comparison.size_setup(options, offload)
    compare = restart.serve_and_restart if restarts else comparison.serve_twice
    if processes == 1:
        return _print_report(sized, _report(compare, sized, sized, json, argv), html)
    with setup.start_hosts(sized.model, num_hosts=processes, num_devices=num_devices // processes) as hosts:
        on_hosts = functools.partial(compare, hosts=hosts)
        return _print_report(sized, _report(on_hosts, sized, sized, json, argv), html)


def _inputs(flags: Mapping[str, Any]) -> dict[str, Path]:
    """The files that are read, by what a message calls them."""
    return {f"the file of --{name}": flags[name] for name in ("prompts", "trace") if flags[name] is not None}


def _model_for(num_devices: int) -> ModelConfig:
    """The default model, with key and value heads for each device."""
    model = ModelConfig()
    num_kv_heads = math.lcm(model.num_kv_heads, num_devices)
    return dataclasses.replace(model, num_kv_heads=num_kv_heads, num_heads=math.lcm(model.num_heads, num_kv_heads))


def _report(
    compare: Callable[..., dict[str, Any]], what: object, sized: setup.Setup, json: Path | None, argv: list[str]
) -> dict[str, Any]:
    """Compares, with a progress bar for each run."""
    with progress(sized.workload.num_requests) as start:
        return make_report(functools.partial(compare, what, start=start), json, argv)


def _print_report(sized: setup.Setup, report: dict[str, Any], html: Path | None) -> int:
    """Prints the table and the findings, and writes the page; returns the exit status."""
    console = ReportConsole()
    table = comparison_table(report)
    console.print(table)
    if not sized.offload.enabled:
        console.print("Offloading is off: a size in the TPU_OFFLOAD_* variables is zero.")
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        console.print(f"Loaded from the host: {share:.0%} of the prompt tokens that the baseline recomputed.")
    if again := report.get("restart"):
        asked, found = again["stored_tokens_asked_again"], again["found_tokens"]
        share = f" ({found / asked:.1%})" if asked else ""
        console.print(
            f"Found after the restart: {found} of {asked} tokens that were stored and asked for again{share}."
        )
    same = f"every token of the {report['num_compared']} requests that both runs finished"
    status = print_outcome(console, report, same=same)
    if html is not None:
        write_file(html, replay_page(report, table).render())
    return status


def _print_preempt_report(report: dict[str, Any], html: Path | None) -> int:
    """Prints the table and the findings, and writes the page; returns the exit status."""
    console = ReportConsole()
    table, findings = swap_table(report), swap_findings(report)
    console.print(table)
    for note in (*report["notes"], *findings):
        console.print(note)
    same = (
        f"every token and log-probability of {report['num_compared']} requests in {report['num_runs_compared']} runs "
        "equals that of the reference run without preemption"
    )
    status = print_outcome(console, report, same=same)
    if html is not None:
        write_file(html, swap_page(report, table, findings).render())
    return status


def comparison_table(report: Mapping[str, Any]) -> Table:
    """The table of a run without offloading and a run with it."""
    hits = report["host_hits"]
    sides = [report[name] | {"hit_ttft_p50_s": hits[f"{name}_ttft_p50_s"]} for name in ("baseline", "offload")]

    def quotient(row: Row) -> str:
        if row.only_last or not isinstance(row.value, str) or row.value in ("num_requests", "num_preemptions"):
            return ""
        one, other = (at_path(side, row.value) for side in sides)
        return f"{other / one:.2f}" if one and other is not None else ""

    return build_table(
        f"{report['workload']['name']}: {report['workload']['num_requests']} requests",
        ("", "baseline", "offload", "offload / baseline"),
        ((*row.cells(sides), quotient(row)) if row else None for row in _offload_rows(report)),
    )


def _offload_rows(report: Mapping[str, Any]) -> Iterable[Row | None]:
    yield Row("requests finished", "num_requests")
    yield Row("prompt tokens computed", "prompt_tokens.computed")
    yield Row("  of these, recomputed", "prompt_tokens.recomputed")
    yield Row("prompt tokens hit in HBM", "prompt_tokens.hbm")
    yield Row("prompt tokens loaded from host", "prompt_tokens.host")
    yield Row("time to first token, p50", "ttft_p50_s", "s")
    yield Row("time to first token, p99", "ttft_p99_s", "s")
    if num_hits := report["host_hits"]["num_requests"]:
        yield Row(f"  p50 of {num_hits} with a host hit", "hit_ttft_p50_s", "s")
    yield Row("generated tokens/s", "tokens_per_s", "rate")
    yield Row("all tokens/s", "total_tokens_per_s", "rate")
    yield Row("preemptions", "num_preemptions")
    yield None
    only = functools.partial(Row, unit="id", only_last=True)
    yield only("staging peak of budget, blocks", ("staging.peak_blocks", "staging.budget_blocks"), between=" of ")
    yield only("dropped blocks, save + load", ("staging.dropped_save_blocks", "staging.dropped_load_blocks"))
    yield only("saved, MiB", "transfers.saved_nbytes", unit="MiB")
    yield only("loaded, MiB", "transfers.loaded_nbytes", unit="MiB")
    if rates := report["offload"]["transfers"].get("copy_rates"):
        label = f"GB/s of {rates['num_blocks']} blocks alone, save + load"
        yield only(label, lambda _: f"{rates['save_gb_per_s']:.2f} + {rates['load_gb_per_s']:.2f}")
    yield only("host chunks resident, evicted", ("host.num_resident_chunks", "host.num_evicted_chunks"), between=", ")
    swap = report["offload"]["swap"]
    if swap["swap_pool_blocks"]:
        text = f"{swap['num_swapped_out']}, {swap['num_recomputed'] + swap['num_lost_swaps']}"
        yield only("preempted requests swapped out, recomputed", lambda _: text)


def swap_table(report: Mapping[str, Any]) -> Table:
    """The table of `--preempt`: recompute and swap."""
    workload, engine = report["workload"], report["engine"]
    sides = [report[name]["median"] | {"range": report[name]["tokens_per_s_range"]} for name in ("recompute", "swap")]

    def ratio(row: Row) -> str:
        name = row.value if isinstance(row.value, str) else None
        return _ratio_text(report["swap_to_recompute"].get(name))

    rows = _ROWS + (_SWAP_ROWS if "swap" in sides[1] else ())
    return build_table(
        f"{workload['name']}: {workload['num_requests']} requests, {workload['concurrency']} in flight, HBM of "
        f"{engine['num_blocks']} blocks; median of {report['num_rounds']} rounds",
        ("", "recompute", "swap", "swap / recompute"),
        ((*row.cells(sides), ratio(row)) if row else None for row in rows),
    )


def swap_findings(report: Mapping[str, Any]) -> list[str]:
    """The sentences after the table of `--preempt`."""
    control = report["control"]
    found = []
    if report["recompute"]["median"].get("num_preemptions") == 0:
        found.append("No request was preempted: HBM holds all requests in flight; lower --num-blocks.")
    ratio = control["on_to_off"]["tokens_per_s"]
    if ratio is not None:
        found.append(
            f"With HBM for all ({control['num_blocks']} blocks), tokens/s with swap on / off: {_ratio_text(ratio)}."
        )
    num_preemptions = sum(run["num_preemptions"] for name in ("off", "on") for run in control[name]["rounds"])
    if num_preemptions:
        found.append(f"Not a valid control: its runs had {num_preemptions} preemptions.")
    return found


def _preempted_text(side: Mapping[str, Any]) -> str:
    if side.get("preempted_share") is None:
        return "-"
    return f"{side['num_preempted_requests']} ({side['preempted_share']:.0%})"


def _range_text(side: Mapping[str, Any]) -> str:
    return "-" if side["range"] is None else " to ".join(format_number(rate, "rate") for rate in side["range"])


def _ratio_text(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"


_ROWS: tuple[Row | None, ...] = (
    Row("requests finished", "num_requests"),
    Row("requests preempted", _preempted_text),
    Row("preemptions", "num_preemptions"),
    Row("swapped out", "swap.num_swapped_out", only_last=True),
    Row("  thrashed", "swap.num_thrashed_swaps", only_last=True),
    Row("recomputed", "swap.num_recomputed"),
    Row("  predicted to be faster", "swap.num_recomputed_faster", only_last=True),
    Row("  no room in the swap pool", "swap.num_recomputed_no_room", only_last=True),
    Row("  swapped out and lost", "swap.num_lost_swaps", only_last=True),
    Row("prompt tokens recomputed", "prompt_tokens.computed_again"),
    None,
    Row("generated tokens/s", "tokens_per_s", "rate"),
    Row("  min to max", _range_text),
    Row("completion time, p50", "completion_p50_s", "s"),
    Row("completion time, p99", "completion_p99_s", "s"),
    Row("time to first token, p50", "ttft_p50_s", "s"),
    None,
)
# Copies, and the measured rates that decide between swap and recompute.
_SWAP_ROWS = (
    Row("copied out + in, MiB", ("swap.swapped_out_nbytes", "swap.swapped_in_nbytes"), "MiB", only_last=True),
    Row("blocks that needed no copy", "swap.swap_skipped_blocks", only_last=True),
    Row("swap pool, peak of blocks", ("swap.swap_peak_blocks", "swap.swap_pool_blocks"), "id", " of ", only_last=True),
    Row("GB/s measured, out + in", ("swap.swap_out_nbytes_per_s", "swap.swap_in_nbytes_per_s"), "GB/s", only_last=True),
    Row("prompt tokens/s measured", "swap.prefill_tokens_per_s", "whole", only_last=True),
)
