"""`tpu-offload replay`: serves one workload without and with offloading, and says what that changed.

Both runs use the same weights, the same HBM size and the same order of conversations, after both
engines have compiled. HBM is made too small for the workload on purpose.
"""

import argparse
import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpu_offload.cli import preempt, soak, soak_setup
from tpu_offload.cli import report as report_lib
from tpu_offload.cli.console import ReportConsole, progress
from tpu_offload.cli.copy_rates import measure_copy_rates
from tpu_offload.cli.devices import check_backend, device_errors, environment
from tpu_offload.cli.flags import float_flag, int_flag
from tpu_offload.cli.output import check_writable, write_json
from tpu_offload.cli.replay_setup import (
    DEFAULT_NUM_CHAT_REQUESTS,
    DEFAULT_NUM_DECODE_REQUESTS,
    DEFAULT_NUM_TURNS,
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    serve_once,
)
from tpu_offload.cli.terminal import stop_on_interrupt
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
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--workload", choices=["chat", "decode"], help="generated requests (chat; with --preempt decode)"
    )
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines of chat messages")
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake format")
    add = parser.add_argument
    add("--preempt", action="store_true", help="compare swap with recompute under preemption, instead")
    add(
        "--soak",
        type=int_flag(1),
        metavar="SECONDS",
        help="serve again and again for so long while copies, messages and requests go wrong, instead",
    )
    add("--rounds", type=int_flag(1), metavar="N", help=f"--preempt: rounds ({preempt.DEFAULT_NUM_ROUNDS})")
    numbers = f"chat: {DEFAULT_NUM_CHAT_REQUESTS}, decode: {DEFAULT_NUM_DECODE_REQUESTS}"
    add("--requests", type=int_flag(1), metavar="N", help=f"requests at most ({numbers})")
    add("--seed", type=int_flag(0, 2**32 - 1), default=0, metavar="N", help="of everything that is drawn (0)")
    add("--turns", type=int_flag(1), metavar="N", help=f"chat: turns of a conversation ({DEFAULT_NUM_TURNS})")
    add("--max-tokens", type=int_flag(1), metavar="N", help="--prompts: tokens to generate a request (16)")
    add("--tokens-per-block", type=int_flag(1, 512), metavar="N", help="--trace: tokens for each 512 of the trace (16)")
    add(
        "--temperature",
        type=float_flag(0),
        default=0.0,
        metavar="T",
        help="sample, with a seed a request; 0 is greedy (0)",
    )
    add("--top-k", type=int_flag(0), default=0, metavar="K", help="sample from the K most likely tokens; 0 is all (0)")
    numbers = f"{_DEFAULT_CONCURRENCY}; with --preempt {preempt.DEFAULT_CONCURRENCY}"
    numbers += f", --soak {soak_setup.DEFAULT_CONCURRENCY}"
    add("--concurrency", type=int_flag(1), metavar="N", help=f"requests in flight ({numbers})")
    add(
        "--num-blocks",
        type=int_flag(1),
        metavar="N",
        help="HBM blocks (for --concurrency longest requests, at most half the workload; with --preempt for as many "
        "prompts)",
    )
    engine, model = EngineConfig(), ModelConfig()
    for name, allowed, text in (
        ("block_size", int_flag(1), "tokens in a block"),
        ("max_num_batched_tokens", int_flag(1), "tokens computed in a step"),
        ("num_spare_blocks", int_flag(0), "blocks kept free at admission for each request that runs"),
        ("async_scheduling", int_flag(0, 1), "1 dispatches a step before the tokens of the last one are read"),
    ):
        numbers = (
            f"{int(getattr(engine, name))}; with --preempt {preempt.ENGINE[name]}, --soak {soak_setup.ENGINE[name]}"
        )
        add(f"--{name.replace('_', '-')}", type=allowed, metavar="N", help=f"{text} ({numbers})")
    for name, text in (
        ("num_layers", "layers"),
        ("d_model", "width"),
        ("num_heads", "query heads"),
        ("num_kv_heads", "key and value heads"),
        ("head_dim", "width of a head"),
        ("d_ff", "width of the feed-forward layer"),
    ):
        sizes = getattr(preempt.MODEL, name), getattr(soak_setup.MODEL, name)
        numbers = f"{getattr(model, name)}; with --preempt {sizes[0]}, --soak {sizes[1]}"
        add(f"--{name.replace('_', '-')}", type=int_flag(1), metavar="N", help=f"model: {text} ({numbers})")
    add("--kv-dtype", default=model.kv_dtype, metavar="NAME", help=f"model: type of the KV cache ({model.kv_dtype})")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    if args.json is not None:
        check_writable(args.json)
    if args.rounds is not None and not args.preempt:
        raise InputError(f"--rounds {args.rounds} does nothing here: it goes with --preempt")
    if args.soak is not None and args.preempt:
        raise InputError(f"--soak {args.soak} and --preempt are two different things to do; give one of them")
    tell: Callable[[dict[str, Any]], int]
    defaults = (
        preempt.ENGINE if args.preempt else soak_setup.ENGINE if args.soak else dataclasses.asdict(EngineConfig())
    )
    for name in preempt.ENGINE:
        if getattr(args, name) is None:
            setattr(args, name, int(defaults[name]))
    offload = OffloadConfig.from_env()
    check_backend()
    if args.preempt:
        comparison = preempt.build_comparison(args, offload)
        compare = functools.partial(preempt.compare, comparison)
        tell = functools.partial(preempt.tell, comparison)
    elif args.soak:
        plan = soak_setup.build_soak(args, offload)
        compare = functools.partial(soak.soak, plan)
        tell = soak.tell
    else:
        setup = _build_setup(args, offload)
        compare = functools.partial(_serve_twice, setup)
        tell = functools.partial(_tell, setup)
    with stop_on_interrupt() as stop, device_errors(make_smaller="--num-blocks or the model"):
        report = compare(stop=stop)
        interrupted = stop()
    report |= {"interrupted": interrupted, "argv": argv, **environment()}
    if args.json is not None:
        write_json(args.json, report)
    return tell(report)


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
    differences, num_compared = report_lib.find_differences(baseline.records, offload.records)
    baseline_numbers = report_lib.run_numbers(baseline, block_size=block_size)
    offload_numbers = report_lib.run_numbers(offload, block_size=block_size)
    extra = report_lib.offload_numbers(stats or OffloadStats())
    if stats and offload.complete:
        extra["transfers"]["copy_rates"] = _copy_rates(setup)
    recomputed = baseline_numbers["prompt_tokens"]["recomputed"]
    loaded = offload_numbers["prompt_tokens"]["host"]
    return {
        **describe(setup),
        # Nothing compared is not the same as nothing different.
        "outputs_identical": not differences if num_compared else None,
        "num_compared": num_compared,
        "differences": [difference.as_dict() for difference in differences],
        "loaded_share_of_recomputed": loaded / recomputed if recomputed else None,
        "host_hits": report_lib.hit_ttfts(baseline, offload),
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
    console.print(report_lib.build_table(report))
    if not setup.offload.enabled:
        console.print("Offloading is off: a size in the TPU_OFFLOAD_* variables is zero.")
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        console.print(f"Loaded from the host: {share:.0%} of the prompt tokens that the baseline computed again.")
    same = f"every token of the {report['num_compared']} requests that both runs finished"
    return report_lib.tell_outcome(console, report, same=same)
