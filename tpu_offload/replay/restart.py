"""Serves a workload with offloading, stops, and serves it again with a new engine above the same storage."""

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tpu_offload.engine import Engine, Hosts
from tpu_offload.hashing import BlockHasher
from tpu_offload.metrics import OffloadStats
from tpu_offload.replay.comparison import (
    describe_processes,
    find_differences,
    offload_numbers,
    outcome,
    report_runs,
    run_numbers,
)
from tpu_offload.replay.serving import Record
from tpu_offload.replay.setup import Setup, layout_of, serve_once
from tpu_offload.types import BlockHash


def serve_and_restart(
    setup: Setup,
    *,
    start: Callable[[str], Callable[[], None]],
    stop: Callable[[], bool],
    hosts: Hosts | None = None,
) -> dict[str, Any]:
    """Serves a workload without offloading, with it, and with it once more; returns the report.

    Both runs with offloading are compared with the one without. `offload` in the report is the last one.

    Args:
      setup: workload and sizes, with a storage tier.
      start: called with the name of each run; returns a function to call after each of its requests.
      stop: called before each step; True ends the run.
      hosts: the processes that run the model in all runs. They keep running, with new workers and caches.
    """
    stored: set[BlockHash] = set()

    def note_stored(engine: Engine) -> None:
        if not stop():
            engine.settle()
        stored.update(engine.stored_block_hashes())

    serve = functools.partial(serve_once, setup, stop=stop, hosts=hosts)
    baseline, _ = serve(None, on_finish=start("baseline"))
    first, first_stats = serve(setup.offload, on_finish=start("offload"), on_end=note_stored)
    again, stats = serve(setup.offload, on_finish=start("after the restart"))
    differences = []
    num_compared = 0
    for name, run in ("offload", first), ("after the restart", again):
        found, num_compared = find_differences(baseline.records, run.records, names=("baseline", name))
        differences += found
    stats = stats or OffloadStats()
    block_size = setup.engine.block_size
    before = run_numbers(first, block_size=block_size) | offload_numbers(first_stats or OffloadStats())
    return {
        **report_runs(setup, baseline, again, stats),
        "processes": describe_processes(hosts),
        **outcome([difference.as_dict() for difference in differences], num_compared),
        "before_restart": before,
        "restart": restart_numbers(
            again.records,
            stored,
            hasher=BlockHasher(layout_of(setup.model, setup.engine).fingerprint(), block_size=block_size),
            block_size=block_size,
            blocks_per_chunk=setup.offload.blocks_per_chunk,
        )
        | {
            "stored_chunks": len(stored),
            "restored_chunks": stats.restored_chunks,
            "found_storage_chunks": stats.found_storage_chunks,
            "promoted_chunks": stats.promoted_chunks,
            "failed_storage_chunks": stats.failed_storage_chunks,
        },
    }


def restart_numbers(
    records: Iterable[Record],
    stored: Collection[BlockHash],
    *,
    hasher: BlockHasher,
    block_size: int,
    blocks_per_chunk: int,
) -> dict[str, int]:
    """How much of what was stored was asked for, and how much of that was not computed.

    Each chunk counts once, when it is first asked for: later it may be found because this engine has computed it.

    Args:
      records: requests that the second engine has finished.
      stored: of each stored chunk, the hash of its last block.
      hasher: as the engine hashes prompts.
      block_size: tokens in a block.
      blocks_per_chunk: blocks in a chunk.
    """
    chunk_tokens = block_size * blocks_per_chunk
    asked: set[BlockHash] = set()
    num_found = 0
    for record in sorted(records, key=lambda record: record.stats.arrival_s):
        hashes: list[BlockHash] = []
        hasher.extend(hashes, record.prompt_tokens)
        sources = record.stats.prompt_tokens
        for i, last in enumerate(hashes[blocks_per_chunk - 1 :: blocks_per_chunk]):
            if last not in stored:
                break
            if last not in asked:
                asked.add(last)
                num_found += max(0, min(chunk_tokens, sources.hbm + sources.host - i * chunk_tokens))
    return {"stored_tokens_asked_again": len(asked) * chunk_tokens, "found_tokens": num_found}
