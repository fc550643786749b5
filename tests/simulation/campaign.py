"""Runs many seeds in several processes and sums their counts."""

import contextlib
import dataclasses
import multiprocessing
import signal
from collections import Counter
from collections.abc import Generator, Sequence

from tests.simulation.shrink import failure_of
from tests.simulation.trace import RATES, generate
from tests.simulation.world import World

DEFAULT_STEPS = 200
_BATCH = 10


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of some seeds.

    Attributes:
      num_seeds: number of seeds.
      totals: counts of events, over all seeds.
      violations: by seed.
    """

    num_seeds: int
    totals: Counter[str]
    violations: dict[int, str]


def run_seeds(seeds: Sequence[int], num_steps: int, *, several_groups: bool = False) -> Outcome:
    """Runs seeds sequentially; with `several_groups` only those that draw windows or states."""
    totals: Counter[str] = Counter()
    violations = {}
    for seed in seeds:
        setup, actions = generate(seed, num_steps)
        if several_groups and not setup.windows and not setup.num_rows:
            continue
        totals["runs"] += 1
        world = World(setup)
        totals["runs with windows"] += bool(setup.windows)
        totals["runs with states"] += setup.num_rows > 0
        try:
            for action in actions:
                world.act(action)
            world.finish()
        except Exception as e:  # any exception of the library is a violation
            violations[seed] = failure_of(e)
        most = max(totals["most steps to finish"], world.counts["most steps to finish"])
        totals += world.totals()
        totals["most steps to finish"] = most
    return Outcome(len(seeds), totals, violations)


def run_campaign(
    first_seed: int, num_seeds: int, num_steps: int, *, num_jobs: int, several_groups: bool = False
) -> Generator[Outcome]:
    """Runs seeds in several processes; yields outcomes of a few seeds at a time. Closing it ends the processes."""
    end = first_seed + num_seeds
    firsts = range(first_seed, end, _BATCH)
    batches = [(range(first, min(first + _BATCH, end)), num_steps, several_groups) for first in firsts]
    if num_jobs == 1:
        yield from map(_run_batch, batches)
        return
    # Not fork: jax, which tpu_offload.worker imports, starts threads.
    with multiprocessing.get_context("spawn").Pool(num_jobs, _ignore_interrupt) as pool:
        yield from pool.imap_unordered(_run_batch, batches)


def add_up(outcomes: list[Outcome]) -> Outcome:
    """Merges outcomes."""
    totals: Counter[str] = Counter()
    violations: dict[int, str] = {}
    most = 0
    for outcome in outcomes:
        most = max(most, outcome.totals["most steps to finish"])
        totals += outcome.totals
        violations |= outcome.violations
    totals["most steps to finish"] = most
    return Outcome(sum(outcome.num_seeds for outcome in outcomes), totals, violations)


def summary(outcome: Outcome, *, seconds: float) -> str:
    """The outcome in one line."""
    t = outcome.totals
    faults = ", ".join(f"{kind} {t[f'fault: {kind}']}" for kind in RATES if t[f"fault: {kind}"])
    return (
        f"{outcome.num_seeds} seeds, {t['runs']} runs, "
        f"{t['steps']} steps ({t['steps'] / max(seconds, 1e-9):.0f} a second), {t['requests']} requests, "
        f"{t['load jobs']} loads ({t['loads used in part']} used in part), "
        f"{t['save jobs']} saves, {t['num_evicted_chunks']} evictions, {t['swap-outs']} swaps out, "
        f"{t['swap-ins']} in, {t['num_lost_swaps']} lost; {t['runs with windows']} runs with windows, "
        f"{t['runs with states']} with states, {t['blocks loaded in windows']} blocks of windows and "
        f"{t['blocks loaded in states']} states loaded, {t['blocks read']} blocks checked when read and "
        f"{t['blocks checked in host memory']} in host memory; "
        f"{t['resets']} resets, {t['num_worker_restarts']} restarts, "
        f"{t['num_failed_jobs']} failed jobs, {t['num_timed_out_jobs']} timeouts, {t['num_lost_results']} lost and "
        f"{t['num_ignored_results']} ignored results, {t['num_breaker_openings']} breaker openings, "
        f"{t['steps with slots in quarantine']} steps with quarantine; faults: {faults or 'none'}; "
        f"{len(outcome.violations)} violations"
    )


def _run_batch(batch: tuple[range, int, bool]) -> Outcome:
    seeds, num_steps, several_groups = batch
    return run_seeds(seeds, num_steps, several_groups=several_groups)


def _ignore_interrupt() -> None:
    """Ignores Ctrl-C in a child; the parent handles it and ends its children."""
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
