"""Block tables that an engine fills anew in every step, with real bytes: every prompt gets its own KV."""

import array
import collections
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_offload import BlockHasher, KVLayout, OffloadConfig, OffloadScheduler, OffloadWorker, ScheduledRequest
from tpu_offload.types import BlockHash

BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 64, 12
JUNK = 7  # a block that holds nobody's KV


class Rows:
    """One table a request, given as something that holds another request's blocks, or junk, from the next call on."""

    def __init__(self, wrap: Callable[[np.ndarray], Any]) -> None:
        self.wrap = wrap
        self.given: list[np.ndarray] = []

    def __call__(self, block_ids: Sequence[int]) -> Any:
        row = np.full(WIDTH, JUNK, np.int64)
        row[: len(block_ids)] = block_ids
        self.given.append(row)
        return self.wrap(row)

    def reuse(self) -> None:
        """What was given so far is filled with something else."""
        for row, other in zip(self.given, [*self.given[1:], np.full(WIDTH, JUNK)], strict=True):
            row[:] = np.roll(other, 1)


class Lists(Rows):
    """The same with lists, deques and arrays, which own their memory."""

    def __init__(self, make: Callable[[list[int]], Any]) -> None:
        super().__init__(lambda row: row)
        self.make = make
        self.held: list[Any] = []

    def __call__(self, block_ids: Sequence[int]) -> Any:
        self.held.append(self.make([*block_ids, JUNK]))
        return self.held[-1]

    def reuse(self) -> None:
        for table in self.held:
            for i in range(len(table)):
                table[i] = (table[i] + 1) % NUM_BLOCKS


FORMS: dict[str, Callable[[], Rows]] = {
    "rows": lambda: Rows(lambda row: row),
    "views of rows": lambda: Rows(lambda row: row[: WIDTH - 1]),
    "columns": lambda: Rows(lambda row: np.stack([row, row]).T[:, 0]),
    "memory views": lambda: Rows(memoryview),
    "lists": lambda: Lists(list),
    "deques": lambda: Lists(collections.deque),
    "arrays": lambda: Lists(lambda ids: array.array("i", ids)),
    "jax arrays": lambda: Rows(lambda row: jnp.array(row, jnp.int32)),
    "tuples": lambda: Rows(lambda row: tuple(row.tolist())),
}


class Engine:
    """Prompts whose KV is their tokens, in one cache of real bytes."""

    def __init__(self, rows: Rows, *, blocks_per_chunk: int, save_on: str = "compute") -> None:
        self.rows = rows
        self.caches = [jax.device_put(np.zeros((NUM_BLOCKS, BLOCK_SIZE, 2), np.float32), jax.devices()[0])]
        layout = KVLayout.from_caches(self.caches, block_size=BLOCK_SIZE)
        config = OffloadConfig.create(
            num_cpu_chunks=32,
            num_staging_blocks=2,  # most of a prompt is saved by steps that say nothing of it
            blocks_per_chunk=blocks_per_chunk,
            save_on=save_on,
            skip_jax_precompile=True,
            metrics_log_interval=0,
        )
        self.scheduler = OffloadScheduler(config, layout)
        self.worker = OffloadWorker(config, layout, self.caches, available=2**30)
        self.worker.wait_until_allocated()
        self.scheduler.apply(self.worker.poll())
        self.hasher = BlockHasher(layout.fingerprint(), block_size=BLOCK_SIZE)
        self.rng = random.Random(0)
        self.tables: dict[str, list[int]] = {}

    def hashes(self, tokens: Sequence[int]) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        self.hasher.extend(hashes, tokens)
        return hashes

    def grant(self, name: str, num_blocks: int) -> list[int]:
        taken = {JUNK, *(block for table in self.tables.values() for block in table)}
        self.tables[name] = self.rng.sample(sorted(set(range(NUM_BLOCKS)) - taken), num_blocks)
        return self.tables[name]

    def write(self, block_ids: Sequence[int], tokens: Sequence[int]) -> None:
        kv = np.repeat(np.array(tokens, np.float32).reshape(-1, BLOCK_SIZE, 1), 2, axis=2)
        self.caches = [cache.at[np.array(block_ids)].set(kv) for cache in self.caches]

    def step(
        self, changed: Sequence[ScheduledRequest] = (), computed: Sequence[tuple[list[int], list[int]]] = ()
    ) -> None:
        plan = self.scheduler.plan_step(changed)
        self.caches = self.worker.begin_step(plan, self.caches)
        self.rows.reuse()
        for block_ids, tokens in computed:
            self.write(block_ids, tokens)
        self.worker.end_step(plan, self.caches)
        self.scheduler.apply(self.worker.poll(wait=True))
        self.scheduler.check_invariants()

    def compute(self, prompts: dict[str, list[int]]) -> None:
        """Computes some prompts in one step, and goes on until they are saved."""
        changed, computed = [], []
        for name, tokens in prompts.items():
            block_ids = self.grant(name, len(tokens) // BLOCK_SIZE)
            self.scheduler.admit(name, [self.rows(block_ids)], num_loaded_tokens=0)
            table = self.rows(block_ids)
            changed.append(
                ScheduledRequest(
                    request_id=name,
                    block_tables=[table],
                    block_hashes=self.hashes(tokens),
                    num_prompt_tokens=len(tokens),
                    num_computed_tokens=len(tokens),
                )
            )
            computed.append((block_ids, tokens))
        self.step(changed, computed)
        for _ in range(20):
            self.step()

    def load(self, name: str, tokens: list[int]) -> None:
        """Loads what is there of a prompt and looks at every byte."""
        num_loaded = 0
        while num_loaded < len(tokens):
            self.scheduler.finish(name)
            self.tables.pop(name, None)
            block_ids = self.grant(name, len(tokens) // BLOCK_SIZE)
            num_tokens = self.scheduler.match(
                name, self.hashes(tokens), num_tokens=len(tokens) + 1, num_computed_tokens=num_loaded
            ).num_tokens
            assert num_tokens, f"{num_loaded} of {len(tokens)} tokens of {name} are there"
            self.scheduler.admit(name, [self.rows(block_ids)], num_loaded_tokens=num_tokens)
            self.rows.reuse()
            self.step()
            first, end = num_loaded // BLOCK_SIZE, (num_loaded + num_tokens) // BLOCK_SIZE
            got = np.asarray(self.caches[0])[block_ids[first:end], :, 0].ravel()
            assert got.tolist() == tokens[num_loaded : num_loaded + num_tokens], "another prompt's KV"
            num_loaded += num_tokens
        self.finish(name)

    def finish(self, name: str, *, held: ScheduledRequest | None = None) -> None:
        if held is not None:
            self.scheduler.preempt(name, held=held)
            self.rows.reuse()
            self.step()
        self.scheduler.finish(name)
        del self.tables[name]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_every_prompt_gets_its_own_kv_from_tables_that_are_reused(form, blocks_per_chunk):
    engine = Engine(FORMS[form](), blocks_per_chunk=blocks_per_chunk)
    prompts = {f"p{i}": list(range(100 * i, 100 * i + 4 * (4 + 2 * (i % 3)))) for i in range(1, 5)}
    engine.compute(prompts)
    for name in prompts:
        engine.finish(name)
    engine.write(range(NUM_BLOCKS), [-1] * (NUM_BLOCKS * BLOCK_SIZE))
    for name, tokens in prompts.items():
        engine.load(f"{name} again", tokens)
    stats = engine.scheduler.stats()
    assert stats.staging_reserved_blocks == stats.num_jobs_in_flight == stats.num_failed_jobs == 0
    engine.worker.close()


@pytest.mark.parametrize("form", FORMS)
def test_what_a_preempted_request_held_is_read_at_once(form):
    engine = Engine(FORMS[form](), blocks_per_chunk=2, save_on="preemption")
    tokens = list(range(300, 308))
    block_ids = engine.grant("a", 2)
    engine.scheduler.admit("a", [engine.rows(block_ids)], num_loaded_tokens=0)
    engine.write(block_ids, tokens)
    engine.finish(
        "a",
        held=ScheduledRequest(
            request_id="a",
            block_tables=[engine.rows(block_ids)],
            block_hashes=engine.hashes(tokens),
            num_prompt_tokens=8,
            num_computed_tokens=8,
        ),
    )
    engine.load("b", tokens)
    engine.worker.close()


def test_blocks_that_the_engine_has_moved_are_read_where_they_are():
    """An engine that finds the same KV in other blocks may give up its own, if it says so in the next step."""
    engine = Engine(FORMS["rows"](), blocks_per_chunk=1)
    tokens = list(range(400, 432))
    block_ids = engine.grant("a", 8)
    hashes = engine.hashes(tokens)
    named = [
        ScheduledRequest(
            request_id="a",
            block_tables=[engine.rows(block_ids)],
            block_hashes=hashes,
            num_prompt_tokens=32,
            num_computed_tokens=32,
        )
    ]
    engine.step(named, [(block_ids, tokens)])  # two staging blocks: two of eight are saved
    moved = [block for block in range(NUM_BLOCKS) if block not in block_ids and block != JUNK][:8]
    engine.write(moved, tokens)
    engine.write(block_ids, [-1] * 32)
    engine.step(
        [
            ScheduledRequest(
                request_id="a",
                block_tables=[engine.rows(moved)],
                block_hashes=hashes,
                num_prompt_tokens=32,
                num_computed_tokens=32,
            )
        ]
    )
    for _ in range(8):
        engine.step()
    engine.tables["a"] = moved
    engine.finish("a")
    engine.load("b", tokens)
    engine.worker.close()
