"""`tpu-offload replay`: serves one workload without and with offloading, and says what that changed.

Both runs use the same weights, the same HBM size and the same order of conversations, after both
engines have compiled. HBM is made too small for the workload on purpose.
"""

import argparse
import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tpu_offload.cli import report as report_lib
from tpu_offload.cli.copy_rates import measure_copy_rates
from tpu_offload.cli.devices import check_backend, device_errors
from tpu_offload.cli.flags import float_flag, int_flag
from tpu_offload.cli.serving import ServedRun, serve
from tpu_offload.cli.terminal import ReportConsole, progress, stop_on_interrupt
from tpu_offload.cli.transfer_methods import Geometry
from tpu_offload.cli.workloads import NUM_TOKENS, Workload, chat_workload, prompts_workload, trace_workload
from tpu_offload.config import CopyPath, OffloadConfig
from tpu_offload.engine import Engine, EngineConfig, ModelConfig, SamplingParams
from tpu_offload.errors import InputError, TransferError
from tpu_offload.layout import KVLayout, LayerGroup, LayerGroupKind
from tpu_offload.memory import available_nbytes
from tpu_offload.metrics import OffloadStats
from tpu_offload.profile import Profile

_logger = logging.getLogger(__name__)

_DEFAULT_NUM_CHAT_REQUESTS = 160
_DEFAULT_NUM_TURNS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class _Setup:
    """Everything that a run is made from."""

    workload: Workload
    model: ModelConfig
    engine: EngineConfig
    offload: OffloadConfig
    concurrency: int
    sampling: Callable[[str, int], SamplingParams]


def add_command(commands: Any) -> None:
    """Adds `replay` to the subcommands of `tpu-offload`."""
    parser = commands.add_parser(
        "replay",
        help="serve a workload without and with offloading",
        description="Serves a workload twice, without and with offloading, under an HBM too small for it. The "
        "TPU_OFFLOAD_* variables apply. Exit status 1 when any output token differs.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", choices=["chat"], help="generated conversations (default)")
    source.add_argument("--prompts", type=Path, metavar="FILE", help="JSON lines of chat messages")
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in the Mooncake format")
    add = parser.add_argument
    add("--requests", type=int_flag(1), metavar="N", help=f"requests at most (chat: {_DEFAULT_NUM_CHAT_REQUESTS})")
    add("--seed", type=int_flag(0, 2**32 - 1), default=0, metavar="N", help="of everything that is drawn (0)")
    add("--turns", type=int_flag(1), metavar="N", help=f"chat: turns of a conversation ({_DEFAULT_NUM_TURNS})")
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
    add("--concurrency", type=int_flag(1), default=3, metavar="N", help="requests in flight (3)")
    add(
        "--num-blocks",
        type=int_flag(1),
        metavar="N",
        help="HBM blocks (for --concurrency longest requests, at most half the workload)",
    )
    engine, model = EngineConfig(), ModelConfig()
    for flag, default, text in (
        ("--block-size", engine.block_size, "tokens in a block"),
        ("--max-num-batched-tokens", engine.max_num_batched_tokens, "tokens computed in a step"),
        ("--num-layers", model.num_layers, "model: layers"),
        ("--d-model", model.d_model, "model: width"),
        ("--num-heads", model.num_heads, "model: query heads"),
        ("--num-kv-heads", model.num_kv_heads, "model: key and value heads"),
        ("--head-dim", model.head_dim, "model: width of a head"),
        ("--d-ff", model.d_ff, "model: width of the feed-forward layer"),
    ):
        add(flag, type=int_flag(1), default=default, metavar="N", help=f"{text} ({default})")
    add("--kv-dtype", default=model.kv_dtype, metavar="NAME", help=f"model: type of the KV cache ({model.kv_dtype})")
    add("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, argv: list[str]) -> int:
    if args.json is not None:
        report_lib.check_writable(args.json)
    offload = OffloadConfig.from_env()
    check_backend()
    setup = _build_setup(args, offload)
    with stop_on_interrupt() as stop, device_errors(make_smaller="--num-blocks or the model"):
        report = _serve_twice(setup, stop=stop)
        interrupted = stop()
    report |= {"interrupted": interrupted, "argv": argv, **report_lib.environment()}
    if args.json is not None:
        report_lib.write_json(args.json, report)
    return _tell(report, setup)


def _build_setup(args: argparse.Namespace, offload: OffloadConfig) -> _Setup:
    workload = _build_workload(args)
    longest = workload.longest_request
    blocks_per_request = -(-longest // args.block_size)
    num_unique_blocks = workload.num_unique_blocks(args.block_size)
    # Enough for every request in flight, and too small for the workload; the second if not both can be.
    num_blocks = args.num_blocks or max(
        blocks_per_request, min(blocks_per_request * args.concurrency, num_unique_blocks // 2)
    )
    if num_blocks < blocks_per_request:
        raise InputError(
            f"--num-blocks {num_blocks} holds {num_blocks * args.block_size} tokens and the longest request of "
            f"{workload.name} has {longest}; set it to at least {blocks_per_request}"
        )
    model = ModelConfig(
        num_layers=args.num_layers,
        d_model=args.d_model,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        head_dim=args.head_dim,
        d_ff=args.d_ff,
        kv_dtype=args.kv_dtype,
        seed=args.seed,
    )
    assert model.vocab_size >= NUM_TOKENS
    engine = EngineConfig(
        block_size=args.block_size,
        num_blocks=num_blocks,
        max_num_seqs=args.concurrency,
        max_model_len=longest,
        max_num_batched_tokens=args.max_num_batched_tokens,
    )
    _check_memory(model, engine)
    layout = _layout(model, engine)
    for size in (offload.staging_blocks, offload.host_chunks):
        size(layout)  # a wrong size is an error now, not after the baseline
    if offload.enabled and offload.profile and CopyPath.AUTO in (offload.save_path, offload.load_path):
        Profile.read(offload.profile).check_device(jax.devices()[0].device_kind)  # likewise
    if num_blocks >= num_unique_blocks:
        _logger.warning(
            "HBM of %d blocks holds all %d blocks of the workload, so offloading has nothing to do",
            num_blocks,
            num_unique_blocks,
        )
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        # The default of 1024 chunks suits no workload in particular; a replay knows what it needs.
        offload = offload.model_copy(update={"num_cpu_chunks": -(-num_unique_blocks // offload.blocks_per_chunk)})

    def sampling(request_id: str, max_tokens: int) -> SamplingParams:
        seed = int.from_bytes(request_id.encode(), "big") * 2654435761 + args.seed
        return SamplingParams(max_tokens=max_tokens, temperature=args.temperature, top_k=args.top_k, seed=seed % 2**32)

    return _Setup(workload, model, engine, offload, args.concurrency, sampling)


def _build_workload(args: argparse.Namespace) -> Workload:
    for flag, value, source in (
        ("--turns", args.turns, args.prompts is None and args.trace is None),
        ("--max-tokens", args.max_tokens, args.prompts),
        ("--tokens-per-block", args.tokens_per_block, args.trace),
    ):
        if value is not None and not source:
            wanted = {"--turns": "--workload chat", "--max-tokens": "--prompts", "--tokens-per-block": "--trace"}[flag]
            raise InputError(f"{flag} {value} does nothing here: it goes with {wanted}")
    if args.prompts is not None:
        return prompts_workload(args.prompts, num_requests=args.requests, max_tokens=args.max_tokens or 16)
    if args.trace is not None:
        return trace_workload(
            args.trace, num_requests=args.requests, tokens_per_block=args.tokens_per_block or 16, seed=args.seed
        )
    return chat_workload(
        num_requests=args.requests or _DEFAULT_NUM_CHAT_REQUESTS, turns=args.turns or _DEFAULT_NUM_TURNS, seed=args.seed
    )


def _layout(model: ModelConfig, engine: EngineConfig) -> KVLayout:
    """The layout that the engine's caches will have."""
    pages = model.page_shape(engine.block_size)
    group = LayerGroup(LayerGroupKind.FULL_ATTENTION, tuple(range(model.num_layers)), pages, model.kv_dtype)
    return KVLayout(engine.block_size, (group,), model=model.name)


def _check_memory(model: ModelConfig, engine: EngineConfig) -> None:
    """Refuses on a CPU what the kernel would otherwise kill the process for."""
    if jax.default_backend() != "cpu":
        return
    page_nbytes = math.prod(model.page_shape(engine.block_size)) * 4 // model.kv_packing
    kv_nbytes = engine.num_blocks * model.num_layers * page_nbytes
    layer = 2 * model.d_model * (model.num_heads + model.num_kv_heads) * model.head_dim + 3 * model.d_model * model.d_ff
    weight_nbytes = 4 * (model.num_layers * layer + 2 * model.vocab_size * model.d_model)
    activation_nbytes = 4 * engine.max_num_batched_tokens * (model.d_model + 2 * model.d_ff)
    free_nbytes = available_nbytes()
    needed_nbytes = kv_nbytes + weight_nbytes + activation_nbytes
    if needed_nbytes > free_nbytes:
        raise InputError(
            f"{engine.num_blocks} blocks of KV cache, the weights and a step take {needed_nbytes / 2**30:.1f} GB and "
            f"{free_nbytes / 2**30:.1f} GB of memory are free; make --num-blocks, --max-num-batched-tokens or the "
            "model smaller"
        )


def _serve_twice(setup: _Setup, *, stop: Callable[[], bool]) -> dict[str, Any]:
    block_size = setup.engine.block_size
    with progress(setup.workload.num_requests) as on_finish:
        baseline, _ = _serve_once(setup, None, on_finish=on_finish("baseline"), stop=stop)
        offload, stats = _serve_once(setup, setup.offload, on_finish=on_finish("offload"), stop=stop)
    differences, num_compared = report_lib.find_differences(baseline.records, offload.records)
    baseline_numbers = report_lib.run_numbers(baseline, block_size=block_size)
    offload_numbers = report_lib.run_numbers(offload, block_size=block_size)
    extra = report_lib.offload_numbers(stats or OffloadStats())
    if stats and offload.complete:
        extra["transfers"]["copy_rates"] = _copy_rates(setup)
    recomputed = baseline_numbers["prompt_tokens"]["recomputed"]
    loaded = offload_numbers["prompt_tokens"]["host"]
    return {
        "workload": {
            "name": setup.workload.name,
            "num_requests": setup.workload.num_requests,
            "num_conversations": len(setup.workload.conversations),
            "longest_request_tokens": setup.workload.longest_request,
            "num_unique_blocks": setup.workload.num_unique_blocks(block_size),
            "concurrency": setup.concurrency,
        },
        "model": dataclasses.asdict(setup.model),
        "engine": dataclasses.asdict(setup.engine),
        "config": setup.offload.model_dump(mode="json", exclude_none=True),
        # Nothing compared is not the same as nothing different.
        "outputs_identical": not differences if num_compared else None,
        "num_compared": num_compared,
        "differences": [dataclasses.asdict(difference) | {"text": str(difference)} for difference in differences],
        "loaded_share_of_recomputed": loaded / recomputed if recomputed else None,
        "host_hits": report_lib.hit_ttfts(baseline, offload),
        "baseline": baseline_numbers,
        "offload": offload_numbers | extra,
    }


def _copy_rates(setup: _Setup) -> dict[str, Any] | None:
    model = setup.model
    geometry = Geometry(model.num_layers, model.page_shape(setup.engine.block_size), model.kv_dtype)
    try:
        return dataclasses.asdict(measure_copy_rates(setup.offload, geometry))
    except (InputError, TransferError) as e:
        _logger.warning("the copies were not measured alone: %s", e)
        return None


def _serve_once(
    setup: _Setup, offload: OffloadConfig | None, *, on_finish: Callable[[], None], stop: Callable[[], bool]
) -> tuple[ServedRun, OffloadStats | None]:
    if stop():
        return ServedRun((), 0.0, complete=False), None
    with contextlib.closing(Engine(setup.model, setup.engine, offload=offload, clock=time.perf_counter)) as engine:
        engine.warm_up()
        run = serve(
            engine,
            setup.workload,
            concurrency=setup.concurrency,
            sampling=setup.sampling,
            on_finish=on_finish,
            stop=stop,
        )
        return run, engine.offload_stats()


def _tell(report: dict[str, Any], setup: _Setup) -> int:
    """Prints the table and what it means; returns the exit status."""
    console = ReportConsole()
    console.print(report_lib.build_table(report))
    if not setup.offload.enabled:
        console.print("Offloading is off: a size in the TPU_OFFLOAD_* variables is zero.")
    if report["loaded_share_of_recomputed"] is not None:
        share = report["loaded_share_of_recomputed"]
        console.print(f"Loaded from the host: {share:.0%} of the prompt tokens that the baseline computed again.")
    for difference in report["differences"][:10]:
        console.print(difference["text"], highlight=False, markup=False)
    if report["differences"]:
        console.print(f"OUTPUTS DIFFER in {len(report['differences'])} of {report['num_compared']} requests.")
    elif report["num_compared"]:
        console.print(
            f"Outputs identical: every token of the {report['num_compared']} requests that both runs finished."
        )
    else:
        console.print("No request was finished in both runs, so no output was compared.")
    if report["interrupted"]:
        console.print("Interrupted: the numbers cover the requests finished so far.")
    if report["differences"]:
        return 1
    return 130 if report["interrupted"] else 0
