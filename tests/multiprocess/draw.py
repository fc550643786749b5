"""Draws the setup of a run, with random settings and faults, from a seed."""

import dataclasses
import random
from typing import Any

from tests.multiprocess.messages import Faults, Setup, Transport
from tests.multiprocess.stepped_storage import PRIVATE, SHARED


def draw_setup(seed: int, *, num_processes: int, num_devices: int, num_steps: int) -> Setup:
    """The setup of a seed, for so many devices in each process."""
    rng = random.Random(f"{seed} setup")
    blocks_per_chunk = rng.choice((1, 1, 2))
    num_cpu_chunks, segment_chunks = rng.choice((8, 16, 24)), rng.choice((2, 4, 64))
    available = {rank: rng.randint(5, num_cpu_chunks) for rank in range(num_processes) if rng.random() < 0.2}
    windows, num_rows = _draw_groups(seed)
    if available:  # without room for a segment there is no host tier, and nothing to compare
        segment_chunks = min(segment_chunks, 4)
    data_ranks, span_hosts = _draw_data_ranks(seed, num_processes, num_devices)
    by_data_rank = {} if data_ranks == 1 else {"save_path": "direct", "load_path": "direct"}
    return Setup(
        seed=seed,
        num_steps=num_steps,
        data_ranks=data_ranks,
        data_ranks_span_hosts=span_hosts,
        num_blocks=40 * (1 + len(windows)),
        windows=windows,
        num_rows=num_rows,
        settings=_draw_settings(
            rng, blocks_per_chunk, num_cpu_chunks * (1 + len(windows)), has_groups=bool(windows or num_rows)
        )
        | _draw_storage(seed)
        | by_data_rank,
        host_segment_chunks=segment_chunks,
        swap_blocks=rng.choice((0, 6, 16)),
        max_ahead=rng.randint(0, 4),
        faults={
            rank: _with_storage_faults(_draw_faults(rng), seed, rank)
            for rank in range(num_processes)
            if rng.random() < 0.7
        },
        transport=_draw_transport(rng),
        reset=_sometimes(rng, 0.03),
        restart=_sometimes(rng, 0.05),
        restart_without_caches=rng.choice((0.0, 0.5)),
        available_chunks=available,
    )


def _draw_data_ranks(seed: int, num_processes: int, num_devices: int) -> tuple[int, bool]:
    """Data-parallel ranks, several in a third of the runs, and whether each has devices of every process."""
    rng = random.Random(f"{seed} data ranks")
    most = num_processes * num_devices
    num_ranks = rng.choice((1, 1, 1, 1, num_devices, most))
    return num_ranks, 1 < num_ranks < most and rng.random() < 0.5


def _draw_groups(seed: int) -> tuple[tuple[int, ...], int]:
    """The sliding windows and the rows of states: in half of the runs the model has one or both."""
    rng = random.Random(f"{seed} groups")
    kind = rng.randrange(6)
    windows = tuple(rng.choice((3, 5, 9, 14)) for _ in range(rng.randint(1, 2))) if kind in (3, 5) else ()
    return windows, rng.choice((30, 48)) if kind > 3 else 0


def _sometimes(rng: random.Random, rate: float) -> float:
    """A rate that is 0 in half of the runs."""
    return rng.choice((0.0, rate))


def _draw_settings(
    rng: random.Random, blocks_per_chunk: int, num_cpu_chunks: int, *, has_groups: bool
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "blocks_per_chunk": blocks_per_chunk,
        "num_cpu_chunks": num_cpu_chunks,
        "num_staging_blocks": rng.choice((6, 12, 64)),
        "save_path": rng.choice(("direct", "staged")),
        "load_path": rng.choice(("direct", "staged")),
        "save_on": rng.choice((("compute",), ("compute", "preemption"), ("eviction", "preemption"))),
        "breaker_failures": rng.choice((0, 3)),
        "state_share": 0.25,
    }
    if has_groups and "eviction" in settings["save_on"]:  # windows and states are gone then
        settings["save_on"] = "compute", "preemption"
    return settings


def _draw_storage(seed: int) -> dict[str, Any]:
    """Settings of storage tiers, in half of the runs."""
    rng = random.Random(f"{seed} storage")
    tiers = rng.choice(((), (), (), (PRIVATE,), (SHARED,), (PRIVATE, SHARED)))
    if not tiers:
        return {}
    drawn: dict[str, list[Any]] = {
        "num_storage_chunks": [rng.choice((8, 40)) for _ in tiers],
        "storage_write_on": [rng.choice(("save", "eviction")) for _ in tiers],
        "storage_admission": [rng.choice(("all", "second_sighting")) for _ in tiers],
        "storage_eviction_policy": [rng.choice(("density", "density", "lru")) for _ in tiers],
    }
    return {
        "storage_tier": ";".join(tiers),
        "storage_wait_s": 6,  # in steps, as all durations
        "storage_lookup_wait_s": 4,
    } | {name: ";".join(map(str, values)) for name, values in drawn.items()}


def _draw_faults(rng: random.Random) -> Faults:
    return Faults(
        save=_sometimes(rng, 0.05),
        load=_sometimes(rng, 0.05),
        segment=_sometimes(rng, 0.02),
        caches=_sometimes(rng, 0.05),
        slow=_sometimes(rng, 0.3),
        silence=_sometimes(rng, 0.2),
    )


def _with_storage_faults(faults: Faults, seed: int, rank: int) -> Faults:
    rng = random.Random(f"{seed} storage of {rank}")
    return dataclasses.replace(faults, storage=_sometimes(rng, 0.1), frozen=_sometimes(rng, 0.04))


def _draw_transport(rng: random.Random) -> Transport:
    return Transport(
        plan_again=_sometimes(rng, 0.15),
        plan_late=_sometimes(rng, 0.1),
        report_lost=_sometimes(rng, 0.1),
        report_again=_sometimes(rng, 0.1),
    )
