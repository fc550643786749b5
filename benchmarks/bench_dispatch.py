"""How much host time does the library cost the engine's thread in each step?

Measured with real caches and a real worker: idle steps, with and without the engine's loop over the running requests
to find those that completed a block; idle steps and lookups above zero, one and two storage tiers; the dispatch of
saves and loads of 64 blocks, until control returns; a poll while copies are in flight; a snapshot of the statistics,
which vLLM's connector takes every few steps. Also whether a dispatch thread would pay: the same call made directly, and
handed to a waiting thread. The cases are interleaved, so that changes in machine load affect all of them.

Unlike a TPU or GPU, the CPU backend copies before the call returns. So the time inside the compiled programs is
excluded from `save_*` and `load_*` (it is `*_in_program`), and replaced by `dispatch_of_none`, a call of the same
program with no blocks to copy: the sums are the cost to the engine's thread.

  python benchmarks/bench_dispatch.py --num-running 0 32 256 --num-layers 32 --json dispatch.json
"""

import argparse
import concurrent.futures
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from collections.abc import Sequence as List
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from common import Spread, Stopwatch, count, make_parser, write_json
from offload_scheduler import BLOCK_SIZE, computed

from tpu_offload import (
    BlockHash,
    KVLayout,
    OffloadConfig,
    OffloadScheduler,
    OffloadWorker,
    ScheduledRequest,
    Update,
)
from tpu_offload.engine.offloading import Offloading
from tpu_offload.engine.request import Request, SamplingParams
from tpu_offload.engine.sequence import Phase, ScheduledTokens, Sequence
from tpu_offload.kernels import BlockMoves
from tpu_offload.kernels.copier import Caches, Copier, Flight


class NotReady:
    """Replaces a copy's token: on the CPU backend the copy has ended before the first poll."""

    def is_ready(self) -> bool:
        return False


class TimedCopier:
    """Wraps a copy path: adds up the seconds inside its calls, and keeps the last save.

    It is created before the worker, which passes the copy path to `wrap`, possibly several times.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.last_save: Flight | None = None

    def wrap(self, copier: Copier, _: object) -> Copier:
        self.copier = copier
        return cast(Copier, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copier, name)

    def save(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> Flight:
        start_s = time.perf_counter()
        self.last_save = self.copier.save(segment_id, moves, kv_caches)
        self.seconds += time.perf_counter() - start_s
        return self.last_save

    def load(self, segment_id: int, moves: BlockMoves, kv_caches: Caches) -> tuple[Flight, Caches]:
        start_s = time.perf_counter()
        found = self.copier.load(segment_id, moves, kv_caches)
        self.seconds += time.perf_counter() - start_s
        return found


def next_runs(sequences: List[Sequence]) -> list[ScheduledTokens]:
    """A step that computes one token of each sequence."""
    return [ScheduledTokens(sequence, sequence.num_computed_tokens, 1, samples=True) for sequence in sequences]


class Bench:
    def __init__(self, args: argparse.Namespace, *, num_layers: int) -> None:
        self.args = args
        self.rng = random.Random(0)
        self.times = Stopwatch()
        shape = (args.cache_blocks, BLOCK_SIZE, *args.page_shape)
        device = jax.devices()[0]
        self.caches = [jax.device_put(jnp.zeros(shape, jnp.bfloat16), device) for _ in range(num_layers)]
        self.layout = KVLayout.from_caches(self.caches, block_size=BLOCK_SIZE)
        config = OffloadConfig.create(num_cpu_chunks=args.host_chunks, num_staging_blocks=2 * args.num_blocks)
        self.copier = TimedCopier()
        self.scheduler = OffloadScheduler(config, self.layout)
        self.worker = OffloadWorker(config, self.layout, self.caches, wrap_copier=self.copier.wrap)
        self.worker.wait_until_allocated()
        self.scheduler.apply(self.worker.poll())
        self.num_requests = 0

    # Idle steps.

    def idle_steps(self, num_running: int) -> None:
        """One step of the library alone, and one with the engine's loop over a decoding batch."""
        sequences = self.make_sequences(num_running)
        glue = self.make_glue(sequences, decode_save=False)
        everyone = [
            computed(s.request_id, s.block_tables[0], s.block_hashes, s.num_prompt_tokens, s.num_computed_tokens)
            for s in sequences
        ]
        for one in everyone:
            self.scheduler.match(one.request_id, one.block_hashes, num_tokens=2 * BLOCK_SIZE, num_computed_tokens=0)
        self.caches = self.step(everyone)  # their prompts are saved
        self.settle()
        name, batch = f"idle_{num_running}", next_runs(sequences)
        for _ in range(self.args.steps):
            self.caches = self.times(name, self.step, ())
            self.caches, update = self.times(f"{name}_glue", self.glue_step, glue, batch, self.caches)
            assert not update.loaded
            self.caches = self.times(f"{name}_all_named", self.step, everyone)
            self.times(f"{name}_plan", self.scheduler.plan_step, ())
            for sequence in sequences:  # generating; one in 16 completes a block in each step
                sequence.num_computed_tokens += 1
            batch = next_runs(sequences)
        for one in everyone:
            self.scheduler.finish(one.request_id)
        glue.close()
        self.idle_steps_with_decode_save(name, sequences)

    def idle_steps_with_decode_save(self, name: str, sequences: list[Sequence]) -> None:
        glue = self.make_glue(sequences, decode_save=True)
        batch = next_runs(sequences)
        for i in range(self.args.steps):
            if i % 2:
                for sequence in sequences:
                    sequence.num_computed_tokens += 1
                batch = next_runs(sequences)
            part = "_block_completed" if i % 2 else ""
            self.caches, _ = self.times(f"{name}_glue_decode_save{part}", self.glue_step, glue, batch, self.caches)
        glue.close()

    def make_glue(self, sequences: List[Sequence], *, decode_save: bool) -> Offloading:
        """The embedded engine's glue code, for sequences whose prompts are saved."""
        config = OffloadConfig.create(num_cpu_chunks=2 * len(sequences) + 1, decode_save=decode_save)
        glue = Offloading(config, self.layout, self.caches, clock=time.monotonic)
        glue.wait_until_allocated()
        for sequence in sequences:
            num_found = glue.look_up(sequence, num_computed_tokens=sequence.num_computed_tokens)
            assert num_found is not None, "nothing arrives from storage"
            glue.start_load(sequence, num_found)
        batch = next_runs(sequences)
        while True:
            self.caches, _ = self.glue_step(glue, batch, self.caches, wait=True)
            if glue.stats().saved_blocks == 2 * len(sequences):
                return glue

    def make_sequences(self, num_running: int) -> list[Sequence]:
        sequences = []
        for i in range(num_running):
            prompt = tuple(self.rng.randrange(1000) for _ in range(2 * BLOCK_SIZE))
            self.num_requests += 1
            request = Request(
                request_id=f"idle{self.num_requests}", prompt_tokens=prompt, sampling=SamplingParams(max_tokens=100_000)
            )
            sequence = Sequence(request, 0.0, [*prompt, *range(10_000)], phase=Phase.RUNNING)
            sequence.block_tables = [[2 * i % self.args.cache_blocks, (2 * i + 1) % self.args.cache_blocks]]
            sequence.block_hashes = [BlockHash(self.rng.randbytes(16)) for _ in range(2)]
            sequence.num_computed_tokens = 2 * BLOCK_SIZE + i % BLOCK_SIZE
            sequences.append(sequence)
        return sequences

    def step(self, changed: List[ScheduledRequest]) -> Caches:
        plan = self.scheduler.plan_step(changed)
        caches = self.worker.begin_step(plan, self.caches)
        self.worker.end_step(plan, caches)
        self.scheduler.apply(self.worker.poll())
        return caches

    def glue_step(
        self, glue: Offloading, batch: List[ScheduledTokens], caches: Caches, *, wait: bool = False
    ) -> tuple[Caches, Update]:
        plan, caches = glue.before_forward(batch, caches)
        glue.after_forward(plan, caches)
        return caches, glue.poll(wait=wait)

    def steps_above_storage(self, directory: str) -> None:
        """Idle steps, and lookups of new prompts, above so many storage tiers, which are in files and stay empty."""
        sides = [self.make_side(directory, num_tiers) for num_tiers in range(3)]
        for i in range(self.args.steps):
            for num_tiers, (scheduler, worker) in enumerate(sides):
                self.times(f"idle_{num_tiers}_storage_tiers", self.idle_step, scheduler, worker)
                if i % 10 == 0:
                    prompt = [BlockHash(self.rng.randbytes(16)) for _ in range(self.args.num_blocks)]
                    num_tokens = len(prompt) * BLOCK_SIZE
                    name = f"match_{num_tiers}_storage_tiers"
                    self.times(name, scheduler.match, name, prompt, num_tokens=num_tokens, num_computed_tokens=0)
                    scheduler.finish(name)
        for _, worker in sides:
            worker.close()

    def make_side(self, directory: str, num_tiers: int) -> tuple[OffloadScheduler, OffloadWorker]:
        places = [f"{directory}/{num_tiers}-{i},min_free_gb=0" for i in range(num_tiers)]
        config = OffloadConfig.create(
            num_cpu_chunks=self.args.num_blocks,
            storage_tier=["file"] * num_tiers,
            storage_options=places,
            num_storage_chunks=[16] * num_tiers,
        )
        scheduler, worker = OffloadScheduler(config, self.layout), OffloadWorker(config, self.layout, self.caches)
        worker.wait_until_allocated()
        scheduler.apply(worker.poll())
        return scheduler, worker

    def idle_step(self, scheduler: OffloadScheduler, worker: OffloadWorker) -> None:
        plan = scheduler.plan_step()
        caches = worker.begin_step(plan, self.caches)
        worker.end_step(plan, caches)
        scheduler.apply(worker.poll())

    # Copies.

    def copies(self, num_requests: int) -> None:
        """Saves 64 blocks of new prompts, then loads them for other requests."""
        name, per_request = f"{num_requests}_requests", self.args.num_blocks // num_requests
        num_tokens = per_request * BLOCK_SIZE + 1
        prompts = [[BlockHash(self.rng.randbytes(16)) for _ in range(per_request)] for _ in range(num_requests)]
        blocks = self.rng.sample(range(self.args.cache_blocks), self.args.num_blocks)
        tables = [[*blocks[i * per_request : (i + 1) * per_request], 0] for i in range(num_requests)]
        self.saves(name, prompts, tables, num_tokens)

        ids = self.new_ids(num_requests)
        found = self.times(f"load_{name}_match", self.match_all, ids, prompts, num_tokens)
        assert found == [num_tokens - 1] * num_requests
        self.times(f"load_{name}_admit", self.admit_all, ids, tables, num_tokens - 1)
        plan = self.times(f"load_{name}_plan", self.scheduler.plan_step)
        assert len(plan.jobs) == num_requests
        with self.outside_programs(f"load_{name}_begin_step"):
            self.caches = self.worker.begin_step(plan, self.caches)
        self.end(ids)

    def saves(self, name: str, prompts: list[list[BlockHash]], tables: list[list[int]], num_tokens: int) -> None:
        ids = self.new_ids(len(prompts))
        self.match_all(ids, prompts, num_tokens)
        changed = [
            computed(request_id, table, hashes, num_tokens, num_tokens)
            for request_id, table, hashes in zip(ids, tables, prompts, strict=True)
        ]
        plan = self.times(f"save_{name}_plan", self.scheduler.plan_step, changed)
        assert sum(job.num_blocks for job in plan.jobs) == self.args.num_blocks
        caches = self.times(f"save_{name}_begin_step", self.worker.begin_step, plan, self.caches)
        with self.outside_programs(f"save_{name}_end_step"):
            self.worker.end_step(plan, caches)
        flight = self.copier.last_save
        assert flight is not None
        token, flight.waiting_on = flight.waiting_on, cast(jax.Array, NotReady())
        assert not self.times("poll_in_flight", self.worker.poll).results
        flight.waiting_on = token
        self.end(ids)

    @contextlib.contextmanager
    def outside_programs(self, name: str) -> Iterator[None]:
        """Times the block without the time inside compiled programs, which it records separately."""
        self.copier.seconds, start_s = 0.0, time.perf_counter()
        yield
        self.times.record(name, time.perf_counter() - start_s - self.copier.seconds)
        self.times.record(f"{name}_in_program", self.copier.seconds)

    def end(self, ids: list[str]) -> None:
        self.settle()
        for request_id in ids:
            self.scheduler.finish(request_id)

    def new_ids(self, num: int) -> list[str]:
        self.num_requests += num
        return [f"r{self.num_requests - i}" for i in range(num)]

    def match_all(self, ids: list[str], prompts: list[list[BlockHash]], num_tokens: int) -> list[int]:
        match = self.scheduler.match
        found = [match(i, p, num_tokens=num_tokens, num_computed_tokens=0) for i, p in zip(ids, prompts, strict=True)]
        return [one.num_tokens for one in found]

    def admit_all(self, ids: list[str], tables: list[list[int]], num_loaded_tokens: int) -> None:
        for request_id, table in zip(ids, tables, strict=True):
            self.scheduler.admit(request_id, [table], num_loaded_tokens=num_loaded_tokens)

    def settle(self) -> None:
        while self.scheduler.has_jobs:
            self.scheduler.apply(self.worker.poll(wait=True))
            if self.scheduler.has_jobs:
                self.caches = self.step(())
        jax.block_until_ready(self.caches)

    # A dispatch thread.

    def dispatch_here_and_in_a_thread(self, executor: concurrent.futures.Executor) -> None:
        none, times, dispatch = np.zeros(0, np.int32), self.times, self.copier.copier.save
        moves = BlockMoves(none.astype(np.int64), none, none)
        flight = times("dispatch_of_none", dispatch, 0, moves, self.caches)
        flight.waiting_on.block_until_ready()
        start_s = time.perf_counter()
        future = times("dispatch_of_none_thread_submit", executor.submit, dispatch, 0, moves, self.caches)
        flight = future.result()
        times.record("dispatch_of_none_thread_result", time.perf_counter() - start_s)
        flight.waiting_on.block_until_ready()

    def run(self) -> dict[str, Spread]:
        """Microseconds by name."""
        for num_running in self.args.num_running:
            self.idle_steps(num_running)
        with tempfile.TemporaryDirectory() as directory:
            self.steps_above_storage(directory)
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            for i in range(self.args.repeats + 5):
                for num_requests in (1, self.args.num_blocks):
                    self.copies(num_requests)
                self.times("stats", self.scheduler.stats)
                self.dispatch_here_and_in_a_thread(executor)
                if i == 4:  # the first four were warm-up
                    for name, seconds in self.times.seconds.items():
                        if not name.startswith("idle") and "storage" not in name:
                            seconds.clear()
        for num_requests in (1, self.args.num_blocks):
            name = f"{num_requests}_requests"
            save = [f"save_{name}_{part}" for part in ("plan", "begin_step", "end_step")]
            load = [f"load_{name}_{part}" for part in ("match", "admit", "plan", "begin_step")]
            self.times.add(f"save_{name}", *save, "dispatch_of_none")
            self.times.add(f"load_{name}", *load, "dispatch_of_none")
        self.worker.close()
        return self.times.spreads(scale=1e6)


def main(argv: List[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-running", type=int, nargs="+", default=[0, 32, 256], help="number of decoding requests")
    parser.add_argument("--num-layers", type=count, nargs="+", default=[32])
    parser.add_argument("--num-blocks", type=count, default=64, help="blocks in a save or load")
    parser.add_argument("--page-shape", type=count, nargs="+", default=[2, 2, 64], help="after the block size")
    parser.add_argument("--cache-blocks", type=count, default=256)
    parser.add_argument("--host-chunks", type=count, default=1024)
    parser.add_argument("--steps", type=count, default=2000, help="idle steps for each number of running requests")
    parser.add_argument("--repeats", type=count, default=100, help="saves and loads")
    args = parser.parse_args(argv)
    if args.num_blocks > min(args.cache_blocks, args.host_chunks):
        parser.error("--num-blocks exceeds --cache-blocks or --host-chunks")
    results = []
    for num_layers in args.num_layers:
        us = Bench(args, num_layers=num_layers).run()
        results.append({"num_layers": num_layers, "us": us})
        print(f"{num_layers} layers; us, median (p10-p90):")
        for name, spread in us.items():
            print(f"    {name}: {spread.text(1)}")
    write_json(args, question="host time per step", results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
