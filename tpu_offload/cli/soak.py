"""`tpu-offload replay --soak SECONDS`: serves a workload again and again while copies, messages and requests go wrong.

HBM, staging buffer, host tier and swap pool are small, so that everything is evicted, dropped, preempted and swapped
out all the time, and faults strike at random (see `faults`). Three engines take turns, a round each: one copies
directly, one through staging arrays, one saves inside its step. They live from the first round to the last. A
fault may cost time, but nothing else:

* every request of every round gives the tokens that it gave without offloading, before the first round;
* the memory of the process does not grow, and neither does any table of any engine, once all have warmed up;
* no engine ends, hangs, or disagrees with its own accounts.

After each round the engine at hand is given time to come to rest, with no new faults; then its accounts are checked,
the tables of all are counted and memory is read.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import psutil

from tpu_offload.cli import report as report_lib
from tpu_offload.cli import soak_report
from tpu_offload.cli.faults import Fault, Faults
from tpu_offload.cli.replay_setup import (
    Setup,
    blocks_per_request,
    build_setup,
    build_workload,
    describe,
    layout_of,
    serve_once,
)
from tpu_offload.cli.serving import Record, serve
from tpu_offload.cli.soak_report import Round
from tpu_offload.cli.tables import table_sizes
from tpu_offload.cli.terminal import ReportConsole, progress
from tpu_offload.cli.workloads import Workload, chat_workload, decode_workload
from tpu_offload.config import CopyPath, OffloadConfig, SwapMode
from tpu_offload.engine import Engine, ModelConfig, Request, RequestOutput

_logger = logging.getLogger(__name__)

_NUM_REQUESTS, _TURNS = 32, 4
DEFAULT_CONCURRENCY = 6
ENGINE = {"block_size": 16, "max_num_batched_tokens": 128, "num_spare_blocks": 0, "async_scheduling": 1}
MODEL = ModelConfig(num_layers=2, d_model=64, num_heads=4, num_kv_heads=2, head_dim=16, d_ff=128)

_HBM_PER_PROMPTS = 0.5  # of those in flight; they share some of their blocks
_STUCK_S = 60.0  # without a request that ends
_REST_JOBS = 4  # times what a job may take, an engine is given to come to rest
# What is not set by a variable. Everything is too small, and times are short, so that what is late is late soon.
_PRESSURE = {
    "num_staging_blocks": 48,
    "decode_save": True,
    "swap_mode": SwapMode.SWAP,
    "job_timeout_s": 0.25,
    "breaker_failures": 3,
    "breaker_retry_s": 0.02,
    "metrics_log_interval": 0.0,
}
_PATHS = (
    (CopyPath.DIRECT, CopyPath.DIRECT),
    (CopyPath.STAGED, CopyPath.STAGED),
    (CopyPath.FUSED, CopyPath.DIRECT),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Soak:
    """What is served, how, and for how long.

    Attributes:
      setup: the sizes.
      configs: the settings of each engine, by what the report calls it.
      seconds: how long to go on.
      seed: of the faults.
    """

    setup: Setup
    configs: dict[str, OffloadConfig]
    seconds: int
    seed: int


def build_soak(args: argparse.Namespace, offload: OffloadConfig) -> Soak:
    """Checks flags and settings, and sizes everything too small.

    Raises:
      InputError: a flag cannot be.
      ConfigError: a setting cannot be.
    """
    workload = _mixed_workload(args)
    concurrency = args.concurrency or DEFAULT_CONCURRENCY
    needed = blocks_per_request(workload, args.block_size)
    in_flight = min(concurrency, len(workload.conversations))
    num_prompt_tokens = in_flight * sum(workload.prompt_lens) / workload.num_requests
    num_blocks = args.num_blocks or max(needed, int(_HBM_PER_PROMPTS * num_prompt_tokens / args.block_size))
    setup = build_setup(args, offload, workload=workload, model=MODEL, concurrency=concurrency, num_blocks=num_blocks)
    pressed = _press(offload, setup)
    for size in (pressed.staging_blocks, pressed.host_chunks):
        size(layout_of(setup.model, setup.engine))
    return Soak(setup, _by_path(pressed), args.soak, args.seed)


def _mixed_workload(args: argparse.Namespace) -> Workload:
    """What the flags ask for; by default chats, which share prefixes, and among them long answers, which need room."""
    if args.workload or args.prompts or args.trace:
        return build_workload(args)
    num_requests = args.requests or _NUM_REQUESTS
    num_decode = num_requests // 4
    chat = chat_workload(num_requests=num_requests - num_decode, turns=args.turns or _TURNS, seed=args.seed)
    decode = decode_workload(num_requests=num_decode, seed=args.seed).conversations if num_decode else ()
    pairs = itertools.zip_longest(chat.conversations, decode)
    return Workload("chats and long answers", tuple(one for pair in pairs for one in pair if one is not None))


def _press(offload: OffloadConfig, setup: Setup) -> OffloadConfig:
    """The settings with all that was not set made small."""
    given = offload.model_fields_set
    num_unique = setup.workload.num_unique_blocks(setup.engine.block_size)
    changes = {name: value for name, value in _PRESSURE.items() if name not in given}
    if offload.staging_buffer_tokens is not None or offload.staging_buffer_gb is not None:
        changes.pop("num_staging_blocks", None)
    if offload.num_cpu_chunks is None and offload.host_gb is None:
        changes["num_cpu_chunks"] = max(1, num_unique // 2 // offload.blocks_per_chunk)
    block_gb = layout_of(setup.model, setup.engine).block_nbytes / 2**30
    if "swap_gb" not in given:
        changes["swap_gb"] = setup.engine.num_blocks / 2 * block_gb
    if "host_segment_gb" not in given:  # a few segments, so that a lost one is not everything
        changes["host_segment_gb"] = max(1, num_unique // 8) * block_gb
    return offload.model_copy(update=changes)


def _by_path(offload: OffloadConfig) -> dict[str, OffloadConfig]:
    """One engine a way to copy; only one engine if a variable says which."""
    if {"save_path", "load_path"} & offload.model_fields_set:
        paths: Sequence[tuple[CopyPath, CopyPath]] = [(offload.save_path, offload.load_path)]
    else:
        paths = _PATHS
    return {
        f"{save.value} saves, {load.value} loads": offload.model_copy(update={"save_path": save, "load_path": load})
        for save, load in paths
    }


def soak(plan: Soak, *, stop: Callable[[], bool]) -> dict[str, Any]:
    """Serves all rounds; returns the report."""
    setup = plan.setup
    with progress(setup.workload.num_requests) as on_finish:
        baseline, _ = serve_once(setup, None, on_finish=on_finish("baseline"), stop=stop)
    with progress(None) as on_finish, _counted_log_lines() as num_lines, contextlib.ExitStack() as stack:
        sides = []
        for i, (name, config) in enumerate(plan.configs.items()):
            if baseline.complete and not stop():
                sides.append(stack.enter_context(_engine(setup, name, config, seed=plan.seed + i)))
        rounds = list(_serve_rounds(plan, sides, baseline.records, on_finish=on_finish, stop=stop))
        return {
            **describe(setup),
            "soak_s": plan.seconds,
            "num_baseline_requests": len(baseline.records),
            **soak_report.numbers(rounds),
            "faults": {f.value: sum(side.faults.counts[f] for side in sides) for f in Fault},
            "engines": {side.name: side.numbers() for side in sides},
            "log_lines": dict(num_lines),
        }


class _Side:
    """One engine and what befalls it; `serve` takes it for an engine to which nothing does."""

    def __init__(self, name: str, engine: Engine, faults: Faults, *, job_timeout_s: float) -> None:
        self.name = name
        self.engine = engine
        self.faults = faults
        self._rest_s = _REST_JOBS * job_timeout_s
        self._requests: dict[str, Request] = {}

    def add_request(self, request: Request) -> None:
        """See `serving.Engine`."""
        self._requests[request.request_id] = request
        self.engine.add_request(request)

    def step(self) -> Sequence[RequestOutput]:
        """See `serving.Engine`."""
        if self.faults.strikes(Fault.RESET):
            self.engine.reset_cache()
        if self._requests and self.faults.strikes(Fault.ABORT):
            request = self._requests[self.faults.random.choice(list(self._requests))]
            self.engine.abort(request.request_id)
            self.engine.add_request(request)
        outputs = self.engine.step()
        for output in outputs:
            if output.finished:
                self._requests.pop(output.request_id, None)
        return outputs

    def rest(self) -> int:
        """Lets copies and messages come to their ends; returns jobs that have none after that."""
        self.faults.active = False
        self.engine.abort(*self._requests)
        self._requests.clear()
        until_s = time.monotonic() + self._rest_s
        while (num_jobs := self.num_jobs) and time.monotonic() < until_s:
            self.engine.step()
            time.sleep(0.001)
        self.engine.step()
        self.engine.check_invariants()
        return num_jobs

    @property
    def num_jobs(self) -> int:
        """Jobs that have not ended."""
        stats = self.engine.offload_stats()
        return stats.num_jobs_in_flight if stats else 0

    def numbers(self) -> dict[str, Any]:
        """What the engine and the library counted."""
        stats = self.engine.offload_stats()
        return dataclasses.asdict(self.engine.stats()) | (stats.as_dict() if stats else {})


@contextlib.contextmanager
def _engine(setup: Setup, name: str, config: OffloadConfig, *, seed: int) -> Iterator[_Side]:
    faults = Faults(seed, job_timeout_s=config.job_timeout_s, clock=time.perf_counter)
    engine = Engine(setup.model, setup.engine, offload=config, clock=time.perf_counter, seams=faults.seams())
    with contextlib.closing(engine):
        engine.warm_up()
        engine.wait_for_host_memory()
        yield _Side(name, engine, faults, job_timeout_s=config.job_timeout_s)


def _serve_rounds(
    plan: Soak,
    sides: Sequence[_Side],
    baseline: Sequence[Record],
    *,
    on_finish: Callable[[str], Callable[[], None]],
    stop: Callable[[], bool],
) -> Iterator[Round]:
    """Round after round until the time is up, somebody stops it, or an engine is of no use any more."""
    start_s = time.monotonic()
    tell = on_finish("soak")
    while sides and not stop() and time.monotonic() - start_s < plan.seconds:
        for side in sides:
            done = _serve_round(plan, side, baseline, until_s=start_s + plan.seconds, on_finish=tell, stop=stop)
            gc.collect()
            tables = {"jax arrays of the process": len(jax.live_arrays())}
            for other in sides:
                tables |= table_sizes(other.engine, other.name)
            rss_nbytes = psutil.Process().memory_info().rss
            yield dataclasses.replace(done, at_s=time.monotonic() - start_s, rss_nbytes=rss_nbytes, tables=tables)
            if done.error or stop() or time.monotonic() - start_s >= plan.seconds:
                return


def _serve_round(
    plan: Soak,
    side: _Side,
    baseline: Sequence[Record],
    *,
    until_s: float,
    on_finish: Callable[[], None],
    stop: Callable[[], bool],
) -> Round:
    last_end_s = time.monotonic()
    error = ""

    def finished() -> None:
        nonlocal last_end_s
        last_end_s = time.monotonic()
        on_finish()

    def enough() -> bool:
        nonlocal error
        now_s = time.monotonic()
        if now_s - last_end_s > _STUCK_S:
            error = f"no request ended for {_STUCK_S:g} s: {side.engine.stats()}"
        return bool(error) or now_s >= until_s or stop()

    records: Sequence[Record] = ()
    num_jobs_left = 0
    side.faults.active = True
    try:
        run = serve(
            side,
            plan.setup.workload,
            concurrency=plan.setup.concurrency,
            sampling=plan.setup.sampling,
            on_finish=finished,
            stop=enough,
        )
        records = run.records
        num_jobs_left = side.rest()
    except Exception as e:  # what the soak is there to find: nothing that befalls the library may end an engine
        error = "".join(traceback.format_exception(e))
    found, num_compared = report_lib.find_differences(baseline, records, names=("baseline", side.name))
    return Round(
        engine=side.name,
        num_requests=len(records),
        num_compared=num_compared,
        differences=tuple(difference.as_dict() for difference in found),
        num_jobs_left=num_jobs_left,
        error=error,
    )


@contextlib.contextmanager
def _counted_log_lines() -> Iterator[dict[str, int]]:
    """Counts the warnings of the library, of which there is one a fault, in place of printing them."""
    counts: dict[str, int] = {}

    class Counter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = f"{record.levelname} {record.name}"
            counts[name] = counts.get(name, 0) + 1

    logger, handler = logging.getLogger("tpu_offload"), Counter()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield counts
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def tell(report: dict[str, Any]) -> int:
    """Prints the tables and the verdict; returns the exit status."""
    return soak_report.tell(ReportConsole(), report)
