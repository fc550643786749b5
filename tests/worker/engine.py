"""A stand-in for an engine around a worker, and arrays that are late or broken, for the tests of the worker."""

import functools
import time

import jax
import numpy as np

from tests.caches import PAGE_SHAPE, logical_pages, random_array, random_caches
from tests.inside.worker import host_tier, set_lockstep, slot_pools, tier_group
from tests.jobs import copy_job, host_block_ids
from tpu_offload.config import OffloadConfig
from tpu_offload.errors import TransferError
from tpu_offload.kernels import FusedCopies, reference
from tpu_offload.layout import KVLayout
from tpu_offload.types import Direction, JobKind, JobState, StepPlan
from tpu_offload.worker import OffloadWorker

PATHS = [
    "direct",
    "staged",
    "fused",
    "staged saves, direct loads",
    "direct saves, staged loads",
    "fused saves, staged loads",
    "direct saves, fused loads",
]
BLOCKS_PER_CHUNK = 2
NUM_CHUNKS = 10
CHUNKS_PER_SEGMENT = 4
NUM_HOST_BLOCKS = NUM_CHUNKS * BLOCKS_PER_CHUNK
IDLE = StepPlan(step_id=0)


def split_path(path):
    """The paths of saves and of loads."""
    save, _, load = path.partition(", ")
    return save.removesuffix(" saves"), (load or save).removesuffix(" loads")


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@functools.partial(jax.jit, donate_argnums=(0, 1))
def forward(caches, segment, inputs):
    """A forward pass with the fused copies, whose own result is not used."""
    copies = FusedCopies(segment, inputs)
    x = jax.numpy.zeros(())
    out = []
    for layer, cache in enumerate(caches):
        x, cache = copies.after_layer(layer, x + 1, cache)
        out.append(cache)
    return out, copies.finish()


class EngineBase:
    """A worker with KV caches, and numpy copies of what these should hold: what the engines of the tests share."""

    def __init__(self, rng, caches, layout, settings, **arguments):
        self.rng, self.caches, self.layout = rng, caches, layout
        self.clock = Clock()
        config = OffloadConfig.create(**{"skip_jax_precompile": True} | settings)
        self.worker = OffloadWorker(config, layout, caches, worker_id=3, clock=self.clock, available=2**30, **arguments)
        self.num_jobs = 0
        self.expected = [reference.as_bytes(cache) for cache in caches]

    def new_job_id(self):
        self.num_jobs += 1
        return self.num_jobs

    def in_lockstep(self):
        """As on hosts that share a model."""
        set_lockstep(self.worker, True)

    def step(self):
        """A step with no jobs."""
        raise NotImplementedError

    def scribble(self):
        """What a forward pass does: new bytes in all caches, which donates them."""
        new = [random_array(self.rng, c.shape, c.dtype) for c in self.caches]

        def overwrite(old, new):
            return [jax.lax.dynamic_update_slice(o, n, (0,) * o.ndim) for o, n in zip(old, new, strict=True)]

        write = jax.jit(overwrite, donate_argnums=0, out_shardings=[cache.sharding for cache in self.caches])
        self.caches = write(self.caches, new)
        self.expected = [reference.as_bytes(n) for n in new]

    def drain(self):
        """Steps until nothing is in flight; results by job id."""
        results = {}
        for _ in range(100):
            report = self.worker.poll(wait=True)
            assert report.worker_id == 3
            for result in report.results:
                assert result.job_id not in results
                results[result.job_id] = result
            if not self.worker.has_flights:
                return results
            self.step()
        raise AssertionError("the worker never comes to rest")

    def states(self):
        return {job_id: result.state for job_id, result in self.drain().items()}

    def check_caches(self):
        for cache, wanted in zip(self.caches, self.expected, strict=True):
            np.testing.assert_array_equal(reference.as_bytes(cache), wanted)


class Engine(EngineBase):
    """The usual one: pages of one shape, and a numpy copy of the host tier; `path` is one of PATHS."""

    def __init__(
        self,
        path="direct",
        *,
        dtype="bfloat16",
        num_devices=1,
        wait=True,
        offers_fused=True,
        page_shape=PAGE_SHAPE,
        **settings,
    ):
        self.save_path, self.load_path = split_path(path)
        rng = np.random.default_rng(5)
        caches = random_caches(rng, dtype=dtype, num_devices=num_devices, page_shape=page_shape)
        layout = KVLayout.from_caches(caches, block_size=4)
        settings = {
            "num_staging_blocks": 6,
            "num_cpu_chunks": NUM_CHUNKS,
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            # Not a whole number of chunks: 4.5 of them.
            "host_segment_gb": 4.5 * BLOCKS_PER_CHUNK * layout.block_nbytes / 2**30,
            "save_path": self.save_path,
            "load_path": self.load_path,
        } | settings
        if "fused" in path:
            settings["block_size_buckets"] = (1, 2, 4)  # one or two chunks a step
        super().__init__(rng, caches, layout, settings, fused=offers_fused)
        if wait and self.worker.num_host_chunks:
            self.pool.wait_until_allocated()
            self.memory.lost[:] = False  # what was never saved is zeros, and may be loaded here
        self.step_id = 0
        self.sent_below = 0
        self.num_fused = 0
        self.host = np.zeros((NUM_HOST_BLOCKS, len(self.caches), *self.expected[0].shape[1:]), np.uint8)

    def job(self, direction, block_ids, host_block_ids):
        kind = JobKind.SAVE if direction is Direction.SAVE else JobKind.LOAD
        return copy_job(self.new_job_id(), kind, block_ids, host_block_ids)

    def save(self, block_ids, host_block_ids):
        return self.job(Direction.SAVE, block_ids, host_block_ids)

    def load(self, block_ids, host_block_ids):
        return self.job(Direction.LOAD, block_ids, host_block_ids)

    # What is inside the worker; other files ask here for it.

    @property
    def tier(self):
        return host_tier(self.worker)

    @property
    def group(self):
        return tier_group(self.worker)

    @property
    def flights(self):
        return self.group.flights

    @property
    def saver(self):
        return self.group.copiers[Direction.SAVE]

    @property
    def loader(self):
        return self.group.copiers[Direction.LOAD]

    @property
    def memory(self):
        return self.group.memory

    @property
    def pool(self):
        return self.memory.arena

    @property
    def spec(self):
        return self.memory.spec

    @property
    def segments(self):
        return [self.pool.segment(i) for i in range(-(-self.pool.num_chunks_ready // self.tier.pools.segment_slots[0]))]

    def begin(self, *loads, cancel=()):
        self.step_id += 1
        next_job_id = self.sent(*loads)
        self.plan = StepPlan(step_id=self.step_id, jobs=loads, cancelled_job_ids=tuple(cancel), next_job_id=next_job_id)
        self.caches = self.worker.begin_step(self.plan, self.caches)

    def end(self, *saves):
        self.worker.end_step(StepPlan(step_id=self.step_id, jobs=saves, next_job_id=self.sent(*saves)), self.caches)

    def sent(self, *jobs):
        """The `next_job_id` of a plan with these jobs."""
        self.sent_below = max(self.sent_below, *(job.job_id + 1 for job in jobs), 0)
        return self.sent_below

    def step(self, *, loads=(), saves=(), cancel=()):
        if not self.worker.offers_fused:
            self.begin(*loads, cancel=cancel)
            self.end(*saves)
            return
        self.step_id += 1
        plan = StepPlan(step_id=self.step_id, jobs=(*loads, *saves), cancelled_job_ids=tuple(cancel))
        self.caches = self.worker.begin_step(plan, self.caches, fuse=True)
        fused = self.worker.fused_step()
        self.num_fused += fused.inputs is not None
        self.caches, outcome = forward(self.caches, *fused)
        self.worker.end_step(plan, self.caches, outcome)

    def expect_saved(self, job):
        self.host = reference.save(self.host, self.expected, job.block_ids, host_block_ids(job))

    def expect_loaded(self, job):
        self.expected = reference.load(self.expected, self.host, job.block_ids, host_block_ids(job))

    def check_round_trip(self):
        """Saves four blocks and loads them into others: every bit is where it should be."""
        save, load = self.save([0, 1, 2, 3], [4, 5, 6, 7]), self.load([8, 9, 10, 11], [4, 5, 6, 7])
        self.step(saves=[save])
        self.expect_saved(save)
        assert self.states() == {save.job_id: FINISHED}
        self.step(loads=[load])
        self.expect_loaded(load)
        assert self.states() == {load.job_id: FINISHED}
        self.check()

    def host_bytes(self):
        segments = [np.concatenate([self.page_bytes(part) for part in s], axis=1) for s in self.segments]
        return np.concatenate(segments)[:NUM_HOST_BLOCKS]

    def page_bytes(self, pool):
        """The bytes of the pages in an array of the pool, in the order in which the caches have them."""
        return reference.as_bytes(logical_pages(np.asarray(pool), self.spec))

    def expect_what_is_there(self):
        """From here on: whatever was done until now was right."""
        self.expected = [reference.as_bytes(cache) for cache in self.caches]
        self.host = self.host_bytes()

    def check(self):
        np.testing.assert_array_equal(self.host_bytes(), self.host)
        self.check_caches()


FINISHED, FAILED, CANCELLED = JobState.FINISHED, JobState.FAILED, JobState.CANCELLED


def broken(error, *, takes=None):
    """Stands for a method of a copier that dispatches a program: it raises.

    The program may destroy the donated array: the caches ("caches"), or a segment of a pool (the pool).
    """

    def method(*args):
        if takes == "caches":
            for cache in args[-1]:
                cache.delete()
        elif takes is not None:
            for part in takes.segment(getattr(args[0], "segment_id", args[0])):
                part.delete()
        raise error

    return method


def ending_with(save, token):
    """A copier's `save` or `resume_save` with another token."""

    def method(*args):
        flight = save(*args)
        (flight or args[0]).waiting_on = token
        return flight

    return method


def wait_until_rebuilt(pool, segment_id):
    """A segment that was lost has been allocated again."""
    while True:
        try:
            pool.segment(segment_id)
        except TransferError:
            time.sleep(0.001)
        else:
            return


class Poisoned:
    """A token or a staging array whose computation failed on the device."""

    def is_ready(self):
        return True

    def copy_to_host_async(self):
        pass

    def block_until_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: core halted")

    def __array__(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: core halted")


class Unpollable(Poisoned):
    """Likewise; already polling it raises."""

    def is_ready(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: core halted, as polling says")


class Slow:
    """A fake array that is not ready until the test sets it ready, or has polled it a given number of times."""

    def __init__(self, array, ready_after=None):
        self.array, self.ready, self.blocked = array, False, 0
        self.num_looks, self.ready_after = 0, ready_after

    def is_ready(self):
        self.num_looks += 1
        self.ready = self.ready or self.num_looks == self.ready_after
        return self.ready

    def block_until_ready(self):
        self.blocked += 1
        self.ready = True
        return self.array.block_until_ready()

    def __array__(self, *args, **kwargs):
        assert self.ready, "the worker waited for a token"
        return np.asarray(self.array)


def slow_down(engine, index=0, *, ready_after=None):
    flight = engine.flights[index]
    flight.waiting_on = Slow(flight.waiting_on, ready_after)
    return flight.waiting_on


def make_landings_slow(engine, monkeypatch):
    """From now on what is written into slots does not end before its tokens, which are returned, are set ready."""
    slow: list[Slow] = []

    def slowed(write):
        def slowly(*args):
            slow.append(Slow(write(*args)))
            return slow[-1]

        return slowly

    for pool in slot_pools(engine.worker):
        for copier in pool.copiers:
            monkeypatch.setattr(copier, "write", slowed(copier.write))
    return slow
