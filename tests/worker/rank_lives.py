"""Random lives of data-parallel ranks: a scheduler and an engine for each, one worker for all, every byte checked.

    python -m tests.worker.rank_lives --seeds 100 --steps 200

The engines are those of `tests.multiprocess`, so what a block must hold follows from their calls alone.
"""

import argparse
import functools
import os
import random
from collections import Counter
from typing import Any

from tests.multiprocess.engine import NUM_DOCUMENTS, Engine
from tests.multiprocess.messages import BLOCK_SIZE, MAX_WRITES, NUM_LAYERS, Setup
from tests.multiprocess.settings import available_nbytes, make_config
from tests.multiprocess.stepped_storage import PRIVATE, SHARED, SteppedStorage
from tests.resets import draw_from

PAGE_SHAPE = BLOCK_SIZE, 2, 2, 8
_AUDIT_STEPS = 12


class Faulty:
    """A copier whose dispatches fail at random."""

    def __init__(self, copier: Any, rng: random.Random, probability: float) -> None:
        self._copier, self._rng, self._probability = copier, rng, probability

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copier, name)

    def save(self, *args: Any) -> Any:
        self._maybe_fail()
        return self._copier.save(*args)

    def load(self, *args: Any) -> Any:
        self._maybe_fail()
        return self._copier.load(*args)

    def _maybe_fail(self) -> None:
        if self._rng.random() < self._probability:
            raise RuntimeError("made to fail")


def storage_of(seed: int) -> dict[str, Any]:
    """Settings of storage tiers, none in a fifth of the lives."""
    rng = random.Random(f"{seed} storage")
    tiers = rng.choice(((), (PRIVATE,), (PRIVATE,), (SHARED,), (PRIVATE, SHARED)))
    if not tiers:
        return {}
    return {
        "num_cpu_chunks": rng.choice((6, 12)),
        "storage_tier": ";".join(tiers),
        "num_storage_chunks": ";".join(str(rng.choice((8, 30))) for _ in tiers),
        "storage_write_on": rng.choice(("save", "eviction")),
        "storage_wait_s": 6,  # steps
        "storage_lookup_wait_s": 4,
    }


@functools.cache
def content(seed: int) -> Any:
    """The KV of one block as bits: u16[num_layers, *page_shape]."""
    import numpy as np

    return np.random.default_rng(seed).integers(0, 2**16, (NUM_LAYERS, *PAGE_SHAPE), dtype=np.uint16)


class Lives:
    """Some ranks of two devices each.

    Args:
      seed: random seed.
      num_ranks: at least two.
      faults: probability that a dispatch fails.
      storage_faults: probability that a call of storage fails; half of it, that storage freezes in a step.
      settings: of the library.
    """

    def __init__(
        self, seed: int, *, num_ranks: int = 4, faults: float = 0.0, storage_faults: float = 0.0, **settings: Any
    ) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        from tpu_offload import KVLayout, OffloadScheduler, RankPlans

        self._rng = random.Random(f"{seed} ranks")
        setup = Setup(num_blocks=24, swap_blocks=10, reset=0.01, settings=settings)
        mesh = Mesh(np.array(jax.devices()[: 2 * num_ranks]).reshape(num_ranks, 2), ("rank", "model"))
        sharding = NamedSharding(mesh, PartitionSpec("rank", None, "model"))
        zeros = np.zeros((num_ranks * setup.num_blocks, *PAGE_SHAPE), np.uint16)
        self.caches = [jax.device_put(zeros, sharding) for _ in range(NUM_LAYERS)]
        self.layout = KVLayout.from_caches(self.caches, block_size=BLOCK_SIZE)
        config = make_config(setup, self.layout)
        self._faults, self._config, self._setup = faults, config, setup
        self.storage = SteppedStorage(storage_faults, storage_faults / 2, seed=f"{seed} ranks")
        self.num_steps = 0
        self.worker = self._start_worker()
        self.ranks = RankPlans(num_ranks)
        self.num_blocks = setup.num_blocks
        self.schedulers = [
            OffloadScheduler(config, self.layout, clock=lambda: float(self.num_steps)) for _ in range(num_ranks)
        ]
        for rank, scheduler in enumerate(self.schedulers):
            draw_from(f"{seed} {rank}", scheduler)
        self.engines = [
            Engine(
                Setup(seed=seed * num_ranks + rank, num_blocks=24, swap_blocks=10, reset=0.01, settings=settings),
                scheduler,
            )
            for rank, scheduler in enumerate(self.schedulers)
        ]
        self.num_checked = 0
        self._write = jax.jit(_write, donate_argnums=0, out_shardings=[sharding] * NUM_LAYERS)

    def _start_worker(self) -> Any:
        from tpu_offload import OffloadWorker

        worker = OffloadWorker(
            self._config,
            self.layout,
            self.caches,
            available=available_nbytes(self._setup, self.layout, 0),
            wrap_copier=lambda copier, arena: Faulty(copier, self._rng, self._faults),  # type: ignore[arg-type,return-value]
            clock=lambda: float(self.num_steps),
        )
        worker.wait_until_allocated()
        return worker

    @property
    def counts(self) -> list[Counter[str]]:
        """What happened, by rank."""
        for engine, scheduler in zip(self.engines, self.schedulers, strict=True):
            stats = scheduler.stats()
            engine.counts |= {"stored": stats.cascaded_chunks, "promoted": stats.promoted_chunks}
        return [engine.counts for engine in self.engines]

    def run(self, num_steps: int) -> None:
        """Steps, then loads every document on every rank.

        Raises:
          AssertionError: a block does not have the bytes of its tokens, or a table is inconsistent.
        """
        for _ in range(num_steps):
            planned = [engine.plan() for engine in self.engines]
            self._step([plan for plan, _ in planned], [writes for _, writes in planned])
        self._step([engine.plan_end() for engine in self.engines])
        for document in range(NUM_DOCUMENTS):
            self._step([engine.plan_audit(document) for engine in self.engines])
            for _ in range(_AUDIT_STEPS):
                self._step(
                    [
                        engine.plan_audit(document) if engine.is_arriving else scheduler.plan_step()
                        for engine, scheduler in zip(self.engines, self.schedulers, strict=True)
                    ]
                )
            self._step([engine.plan_end() for engine in self.engines])

    def close(self) -> None:
        """Frees the host memory."""
        self.storage.end()
        self.worker.close()

    def _step(self, plans: list[Any], writes: list[dict[int, int]] = ()) -> None:  # type: ignore[assignment]
        plan = self.ranks.merge(plans)
        self.caches = self.worker.begin_step(plan, self.caches)
        if plan.jobs and self._rng.random() < 0.1:  # a transport may deliver the plans twice
            assert self.ranks.merge(plans) is plan
            self.caches = self.worker.begin_step(plan, self.caches)
        self._forward(writes)
        self.worker.end_step(plan, self.caches)
        self.num_steps += 1
        self.storage.step(self.worker)
        reports = self.ranks.split(self.worker.poll(wait=self._rng.random() < 0.3 and not self.storage.is_frozen))
        for engine, scheduler, report in zip(self.engines, self.schedulers, reports, strict=True):
            engine.take(scheduler.apply(report))
            scheduler.check_invariants()
        self._check()

    def _forward(self, writes: list[dict[int, int]]) -> None:
        import numpy as np

        most = len(self.engines) * MAX_WRITES
        ids, data = np.full(most, 2**30, np.int32), np.zeros((most, NUM_LAYERS, *PAGE_SHAPE), np.uint16)
        rows = [(rank * self.num_blocks + b, seed) for rank, own in enumerate(writes) for b, seed in own.items()]
        for i, (row, seed) in enumerate(rows):
            ids[i], data[i] = row, content(seed)
        self.caches = self._write(self.caches, ids, data)

    def _check(self) -> None:
        import numpy as np

        arrays = [np.asarray(cache) for cache in self.caches]
        for rank, engine in enumerate(self.engines):
            for block, seed in engine.expected().items():
                row = rank * self.num_blocks + block
                for layer, array in enumerate(arrays):
                    assert np.array_equal(array[row], content(seed)[layer]), f"rank {rank} {block=} {layer=}"
                self.num_checked += 1


def _write(caches: Any, ids: Any, data: Any) -> Any:
    return [cache.at[ids].set(data[:, layer], mode="drop") for layer, cache in enumerate(caches)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    total: Counter[str] = Counter()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        lives = Lives(
            seed,
            faults=(seed % 3) * 0.05,
            storage_faults=(seed // 3 % 2) * 0.05,
            max_load_gb_per_step=1e-6 if seed % 2 else 0,
            **storage_of(seed),
        )
        lives.run(args.steps)
        lives.close()
        total.update({"steps": args.steps * len(lives.engines), "checked": lives.num_checked})
        for counts in lives.counts:
            total.update(counts)
        print(seed, dict(total), flush=True)


if __name__ == "__main__":
    main()
