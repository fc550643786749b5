"""`tpu-offload simulate`: replays request traces with several eviction policies and compares them with the bound."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from tpu_offload.cli.files import check_outputs, output_file, write_file, write_json
from tpu_offload.cli.html.flag import check_html, html_flag
from tpu_offload.cli.options import Command, FiniteFloat, MultiValue, input_file, number, option
from tpu_offload.cli.simulate_sizes import Size, Unit, chunk_nbytes, gb_flag, share_flag, size_flag, stack_flag
from tpu_offload.config import SaveEvent, StorageAdmission, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.config.storage_tiers import SEPARATOR
from tpu_offload.core.policies import POLICIES, find_policy
from tpu_offload.errors import ConfigError, InputError
from tpu_offload.sim import (
    BOUND,
    Case,
    Experiment,
    Result,
    StorageSetup,
    TierSetup,
    Trace,
    no_hbm,
    read_traces,
    run_all,
    simulate_hbm,
)

_logger = logging.getLogger(__name__)

_SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_SAVE_EVENTS = [event.value for event in (SaveEvent.COMPUTE, SaveEvent.HBM_EVICTION)]
_WRITE_EVENTS = [event.value for event in StorageWriteEvent]
_ADMISSIONS = [admission.value for admission in StorageAdmission]
_STORAGE_POLICIES = [policy.value for policy in StorageEvictionPolicy]
_NUM_CORES = os.cpu_count() or 1


def _policy(name: str) -> str:
    if ":" in name:
        try:
            find_policy(name, setting="")
        except ConfigError as e:
            raise click.BadParameter(str(e)) from e
    elif name not in POLICIES and name != BOUND:
        raise click.BadParameter(f"{name!r}; expected one of {', '.join((*POLICIES, BOUND))}, or module:Class")
    return name


def _per_tier(expected: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses one word for all tiers, or one for each: `save`, `eviction;save`."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(SEPARATOR))
        for word in words:
            if word not in expected:
                several = f"for all tiers, or one for each, separated by {SEPARATOR!r}"
                raise click.BadParameter(f"{text!r}; expected one of {', '.join(expected)} {several}")
        return words

    return parse


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The flags."""

    trace: tuple[tuple[Path, ...], ...]
    trace_block_tokens: int
    start: float
    end: float | None
    split: float | None
    policies: tuple[str, ...]
    sizes: tuple[Size, ...]
    sizes_gb: tuple[Size, ...] | None
    hbm: Size | None
    save_on: str
    save_after_sightings: int
    storage: tuple[tuple[Size, ...], ...] | None
    storage_write_on: tuple[str, ...] | None
    storage_admission: tuple[str, ...] | None
    storage_eviction_policy: tuple[str, ...] | None
    num_layers: int | None
    num_kv_heads: int | None
    head_size: int | None
    dtype: str
    json: Path | None
    html: Path | None
    jobs: int

    @property
    def traces(self) -> list[Path]:
        return [path for paths in self.trace for path in paths]


_SIZE_TEXT = "a share of the unique blocks (0.05), a number of chunks (9000) or GB (40GB)"


@click.command(cls=Command, exclusive=[("sizes", "sizes_gb")])
@option(
    "--trace",
    MultiValue(input_file),
    "FILE...",
    "JSON lines in the Mooncake format; several files are merged by time",
    multiple=True,
    required=True,
)
@number("--trace-block-tokens", "tokens per id (512)", default=512)
@option("--start", FiniteFloat(), "S", "skip requests before this second (0)", default=0.0)
@option("--end", FiniteFloat(), "S", "skip requests from this second on")
@option(
    "--split",
    FiniteFloat(),
    "S",
    "count hits only from this second on; a value below 1 is a fraction of the simulated time",
)
@option(
    "--policies",
    MultiValue(_policy, commas=True),
    "NAME...",
    f"any of {', '.join((*POLICIES, BOUND))} (all of them), or module:Class",
    default=(*POLICIES, BOUND),
)
@option(
    "--sizes",
    MultiValue(share_flag, commas=True),
    "SHARE...",
    f"sizes of the host tier as shares of the unique blocks ({' '.join(f'{size:g}' for size in _SIZES)})",
    default=tuple(Size(size, Unit.SHARE) for size in _SIZES),
)
@option("--sizes-gb", MultiValue(gb_flag, commas=True), "GB...", "the same in GB")
@option("--hbm", size_flag, "SIZE", f"size of a prefix cache in HBM in front: {_SIZE_TEXT}")
@option(
    "--save-on", click.Choice(_SAVE_EVENTS), None, f"when blocks are saved ({_SAVE_EVENTS[0]})", default=_SAVE_EVENTS[0]
)
@number("--save-after-sightings", "save a block once N requests contained it (1)", high=15, default=1)
@option(
    "--storage",
    MultiValue(stack_flag, commas=True),
    "SIZE[;SIZE]...",
    "sizes of a storage tier below the host tier, or of several, nearest first (0.05;0.5), each as for --hbm",
)
@option(
    "--storage-write-on",
    _per_tier(_WRITE_EVENTS),
    "EVENT[;EVENT]",
    f"when chunks are written to it: {' or '.join(_WRITE_EVENTS)}; one for all tiers or one for each "
    f"({_WRITE_EVENTS[0]})",
)
@option(
    "--storage-admission",
    _per_tier(_ADMISSIONS),
    "NAME[;NAME]",
    f"which chunks it takes: {', '.join(_ADMISSIONS)}; likewise ({_ADMISSIONS[0]})",
)
@option(
    "--storage-eviction-policy",
    _per_tier(_STORAGE_POLICIES),
    "NAME[;NAME]",
    f"which chunks it evicts: {', '.join(_STORAGE_POLICIES)}; likewise ({_STORAGE_POLICIES[0]})",
)
@number("--num-layers", "model, for sizes in GB and bytes: layers")
@number("--num-kv-heads", "model: key and value heads")
@number("--head-size", "model: width of a head")
@option("--dtype", str, "NAME", "model: type of the KV cache (bfloat16)", default="bfloat16")
@option("--json", output_file, "FILE", "write the results to FILE")
@html_flag()
@number("--jobs", f"processes ({_NUM_CORES})", high=1024, default=_NUM_CORES)
@click.pass_obj
def command(argv: list[str], /, **flags: Any) -> int:
    """Replays the prompts of request traces through host tiers of several sizes with several eviction policies, and
    computes the upper bound (belady). See docs/simulator.md.
    """
    from tpu_offload.cli import simulate_report  # imports rich, which `--help` does not need

    options = _Options(**flags)
    _check(options)
    nbytes = chunk_nbytes(
        options.dtype,
        options.trace_block_tokens,
        num_layers=options.num_layers,
        num_kv_heads=options.num_kv_heads,
        head_size=options.head_size,
    )
    trace = _read(options)
    num_unique = trace.num_unique_blocks
    num_chunks_of = functools.partial(Size.num_chunks, num_unique_blocks=num_unique, chunk_nbytes=nbytes)
    cases = _cases(options, num_unique, num_chunks_of)
    num_hbm_blocks = num_chunks_of(options.hbm) if options.hbm else 0
    hbm_result = simulate_hbm(trace, num_hbm_blocks) if num_hbm_blocks else no_hbm(trace)
    experiment = Experiment(
        trace, split=_split(options.split, trace), only_second=options.split is not None, hbm_result=hbm_result
    )
    results = _run_cases(experiment, cases, num_jobs=options.jobs)
    report = {
        "results": simulate_report.as_json(experiment, results, chunk_nbytes=nbytes),
        "traces": [str(path) for path in options.traces],
        **simulate_report.describe(experiment, num_hbm_blocks=num_hbm_blocks, chunk_nbytes=nbytes),
        "save_on": options.save_on,
        "save_after_sightings": options.save_after_sightings,
        "storage_write_on": options.storage_write_on or _WRITE_EVENTS[:1],
        "storage_admission": options.storage_admission or _ADMISSIONS[:1],
        "storage_eviction_policy": options.storage_eviction_policy or _STORAGE_POLICIES[:1],
        "argv": argv,
    }
    if options.json is not None:
        write_json(options.json, report)
    tables = simulate_report.result_tables(report)
    simulate_report.print_report(report, tables)
    if options.html is not None:
        from tpu_offload.cli.html.simulate import simulate_page

        write_file(options.html, simulate_page(report, tables).render())
    return 0


def _check(options: _Options) -> None:
    """Checks the options that can be checked before reading the traces."""
    check_outputs({f"the trace {path}": path for path in options.traces}, json=options.json, html=options.html)
    check_html(options.html)
    if options.save_on != SaveEvent.COMPUTE.value and options.hbm is None:
        raise InputError(f"--save-on {options.save_on} has no effect without an HBM; set its size with --hbm")
    for name in ("storage_write_on", "storage_admission", "storage_eviction_policy"):
        _check_per_tier(f"--{name.replace('_', '-')}", getattr(options, name), options.storage)


def _check_per_tier(flag: str, words: Sequence[str] | None, stacks: Sequence[Sequence[Size]] | None) -> None:
    """Refuses settings of tiers that are not there."""
    if not words:
        return
    given = f"{flag} {SEPARATOR.join(words)}"
    if stacks is None:
        raise InputError(f"{given} has no effect without --storage")
    for stack in stacks:
        if len(words) not in (1, len(stack)):
            sizes = SEPARATOR.join(map(str, stack))
            raise InputError(
                f"{given} has {len(words)} values, and --storage {sizes} {len(stack)}; expected 1 or {len(stack)}"
            )


def _read(options: _Options) -> Trace:
    trace = read_traces(options.traces, block_tokens=options.trace_block_tokens)
    for note in trace.notes:
        _logger.warning("%s", note)
    trace = trace.between(options.start, math.inf if options.end is None else options.end)
    if not trace.num_blocks:
        raise InputError("no request has a block: every list of hash_ids is empty")
    return trace


def _split(given: float | None, trace: Trace) -> int:
    """The number of requests before the split, by default half of the time."""
    split = 0.5 if given is None else given
    first_s, last_s = trace.requests[0].time_s, trace.duration_s
    split_s = first_s + split * (last_s - first_s) if split < 1 else split
    num_requests = trace.num_before(split_s)
    if given is not None and not any(request.blocks for request in trace.requests[num_requests:]):
        raise InputError(f"--split {split:g}: no block comes after it; the last request is at {last_s:g} s")
    return num_requests


def _cases(options: _Options, num_unique_blocks: int, num_chunks_of: Callable[[Size], int]) -> list[Case]:
    common = TierSetup(
        num_chunks=0,
        save_on=SaveEvent(options.save_on),
        num_sightings=options.save_after_sightings,
    )
    stacks = dict.fromkeys(_stack(options, tuple(map(num_chunks_of, sizes))) for sizes in options.storage or ((),))
    shares_and_setups = []
    for size in options.sizes_gb or options.sizes:
        num_chunks = num_chunks_of(size)
        share = size.value if size.unit is Unit.SHARE else num_chunks / num_unique_blocks
        shares_and_setups.append((share, dataclasses.replace(common, num_chunks=num_chunks)))
    return [
        Case(policy, share, dataclasses.replace(setup, storage=stack))
        for policy in dict.fromkeys(options.policies)
        for stack in (((),) if policy == BOUND else stacks)
        for share, setup in dict.fromkeys(shares_and_setups)
    ]


def _stack(options: _Options, sizes: Sequence[int]) -> tuple[StorageSetup, ...]:
    """The tiers of these sizes, in chunks."""
    given = (
        options.storage_write_on or _WRITE_EVENTS[:1],
        options.storage_admission or _ADMISSIONS[:1],
        options.storage_eviction_policy or _STORAGE_POLICIES[:1],
    )
    columns = [words * len(sizes) if len(words) == 1 else words for words in given]
    return tuple(
        StorageSetup(size, StorageWriteEvent(event), StorageAdmission(admission), StorageEvictionPolicy(policy))
        for size, event, admission, policy in zip(sizes, *columns, strict=True)
    )


def _run_cases(experiment: Experiment, cases: Sequence[Case], *, num_jobs: int) -> list[Result]:
    from tpu_offload.cli.tables import progress

    results: dict[int, Result] = {}
    with (
        progress(len(cases), what="runs") as start,
        contextlib.closing(run_all(experiment, cases, num_jobs=num_jobs)) as all_,
    ):
        on_finish = start("simulate")
        for number, result in all_:
            results[number] = result
            on_finish()
    return [results[number] for number in range(len(cases))]
