"""What does a lookup in a shared storage tier cost?

The thread of the scheduler: `match`, `plan_step` and `apply` of a request with so many chunks that this engine does not
know, with lookups (all of them are found, or none) and with lookups turned off. The worker's answer is made up.

With `--url`, the tier: time and round trips of `find` for a prefix of which the server has everything, the first half,
or nothing. The server must be running; it gets a record of 8 KiB for each chunk.

  python benchmarks/bench_lookups.py --num-chunks 1 100 4000 --url valkey://127.0.0.1:6379 --json lookups.json
"""

import secrets
import sys
from collections.abc import Sequence
from typing import Any

from common import Spread, Stopwatch, count, make_parser, write_json

from tpu_offload import (
    BlockHash,
    JobResult,
    JobState,
    KVLayout,
    LayerGroup,
    LayerGroupKind,
    OffloadConfig,
    OffloadScheduler,
    StepReport,
    WorkerSetup,
)
from tpu_offload.core.workers import expected_setups
from tpu_offload.storage import StorageSpec
from tpu_offload.storage.valkey import ValkeyTier
from tpu_offload.types import JobKind

BLOCK_SIZE, RECORD_NBYTES = 16, 8192
LAYOUT = KVLayout(
    block_size=BLOCK_SIZE,
    groups=(LayerGroup.uniform(LayerGroupKind.FULL_ATTENTION, (0,), (BLOCK_SIZE, 2, 2, 8), "bfloat16"),),
)


def make_scheduler(num_chunks: int, *, wait_s: float) -> OffloadScheduler:
    """One above a shared tier, whose host tier is too small for the promotion that would follow."""
    config = OffloadConfig.create(
        storage_tier="valkey",
        num_storage_chunks=100 * num_chunks,
        storage_lookup_wait_s=wait_s,
        num_cpu_chunks=64,
        save_path="direct",
        load_path="direct",
    )
    (expected,) = expected_setups(config, LAYOUT, num_workers=1)
    setup = WorkerSetup(
        **expected,
        num_processes=1,
        process_index=0,
        segment_slots=(),
        save_path="direct",
        load_path="direct",
        stored_keys=((),),
        shares_storage=(True,),
    )
    scheduler = OffloadScheduler(config, LAYOUT)
    scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(64,), incarnation=1, setup=setup))
    return scheduler


def serve(scheduler: OffloadScheduler, name: str, num_chunks: int, watch: Stopwatch, *, found: int) -> None:
    """One request from its first match to the answer of its lookup, if it has one."""
    hashes = [BlockHash(secrets.token_bytes(32)) for _ in range(num_chunks)]
    num_tokens = num_chunks * BLOCK_SIZE + 1
    watch("match", scheduler.match, name, hashes, num_tokens=num_tokens, num_computed_tokens=0)
    scheduler.release(name)
    plan = watch("plan_step", scheduler.plan_step)
    results = tuple(
        JobResult(job_id=job.job_id, state=JobState.FINISHED, num_found=(found,) * len(job.prefixes))
        for job in plan.of(JobKind.LOOKUP)
    )
    watch("apply", scheduler.apply, StepReport(worker_id=0, results=results, num_host_slots=(64,)))
    scheduler.finish(name)


def scheduler_times(num_chunks: int, rounds: int) -> dict[str, dict[str, Spread]]:
    """Microseconds of the calls, by case."""
    cases = {"off": (0.0, 0), "missing": (10.0, 0), "found": (10.0, num_chunks)}
    schedulers = {case: make_scheduler(num_chunks, wait_s=wait_s) for case, (wait_s, _) in cases.items()}
    watches = {case: Stopwatch() for case in cases}
    for i in range(rounds + 1):
        for case, (_, found) in cases.items():
            watch = watches[case] if i else Stopwatch()  # the first round warms up
            serve(schedulers[case], f"request {i}", num_chunks, watch, found=found)
    for watch in watches.values():
        watch.add("sum", "match", "plan_step", "apply")
    return {case: watch.spreads(scale=1e6) for case, watch in watches.items()}


def find_times(url: str, num_chunks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds and round trips of `find`, by how much of the prefix the server has."""
    fingerprint = secrets.token_hex(16)
    tier = ValkeyTier(
        StorageSpec(
            record_nbytes=RECORD_NBYTES, num_chunks=num_chunks, worker_id=0, fingerprint=fingerprint, options=url
        )
    )
    keys = [secrets.token_bytes(48) for _ in range(num_chunks)]
    record = memoryview(bytes(RECORD_NBYTES))
    for key in keys:
        tier.write(key, record)
    others = [secrets.token_bytes(48) for _ in range(num_chunks)]
    half = num_chunks // 2
    cases = {"all": keys, "half": keys[:half] + others[half:], "nothing": others}
    trips: list[int] = []
    names = tier._names
    ask = names.count
    names.count = lambda groups: trips.append(1) or ask(groups)  # type: ignore[method-assign, func-returns-value]
    watch, num_trips = Stopwatch(), {}
    for _ in range(rounds):
        for case, prefix in cases.items():
            trips.clear()
            (found,) = watch(case, tier.find, [prefix])
            assert found == {"all": num_chunks, "half": half, "nothing": 0}[case]
            num_trips[case] = len(trips)
    tier.delete(keys)
    tier.close()
    spreads = watch.spreads(scale=1e3)
    return {case: {"ms": spreads[case], "round_trips": num_trips[case]} for case in cases}


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-chunks", type=count, nargs="+", default=[1, 100, 4000])
    parser.add_argument("--rounds", type=count, default=20)
    parser.add_argument("--url", help="of a Valkey or Redis server, as in TPU_OFFLOAD_STORAGE_OPTIONS")
    args = parser.parse_args(argv)
    results = []
    for num_chunks in args.num_chunks:
        us = scheduler_times(num_chunks, args.rounds)
        result: dict[str, Any] = {"num_chunks": num_chunks, "us": us}
        print(f"{num_chunks} chunks: host time in us, median (10th to 90th percentile)")
        for case, spreads in us.items():
            print(f"  {case:8}", ", ".join(f"{name} {spread.text(0)}" for name, spread in spreads.items()))
        if args.url:
            result["find"] = find_times(args.url, num_chunks, args.rounds)
            for case, figures in result["find"].items():
                print(f"  find, server has {case}: {figures['ms'].text()} ms, {figures['round_trips']} round trips")
        results.append(result)
    write_json(args, question="what a lookup in a shared storage tier costs", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
