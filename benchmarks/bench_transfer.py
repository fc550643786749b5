"""How fast do blocks move between the caches and the host pool, next to memcpy and to one `device_put` a block?

Each round measures every method once, in turn, in one process, and the ratios are taken within a round, so
that a machine that slows down slows all of them. The peer's method is that of tpu-inference's offload
connector: save by gathering the blocks, splitting them and one `device_put` to host memory for each; load by
one `device_put` for each to the device, and a scatter that the step waits for.

  python benchmarks/bench_transfer.py --num-blocks 1 8 64 --path direct staged --json transfer.json
"""

import argparse
import functools
import json
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from tpu_offload.config import OffloadConfig
from tpu_offload.layout import KVLayout
from tpu_offload.types import Direction, JobState, StepPlan, TransferJob
from tpu_offload.worker import OffloadWorker


class Ours:
    """Blocks through the worker, from the plan to the report."""

    def __init__(self, path, caches, *, num_host_blocks, num_blocks):
        layout = KVLayout.from_caches(caches, block_size=caches[0].shape[1])
        config = OffloadConfig.create(copy_path=path, num_staging_blocks=num_blocks, num_cpu_chunks=num_host_blocks)
        self.worker = OffloadWorker(config, layout, caches)
        self.worker._pool.wait_until_allocated()
        self.num_jobs = 0

    def save(self, caches, block_ids):
        job = self._job(Direction.SAVE, block_ids)
        plan = StepPlan(self.num_jobs, saves=(job,))
        caches = self.worker.begin_step(plan, caches)
        self.worker.end_step(plan, caches)
        return self._finish(caches)

    def load(self, caches, block_ids):
        return self._finish(
            self.worker.begin_step(StepPlan(self.num_jobs, loads=(self._job(Direction.LOAD, block_ids),)), caches)
        )

    def _job(self, direction, block_ids):
        self.num_jobs += 1
        return TransferJob(self.num_jobs, direction, 0, tuple(block_ids), tuple(range(len(block_ids))))

    def _finish(self, caches):
        while not (results := self.worker.poll(wait=True).results):
            self.num_jobs += 1
            caches = self.worker.begin_step(StepPlan(self.num_jobs), caches)
        assert results[0].state is JobState.FINISHED, results
        return jax.block_until_ready(caches)


class Peer:
    """Gather, split, one device_put a block; load with one device_put a block and a blocking scatter."""

    def __init__(self, caches):
        device = next(iter(caches[0].sharding.device_set))
        self.on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        self.on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self.host = []

    @functools.cached_property
    def gather(self):
        return jax.jit(lambda caches, ids: jnp.split(jnp.stack([c[ids] for c in caches], axis=1), len(ids)))

    @functools.cached_property
    def scatter(self):
        def scatter(caches, blocks, ids):
            stacked = jnp.concatenate(blocks)
            return [c.at[ids].set(stacked[:, i]) for i, c in enumerate(caches)]

        return jax.jit(scatter, donate_argnums=0)

    def save(self, caches, block_ids):
        self.host = [jax.device_put(block, self.on_host) for block in self.gather(caches, np.array(block_ids))]
        jax.block_until_ready(self.host)
        return caches

    def load(self, caches, block_ids):
        blocks = [jax.device_put(block, self.on_device) for block in self.host]
        jax.block_until_ready(blocks)
        return jax.block_until_ready(self.scatter(caches, blocks, np.array(block_ids)))


def measure(args, num_blocks, path):
    """One sweep point: GB/s of every method, and ratios within rounds."""
    shape = (max(args.cache_blocks, num_blocks), *args.page_shape)
    keys = jax.random.split(jax.random.key(0), args.num_layers)
    caches = [jax.random.normal(key, shape, jnp.dtype(args.dtype)) for key in keys]
    ours = Ours(path, caches, num_host_blocks=args.host_blocks, num_blocks=num_blocks)
    peer = Peer(caches)
    nbytes = num_blocks * args.num_layers * caches[0].nbytes // shape[0]
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    rng = np.random.default_rng(0)
    rounds = []
    for i in range(args.repeats + 2):
        block_ids = rng.permutation(shape[0])[:num_blocks].tolist()
        seconds = {}
        for name, method in (("ours", ours), ("peer", peer)):
            for direction in ("save", "load"):
                start = time.perf_counter()
                caches = getattr(method, direction)(caches, block_ids)
                seconds[f"{name}_{direction}"] = time.perf_counter() - start
        start = time.perf_counter()
        np.copyto(target, source)
        seconds["memcpy"] = time.perf_counter() - start
        if i >= 2:  # the first rounds compile and touch memory for the first time
            rounds.append(seconds)
    ours.worker.close()
    rates = {name: [nbytes / r[name] / 1e9 for r in rounds] for name in rounds[0]}
    ratios = {
        f"ours_{d}_over_{name}": [r[other] / r[f"ours_{d}"] for r in rounds]
        for d in ("save", "load")
        for name, other in (("memcpy", "memcpy"), ("peer", f"peer_{d}"))
    }
    summary = {key: summarize(values) for key, values in (rates | ratios).items()}
    return {"path": path, "num_blocks": num_blocks, "nbytes": nbytes, "gb_per_s": {k: summary[k] for k in rates},
            "ratios": {k: summary[k] for k in ratios}}  # fmt: skip


def summarize(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", nargs="+", choices=["direct", "staged"], default=["direct"])
    parser.add_argument("--num-blocks", type=int, nargs="+", default=[1, 8, 64], help="blocks in a job")
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument(
        "--page-shape", type=int, nargs="+", default=[16, 8, 2, 128], help="one layer's slice of a block"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cache-blocks", type=int, default=128)
    parser.add_argument("--host-blocks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", help="write the results to this file")
    args = parser.parse_args()
    results = []
    for path in args.path:
        for num_blocks in args.num_blocks:
            result = measure(args, num_blocks, path)
            results.append(result)
            figures = {k: f"{v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f})" for k, v in result["gb_per_s"].items()}
            ratios = {k: f"{v['median']:.2f} ({v['min']:.2f}-{v['max']:.2f})" for k, v in result["ratios"].items()}
            print(f"{path} {num_blocks} blocks, {result['nbytes'] / 2**20:.1f} MiB: GB/s {figures}; ratios {ratios}")
    report = {
        "question": "transfer speed",
        "device": jax.devices()[0].device_kind,
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
