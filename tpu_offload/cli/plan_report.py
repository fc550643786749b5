"""What `tpu-offload plan` prints and writes."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from tpu_offload.cli.tables import ReportConsole, build_table
from tpu_offload.plan import MFU_RANGE, Hits, Plan, TierRate, advice, serve_command

_GB = 2**30
_PREFIX = 8_192  # of the break-even in the report; the table has others


def as_json(plan: Plan, hits: Hits | None, *, decode_save: bool) -> dict[str, Any]:
    """The figures; sizes in bytes over all devices unless the name says otherwise."""
    prefix = min(plan.break_even, key=lambda end: abs(end - _PREFIX))
    rate = plan.break_even[prefix]
    caches = plan.caches
    return {
        "model": plan.model.name,
        "machine": plan.machine.name,
        "fits": caches is not None,
        "why_not": plan.why_not or None,
        "num_params": plan.model.params.total,
        "weight_nbytes": round(plan.weight_nbytes),
        "num_devices": plan.serving.num_devices,
        "num_hosts": plan.num_hosts,
        "attention_ranks": plan.serving.num_ranks,
        "hbm_nbytes": plan.hbm_limit_nbytes,
        "hbm_kv_nbytes": max(0, plan.kv_hbm_nbytes),
        "block_size": plan.serving.block_size,
        "block_nbytes": plan.block_nbytes,
        "num_blocks": caches.num_blocks if caches else 0,
        "num_states": caches.num_states if caches else 0,
        "hbm_kv_tokens": plan.hbm_kv_tokens,
        "max_model_len": plan.serving.max_tokens,
        "kv_nbytes_per_token": round(plan.token_nbytes),
        "window_nbytes": round(plan.window_nbytes),
        "state_nbytes": plan.state_nbytes,
        "kv_copies": plan.kv_copies,
        "groups": [
            {"window": group.window, "num_layers": group.num_layers, "num_groups": group.num_groups}
            for group in (caches.groups if caches else ())
        ],
        "copy_hbm_nbytes_per_device": plan.copy_hbm_nbytes,
        "staged_copy_hbm_nbytes_per_device": plan.staged_hbm_nbytes,
        "host_gb": plan.host_gb,
        "host_tokens": plan.host_tokens,
        "break_even_prefix": prefix,
        "break_even_gbps": (rate.low + rate.high) / 2e9,
        "break_even_gbps_by_prefix": {
            str(end): [found.low / 1e9, found.high / 1e9] for end, found in plan.break_even.items()
        },
        "mfu": list(MFU_RANGE),
        "tiers": [
            {"tier": tier.name, "gbps": tier.nbytes_per_s / 1e9, "least_tokens": list(tier.least_tokens)}
            for tier in plan.tiers
        ],
        "hits": None
        if hits is None
        else {"hbm": hits.hbm, "host": hits.host, "host_bound": hits.bound}
        | {"host_by_tokens": {str(tokens): rate for tokens, rate in hits.host_by_tokens.items()}}
        | {"num_requests": hits.num_requests, "prompt_tokens": hits.prompt_tokens, "saved_flops": hits.saved_flops},
        "command": serve_command(plan, decode_save=decode_save) if caches else None,
        "sources": {"machine": plan.machine.chip.source},
    }


def plan_tables(plan: Plan, hits: Hits | None) -> list[Table]:
    """The tables of a plan."""
    return [_sizes(plan), _rates(plan), *([_traffic(hits)] if hits is not None else [])]


def print_plan(plan: Plan, tables: Sequence[Table], report: dict[str, Any]) -> None:
    """Prints the plan."""
    console = ReportConsole()
    for table in tables:
        console.print(table)
    for line in advice(plan):
        console.print(f"- {line}", highlight=False, markup=False)
    if plan.caches is None:
        said = f"\n{plan.model.name} does not fit on {plan.machine.name}: {plan.why_not}."
        console.print(said, highlight=False, markup=False)
    else:
        console.print(f"\n{report['command']}", highlight=False, soft_wrap=True, markup=False)


def _sizes(plan: Plan) -> Table:
    serving, caches, model = plan.serving, plan.caches, plan.model
    num = serving.num_devices
    lines: list[Sequence[str] | None] = [
        ("parameters", f"{model.params.total / 1e9:,.1f}B, {model.params.active / 1e9:,.1f}B active"),
        ("weights, per device", f"{plan.weight_nbytes / num / _GB:,.1f} GiB ({model.weight_bits.name})"),
        ("HBM for KV, per device", f"{max(0, plan.kv_hbm_nbytes) / num / _GB:,.1f} GiB of {_per_device(plan)}"),
        None,
        ("one token", f"{plan.token_nbytes / 1024:,.0f} KiB"),
        ("one block", f"{serving.block_size} tokens, {plan.block_nbytes / 2**20:,.2f} MiB"),
    ]
    if plan.window_nbytes:
        lines.append(("windows before one boundary", f"{plan.window_nbytes / 2**20:,.1f} MiB"))
    if plan.state_nbytes:
        lines.append(("one state", f"{plan.state_nbytes / 1e6:,.0f} MB"))
    if caches is not None:
        tokens = f"{caches.num_tokens:,} tokens, {caches.num_blocks:,} blocks"
        lines.append(("HBM holds", tokens + (f", {caches.num_states:,} states" if caches.num_states else "")))
    hosts = f" on each of {plan.num_hosts} hosts" if plan.num_hosts > 1 else ""
    lines += [
        None,
        ("host tier", f"host_gb {plan.host_gb}{hosts}, {plan.host_tokens:,} tokens"),
        ("HBM of direct copies, per device", f"{plan.copy_hbm_nbytes / 2**20:,.1f} MiB"),
    ]
    if serving.num_ranks == 1:  # staged copies are refused with ranks
        lines.append(("of staged ones, 8,192 tokens", f"{plan.staged_hbm_nbytes / 2**20:,.0f} MiB"))
    ranks = f", {serving.num_ranks} attention ranks" if serving.num_ranks > 1 else ""
    title = (
        f"{escape(model.name)} on {plan.machine.name}: {num} devices{ranks}, contexts of {serving.max_tokens:,} tokens"
    )
    return build_table(title, ("", "over all devices unless it says otherwise"), lines, left_title=True)


def _per_device(plan: Plan) -> str:
    return f"{plan.hbm_limit_nbytes / plan.serving.num_devices / _GB:,.2f}"


def _rates(plan: Plan) -> Table:
    low, high = MFU_RANGE
    lines: list[Sequence[str] | None] = [
        (f"prefix of {end:,} tokens", f"from {rate.low / 1e9:,.2g} to {rate.high / 1e9:,.2g} GB/s")
        for end, rate in plan.break_even.items()
    ]
    lines.append(None)
    lines += [(f"{tier.name}, {tier.nbytes_per_s / 1e9:,.3g} GB/s", _pays(tier)) for tier in plan.tiers]
    title = f"Loading is faster than computing (prefill at {low:g} to {high:g} of the peak)"
    chips = "over all chips" if plan.serving.num_ranks == 1 else "all chips; tiers: those of a rank"
    return build_table(title, ("", chips), lines, left_title=True)


def _pays(tier: TierRate) -> str:
    said = ["never" if least is None else "any prefix" if least <= 1 else f"{least:,}" for least in tier.least_tokens]
    text = said[0] if len(set(said)) == 1 else " to ".join(said)
    return text if text in ("never", "any prefix") else f"prefixes from {text} tokens"


def _traffic(hits: Hits) -> Table:
    lines: list[Sequence[str] | None] = [
        ("prompt tokens", f"{hits.prompt_tokens:,} of {hits.num_requests:,} requests"),
        ("found in HBM", f"{hits.hbm:.1%}"),
        ("found in the host tier", f"{hits.host:.1%} (unlimited host tier: {hits.bound:.1%})"),
        ("prefill FLOPs saved by the host tier", f"{hits.saved_flops:.1%}"),
    ]
    return build_table("The trace, simulated", ("", "share"), lines, left_title=True)
