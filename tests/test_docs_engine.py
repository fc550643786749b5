"""The code in docs/engine.md runs, and does what it says."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import tpu_offload
from tests.caches import random_caches
from tests.worker.engine import Engine
from tpu_offload import FusedCopies, JobKind, OffloadConfig, OffloadWorker, StepPlan
from tpu_offload.kernels import reference
from tpu_offload.types import BlockHash

DOCS = Path(__file__).parents[1] / "docs" / "engine.md"
PLAIN, FUSED = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_a_request_that_is_saved_and_one_that_loads(monkeypatch):
    """The same prompt twice, by the code as it stands there."""
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "8")
    setup, life = PLAIN.split("\n# When a request")
    caches = random_caches(np.random.default_rng(0), num_blocks=8)
    before = [reference.as_bytes(cache) for cache in caches]
    names = {name: getattr(tpu_offload, name) for name in tpu_offload.__all__} | {
        "kv_caches": caches,
        "tokens": range(40),  # two blocks of 16, and some
        "in_hbm": 0,
        "forward": lambda caches, _: caches,
    }
    exec(setup.replace("worker_id=0)", "worker_id=0, available=2**30)"), names)
    names["worker"].wait_until_allocated()
    names["scheduler"].apply(names["worker"].poll())
    for request_id, block_ids in (("a", [5, 3, 1]), ("b", [0, 2, 4])):
        hashes: list[BlockHash] = []
        names["hasher"].extend(hashes, range(40))
        held = tpu_offload.ScheduledRequest(
            request_id=request_id,
            block_tables=[block_ids],
            block_hashes=hashes,
            num_prompt_tokens=40,
            num_computed_tokens=40,
        )
        names |= {"request_id": request_id, "block_ids": block_ids, "changed": [held]}
        exec("#" + life, names)
        while names["scheduler"].has_jobs:
            names["scheduler"].apply(names["worker"].poll(wait=True))
    assert names["found"] == tpu_offload.Match(num_tokens=32, state=tpu_offload.MatchState.HIT)
    assert names["plan"].of(JobKind.LOAD)
    for cache, old in zip(names["kv_caches"], before, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(cache)[[0, 2]], old[[5, 3]])
    names["worker"].close()


def test_the_first_lookup_after_a_restart(tmp_path, monkeypatch):
    """The code there has applied the workers' first reports by then, so what they have in storage is found."""
    monkeypatch.setenv("TPU_OFFLOAD_NUM_CPU_CHUNKS", "8")
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_TIER", "file")
    monkeypatch.setenv("TPU_OFFLOAD_STORAGE_OPTIONS", f"{tmp_path},min_free_gb=0,direct=off")
    monkeypatch.setenv("TPU_OFFLOAD_NUM_STORAGE_CHUNKS", "8")
    setup = PLAIN.split("\n# When a request")[0].replace("worker_id=0)", "worker_id=0, available=2**30)")
    for num_kept in (0, 2):
        names = {"kv_caches": random_caches(np.random.default_rng(0), num_blocks=8)}
        exec(setup, names)
        scheduler, worker, caches = names["scheduler"], names["worker"], names["kv_caches"]
        hashes: list[BlockHash] = []
        names["hasher"].extend(hashes, range(40))
        assert scheduler.num_cached_tokens(hashes, num_tokens=40) == num_kept * 16
        worker.wait_until_allocated()
        scheduler.apply(worker.poll())
        held = tpu_offload.ScheduledRequest(
            request_id="a", block_tables=[[5, 3]], block_hashes=hashes, num_prompt_tokens=40, num_computed_tokens=32
        )
        changed = [held]
        while changed or scheduler.has_jobs:
            plan, changed = scheduler.plan_step(changed), []
            caches = worker.begin_step(plan, caches)
            worker.end_step(plan, caches)
            scheduler.apply(worker.poll(wait=True))
        worker.close()


@pytest.mark.parametrize("told_by", ["abort_step", "preempt", "finish"])
def test_a_forward_pass_that_failed_and_left_the_caches_whole(told_by):
    """By "Failed steps": nothing of it is saved, though its saves were planned and the engine goes on."""
    caches = random_caches(np.random.default_rng(0), num_blocks=8)
    layout = tpu_offload.KVLayout.from_caches(caches, block_size=4, model="m")
    config = OffloadConfig.create(num_cpu_chunks=8, skip_jax_precompile=True)
    scheduler = tpu_offload.OffloadScheduler(config, layout)
    worker = OffloadWorker(config, layout, caches, available=2**30)
    worker.wait_until_allocated()
    scheduler.apply(worker.poll())
    hashes: list[BlockHash] = []
    tpu_offload.BlockHasher(layout.fingerprint(), block_size=4).extend(hashes, range(16))

    def named(num_computed_tokens):
        return tpu_offload.ScheduledRequest(
            request_id="a",
            block_tables=[[5, 3, 1, 7]],
            block_hashes=hashes,
            num_prompt_tokens=16,
            num_computed_tokens=num_computed_tokens,
        )

    plan = scheduler.plan_step([named(16)])
    assert plan.of(JobKind.SAVE)
    caches = worker.begin_step(plan, caches)
    # Here the pass fails. There is no `end_step`.
    if told_by == "abort_step":
        worker.abort_step(plan)
        scheduler.abort_step(plan)
    else:
        getattr(scheduler, told_by)("a")
    for _ in range(4):
        plan = scheduler.plan_step()
        assert not plan.jobs
        caches = worker.begin_step(plan, caches)
        worker.end_step(plan, caches)
        scheduler.apply(worker.poll())
    found = scheduler.match("b", hashes, num_tokens=16, num_computed_tokens=0)
    assert found.state is tpu_offload.MatchState.MISS
    plan = scheduler.plan_step([named(16)])  # computed in the end
    caches = worker.begin_step(plan, caches)
    worker.end_step(plan, caches)
    while scheduler.has_jobs:
        scheduler.apply(worker.poll(wait=True))
    assert scheduler.match("c", hashes, num_tokens=17, num_computed_tokens=0).num_tokens == 16
    worker.close()


def test_a_step_with_fused_copies():
    """A save in one step and a load in the next, by the code as it stands there."""
    setup, step = FUSED.split("\nkv_caches = worker.begin_step")
    setup = setup.replace("fused=True)", "fused=True, available=2**30)")  # host memory: not all that is free
    engine = Engine()  # for its caches
    engine.worker.close()
    before = [reference.as_bytes(cache) for cache in engine.caches]
    settings = {"save_path": "fused", "load_path": "fused", "num_staging_blocks": 4, "num_cpu_chunks": 8}
    names = {
        "FusedCopies": FusedCopies,
        "OffloadWorker": OffloadWorker,
        "config": OffloadConfig.create(**settings, block_size_buckets=(1, 2)),
        "embed": lambda tokens: tokens * 1.0,
        "functools": functools,
        "jax": jax,
        "kv_caches": engine.caches,
        "layout": engine.layout,
        "programs": {},
        "run_layer": lambda layer, x, kv_cache: (x * layer, kv_cache),
        "tokens": np.arange(3),
        "weights": [np.float32(2)] * len(engine.caches),
    }
    exec(setup, names)
    assert len(names["programs"]) == 8
    names["worker"].wait_until_allocated()
    for plan in (
        StepPlan(step_id=1, jobs=(engine.save([3, 1], [4, 5]),)),
        StepPlan(step_id=2, jobs=(engine.load([0, 2], [4, 5]),)),
        StepPlan(step_id=3),
    ):
        names["plan"] = plan
        exec("kv_caches = worker.begin_step" + step, names)
        assert names["outcome"] is None or not plan.empty
        assert len(names["worker"].poll(wait=True).results) == len(plan.of(JobKind.SAVE) + plan.of(JobKind.LOAD))
    for cache, old in zip(names["kv_caches"], before, strict=True):
        np.testing.assert_array_equal(reference.as_bytes(cache)[:4], old[[3, 1, 1, 3]])
    names["worker"].close()
