"""`tpu-offload replay`: serves one workload without and with offloading, and says what that changed.

Both runs use the same weights, the same HBM size and the same order of conversations, after both
engines have compiled. HBM is made too small for the workload on purpose.
"""

import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

from tpu_offload.cli import preempt, replay_report
from tpu_offload.cli.console import ReportConsole, progress
from tpu_offload.cli.copy_rates import measure_copy_rates
from tpu_offload.cli.devices import check_backend
from tpu_offload.cli.flags import int_flag
from tpu_offload.cli.output import check_writable
from tpu_offload.cli.replay_flags import ENGINE_FLAGS, MODEL_FLAGS, add_serving_flags
from tpu_offload.cli.replay_setup import (
    DEFAULT_NUM_CHAT_REQUESTS,
    DEFAULT_NUM_DECODE_REQUESTS,
    DEFAULT_NUM_TURNS,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    make_report,
    serve_once,
)
from tpu_offload.cli.report import tell_outcome
from tpu_offload.cli.transfer_methods import Geometry
from tpu_offload.config import OffloadConfig
from tpu_offload.engine import EngineConfig, ModelConfig
from tpu_offload.errors import InputError, TransferError
from tpu_offload.metrics import OffloadStats

_logger = logging.getLogger(__name__)

_DEFAULT_CONCURRENCY = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tpu-offload replay`, and the function that runs it, to its parser."""
    parser.description = (
        "Serves a workload twice, without and with offloading, under an HBM too small for it. The "
        "TPU_OFFLOAD_* variables apply. Exit status 1 when any output token differs."
    )
    parser.add_argument("--preempt", action="store_true", help="compare swap with recompute under preemption, instead")
    parser.add_argument(
        "--rounds", type=int_flag(1), metavar="N", help=f"--preempt: rounds ({preempt.DEFAULT_NUM_ROUNDS})"
    )
    own = dataclasses.asdict(EngineConfig()) | dataclasses.asdict(ModelConfig())
    of_preempt = preempt.ENGINE | dataclasses.asdict(preempt.MODEL)
    sizes = {name: f"{int(own[name])}; with --preempt {of_preempt[name]}" for name in (*ENGINE_FLAGS, *MODEL_FLAGS)}
    add_serving_flags(
        parser,
        defaults=sizes
        | {
            "workload": "chat; with --preempt decode",
            "requests": f"chat: {DEFAULT_NUM_CHAT_REQUESTS}, decode: {DEFAULT_NUM_DECODE_REQUESTS}",
            "turns": str(DEFAULT_NUM_TURNS),
            "concurrency": f"{_DEFAULT_CONCURRENCY}; with --preempt {preempt.DEFAULT_CONCURRENCY}",
            "num_blocks": "for --concurrency longest requests, at most half the workload; with --preempt for as many "
            "prompts",
        },
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    if args.json is not None:
        check_writable(args.json)
    if args.rounds is not None and not args.preempt:
        raise InputError(f"--rounds {args.rounds} does nothing here: it goes with --preempt")
    defaults = preempt.ENGINE if args.preempt else dataclasses.asdict(EngineConfig())
    for name in ENGINE_FLAGS:
        if getattr(args, name) is None:
            setattr(args, name, int(defaults[name]))
    offload = OffloadConfig.from_env()
    check_backend()
    compare: Callable[..., dict[str, Any]]
    tell: Callable[[dict[str, Any]], int]
    if args.preempt:
        comparison = preempt.build_comparison(args, offload)
        compare = functools.partial(preempt.compare, comparison)
        tell = functools.partial(preempt.tell, comparison)
    else:
        setup = _build_setup(args, offload)
        compare = functools.partial(_serve_twice, setup)
        tell = functools.partial(_tell, setup)
    return tell(make_report(compare, args.json, argv))


def _build_setup(args: argparse.Namespace, offload: OffloadConfig) -> Setup:
    workload = build_workload(args, ModelConfig())
    concurrency = args.concurrency or _DEFAULT_CONCURRENCY
    needed = blocks_per_request(workload, args.block_size)
    num_unique_blocks = workload.num_unique_blocks(args.block_size)
    # Enough for every request in flight, and too small for the workload; the second if not both can be.
    num_blocks = args.num_blocks or max(needed, min(needed * concurrency, num_unique_blocks // 2))
    setup = build_setup(
        args, offload, workload=workload, model=ModelConfig(), concurrency=concurrency, num_blocks=num_blocks
    )
    if num_blocks >= num_unique_blocks:
        _logger.warning(
            "HBM of %d blocks holds all %d blocks of the workload, so offloading has nothing to do",
            num_blocks,
            num_unique_blocks,
        )
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        # The default of 1024 chunks suits no workload in particular; a replay knows what it needs.
        offload = offload.model_copy(update={"num_cpu_chunks": -(-num_unique_blocks // offload.blocks_per_chunk)})
    return dataclasses.replace(setup, offload=offload)


def _serve_twice(setup: Setup, *, stop: Callable[[], bool]) -> dict[str, Any]:
    block_size = setup.engine.block_size
    with progress(setup.workload.num_requests) as on_finish:
        baseline, _ = serve_once(setup, None, on_finish=on_finish("baseline"), stop=stop)
        offload, stats = serve_once(setup, setup.offload, on_finish=on_finish("offload"), stop=stop)
    differences, num_compared = replay_report.find_differences(baseline.records, offload.records)
    baseline_numbers = replay_report.run_numbers(baseline, block_size=block_size)
    offload_numbers = replay_report.run_numbers(offload, block_size=block_size)
    extra = replay_report.offload_numbers(stats or OffloadStats())
    if stats and offload.complete:
        extra["transfers"]["copy_rates"] = _copy_rates(setup)
    recomputed = baseline_numbers["prompt_tokens"]["recomputed"]
    loaded = offload_numbers["prompt_tokens"]["host"]
    return {
        **describe(setup),
        **replay_report.outcome([difference.as_dict() for difference in differences], num_compared),
        "loaded_share_of_recomputed": loaded / recomputed if recomputed else None,
        "host_hits": replay_report.hit_ttfts(baseline, offload),
        "baseline": baseline_numbers,
        "offload": offload_numbers | extra,
    }


def _copy_rates(setup: Setup) -> dict[str, Any] | None:
    model = setup.model
    geometry = Geometry(model.num_layers, model.page_shape(setup.engine.block_size), model.kv_dtype)
    try:
        return dataclasses.asdict(measure_copy_rates(setup.offload, geometry))
    except (InputError, TransferError) as e:
        _logger.warning("the copies were not measured alone: %s", e)
        return None


def _tell(setup: Setup, report: dict[str, Any]) -> int:
    """Prints the table and what it means; returns the exit status."""
    console = ReportConsole()
    console.print(replay_report.comparison_table(report))
    if not setup.offload.enabled:
        console.print("Offloading is off: a size in the TPU_OFFLOAD_* variables is zero.")
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        console.print(f"Loaded from the host: {share:.0%} of the prompt tokens that the baseline computed again.")
    same = f"every token of the {report['num_compared']} requests that both runs finished"
    return tell_outcome(console, report, same=same)
