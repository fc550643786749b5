"""How much host time does the library take from the engine's thread in each step?

Measured with real caches and a real worker: steps in which nothing is to be done, with and without the loop
over the running requests that an engine needs to find out which completed a block; the dispatch of saves and
loads of 64 blocks, up to the moment control returns; a poll while copies are in flight. And whether it would
pay to dispatch from a thread of its own: the same call made here, and handed to a thread that is waiting for
work. The cases take turns, so that a machine that slows down slows all of them.

The CPU backend copies before the call returns, which a TPU or GPU does not. So the time inside the compiled
programs is taken out of `save_*` and `load_*`, and `dispatch_of_none`, the same program called to copy no block,
is put in its place: their sums are what the engine's thread pays. What was taken out is `*_in_program`.

  python benchmarks/bench_dispatch.py --num-running 0 32 256 --num-layers 32 --json dispatch.json
"""

import argparse
import concurrent.futures
import json
import os
import platform
import random
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from tpu_offload import KVLayout, OffloadConfig, OffloadScheduler, OffloadWorker, ScheduledRequest
from tpu_offload.engine.offloading import Offloading, Seams
from tpu_offload.engine.request import Request, SamplingParams
from tpu_offload.engine.sequence import Phase, ScheduledTokens, Sequence
from tpu_offload.kernels import Rows
from tpu_offload.types import Direction, JobKind

BLOCK_SIZE = 16


class NotReady:
    """In place of a copy's token: on the CPU backend the copy is over before anyone can ask."""

    def is_ready(self):
        return False


def next_runs(sequences):
    """A step that computes one token of each."""
    return [ScheduledTokens(sequence, sequence.num_computed_tokens, 1, samples=True) for sequence in sequences]


class Times:
    """Collects seconds under names."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, name, function, *args, **kwargs):
        start = time.perf_counter()
        result = function(*args, **kwargs)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    def add(self, name, *parts):
        self.seconds[name] = [sum(times) for times in zip(*(self.seconds[part] for part in parts), strict=True)]


class Bench:
    def __init__(self, args):
        self.args = args
        self.rng = random.Random(0)
        self.times = Times()
        shape = (args.cache_blocks, BLOCK_SIZE, *args.page_shape)
        device = jax.devices()[0]
        self.caches = [jax.device_put(jnp.zeros(shape, jnp.bfloat16), device) for _ in range(args.num_layers)]
        self.layout = KVLayout.from_caches(self.caches, block_size=BLOCK_SIZE)
        self.config = OffloadConfig.create(num_cpu_chunks=args.host_chunks, num_staging_blocks=2 * args.num_blocks)
        self.scheduler = OffloadScheduler(self.config, self.layout)
        self.worker = OffloadWorker(self.config, self.layout, self.caches)
        self.worker.wait_until_allocated()
        self.scheduler.apply(self.worker.poll())
        self.num_requests = 0
        saver, loader = (
            self.worker._tier._groups[0].copiers[direction] for direction in (Direction.SAVE, Direction.LOAD)
        )
        self.dispatch = saver.save
        self.in_program_s = 0.0
        saver.save, loader.load = self.clocked(saver.save), self.clocked(loader.load)

    # Nothing to do.

    def idle_steps(self, num_running):
        """One step each: the library alone, and with the engine's loop over a batch that decodes."""
        sequences = self.make_sequences(num_running)
        glue = Offloading.__new__(Offloading)  # with this scheduler and worker
        glue._scheduler, glue._worker = self.scheduler, self.worker
        glue._block_size, glue._decode_save, glue._watched = BLOCK_SIZE, False, set()
        glue._saves_on_compute, glue._num_groups = True, 1
        glue._relay = Seams().relay
        for sequence in sequences:
            glue.start_load(sequence)
        batch = next_runs(sequences)
        self.caches, _ = self.glue_step(glue, batch, self.caches)  # all are offered; their prompts are saved
        self.settle()
        everyone = [
            ScheduledRequest(
                request_id=s.request_id,
                block_ids=s.block_ids,
                block_hashes=s.block_hashes,
                num_prompt_tokens=s.num_prompt_tokens,
                num_computed_tokens=s.num_computed_tokens,
            )
            for s in sequences
        ]
        for _ in range(self.args.steps):
            self.caches = self.times(f"idle_{num_running}", self.step, ())
            self.caches, update = self.times(f"idle_{num_running}_glue", self.glue_step, glue, batch, self.caches)
            assert not update.loaded
            self.caches = self.times(f"idle_{num_running}_all_named", self.step, everyone)
            self.times(f"idle_{num_running}_plan", self.scheduler.plan_step, ())
            for sequence in sequences:  # they generate; one in 16 completes a block in each step
                sequence.num_computed_tokens += 1
            batch = next_runs(sequences)
        glue._decode_save = True
        for sequence in sequences:
            glue.start_load(sequence)
        for i in range(self.args.steps):
            if i % 2:
                name = f"idle_{num_running}_glue_decode_save_block_completed"
                for sequence in sequences:
                    sequence.num_computed_tokens += 1
                batch = next_runs(sequences)
            else:
                name = f"idle_{num_running}_glue_decode_save"
            self.caches, _ = self.times(name, self.glue_step, glue, batch, self.caches)
        for sequence in sequences:
            self.scheduler.finish(sequence.request_id)

    def make_sequences(self, num_running):
        sequences = []
        for i in range(num_running):
            prompt = tuple(self.rng.randrange(1000) for _ in range(2 * BLOCK_SIZE))
            self.num_requests += 1
            request = Request(f"idle{self.num_requests}", prompt, SamplingParams(max_tokens=100_000))
            sequence = Sequence(request, 0.0, [*prompt, *range(10_000)], phase=Phase.RUNNING)
            sequence.block_ids = [2 * i % self.args.cache_blocks, (2 * i + 1) % self.args.cache_blocks]
            sequence.block_hashes = [self.rng.randbytes(16) for _ in range(2)]
            sequence.num_computed_tokens = 2 * BLOCK_SIZE + i % BLOCK_SIZE
            sequences.append(sequence)
        return sequences

    def step(self, changed):
        plan = self.scheduler.plan_step(changed)
        caches = self.worker.begin_step(plan, self.caches)
        self.worker.end_step(plan, caches)
        self.scheduler.apply(self.worker.poll())
        return caches

    def glue_step(self, glue, batch, caches):
        plan, caches = glue.before_forward(batch, caches)
        glue.after_forward(plan, caches)
        return caches, glue.poll(wait=False)

    # Copies.

    def copies(self, num_requests):
        """Saves 64 blocks of new prompts, then loads them for other requests."""
        name, per_request = f"{num_requests}_requests", self.args.num_blocks // num_requests
        num_tokens = per_request * BLOCK_SIZE + 1
        prompts = [[self.rng.randbytes(16) for _ in range(per_request)] for _ in range(num_requests)]
        blocks = self.rng.sample(range(self.args.cache_blocks), self.args.num_blocks)
        tables = [[*blocks[i * per_request : (i + 1) * per_request], 0] for i in range(num_requests)]
        ids = self.new_ids(num_requests)
        for request_id, hashes in zip(ids, prompts, strict=True):
            self.scheduler.match(request_id, hashes, num_tokens=num_tokens, num_computed_tokens=0)
        changed = [
            ScheduledRequest(
                request_id=request_id,
                block_ids=table,
                block_hashes=hashes,
                num_prompt_tokens=num_tokens,
                num_computed_tokens=num_tokens,
            )
            for request_id, table, hashes in zip(ids, tables, prompts, strict=True)
        ]
        plan = self.times(f"save_{name}_plan", self.scheduler.plan_step, changed)
        assert sum(job.num_blocks for job in plan.of(JobKind.SAVE)) == self.args.num_blocks
        caches = self.times(f"save_{name}_begin_step", self.worker.begin_step, plan, self.caches)
        self.times_outside(f"save_{name}_end_step", self.worker.end_step, plan, caches)
        (flight,) = self.worker._tier._groups[0].flights
        token, flight.waiting_on = flight.waiting_on, NotReady()
        assert not self.times("poll_in_flight", self.worker.poll).results
        flight.waiting_on = token
        self.settle()
        for request_id in ids:
            self.scheduler.finish(request_id)

        ids = self.new_ids(num_requests)
        found = self.times(f"load_{name}_match", self.match_all, ids, prompts, num_tokens)
        assert found == [num_tokens - 1] * num_requests
        self.times(f"load_{name}_admit", self.admit_all, ids, tables, num_tokens - 1)
        plan = self.times(f"load_{name}_plan", self.scheduler.plan_step)
        assert len(plan.of(JobKind.LOAD)) == num_requests
        self.caches = self.times_outside(f"load_{name}_begin_step", self.worker.begin_step, plan, self.caches)
        self.settle()
        for request_id in ids:
            self.scheduler.finish(request_id)

    def clocked(self, method):
        def call(*args):
            start = time.perf_counter()
            result = method(*args)
            self.in_program_s += time.perf_counter() - start
            return result

        return call

    def times_outside(self, name, function, *args):
        """Times a call, less what it spends in compiled programs."""
        self.in_program_s = 0.0
        result = self.times(name, function, *args)
        self.times.seconds[name][-1] -= self.in_program_s
        self.times.seconds.setdefault(f"{name}_in_program", []).append(self.in_program_s)
        return result

    def new_ids(self, num):
        self.num_requests += num
        return [f"r{self.num_requests - i}" for i in range(num)]

    def match_all(self, ids, prompts, num_tokens):
        match = self.scheduler.match
        found = [match(i, p, num_tokens=num_tokens, num_computed_tokens=0) for i, p in zip(ids, prompts, strict=True)]
        return [one.num_tokens for one in found]

    def admit_all(self, ids, tables, num_loaded_tokens):
        for request_id, table in zip(ids, tables, strict=True):
            self.scheduler.admit(request_id, table, num_loaded_tokens=num_loaded_tokens)

    def settle(self):
        while self.scheduler.has_jobs:
            self.scheduler.apply(self.worker.poll(wait=True))
            if self.scheduler.has_jobs:
                self.caches = self.step(())
        jax.block_until_ready(self.caches)

    # A thread for the dispatch.

    def dispatch_here_and_in_a_thread(self, executor):
        nothing = np.zeros(0, np.int32)
        call = (self.dispatch, 0, Rows(nothing.astype(np.int64), nothing, nothing), self.caches)
        flight = self.times("dispatch_of_none", *call)
        flight.waiting_on.block_until_ready()
        start = time.perf_counter()
        future = executor.submit(*call)
        submitted = time.perf_counter()
        flight = future.result()
        ended = time.perf_counter()
        self.times.seconds.setdefault("dispatch_of_none_thread_submit", []).append(submitted - start)
        self.times.seconds.setdefault("dispatch_of_none_thread_result", []).append(ended - start)
        flight.waiting_on.block_until_ready()

    def run(self):
        for num_running in self.args.num_running:
            self.idle_steps(num_running)
        with concurrent.futures.ThreadPoolExecutor(1) as executor:
            for i in range(self.args.repeats + 5):
                for num_requests in (1, self.args.num_blocks):
                    self.copies(num_requests)
                self.dispatch_here_and_in_a_thread(executor)
                if i == 4:  # what came before was the first use of everything
                    for name in self.times.seconds:
                        if not name.startswith("idle"):
                            self.times.seconds[name] = []
        for num_requests in (1, self.args.num_blocks):
            name = f"{num_requests}_requests"
            save = [f"save_{name}_{part}" for part in ("plan", "begin_step", "end_step")]
            load = [f"load_{name}_{part}" for part in ("match", "admit", "plan", "begin_step")]
            self.times.add(f"save_{name}", *save, "dispatch_of_none")
            self.times.add(f"load_{name}", *load, "dispatch_of_none")
        return {name: summarize([1e6 * s for s in seconds]) for name, seconds in self.times.seconds.items() if seconds}


def summarize(values):
    deciles = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1], "num": len(values)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-running", type=int, nargs="+", default=[0, 32, 256], help="requests that decode")
    parser.add_argument("--num-layers", type=int, nargs="+", default=[32])
    parser.add_argument("--num-blocks", type=int, default=64, help="blocks in a save or load")
    parser.add_argument("--page-shape", type=int, nargs="+", default=[2, 2, 64], help="after the block size")
    parser.add_argument("--cache-blocks", type=int, default=256)
    parser.add_argument("--host-chunks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000, help="idle steps for each number of running requests")
    parser.add_argument("--repeats", type=int, default=100, help="saves and loads")
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    results = []
    for num_layers in args.num_layers:
        point = argparse.Namespace(**{**vars(args), "num_layers": num_layers})
        microseconds = Bench(point).run()
        results.append({"num_layers": num_layers, "us": microseconds})
        print(f"{num_layers} layers; us, median (p10-p90):")
        for name, figures in microseconds.items():
            print(f"    {name}: {figures['median']:.1f} ({figures['p10']:.1f}-{figures['p90']:.1f})")
    report = {
        "question": "host time per step",
        "device": jax.devices()[0].device_kind,
        "num_cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__},
        "settings": vars(args),
        "results": results,
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
