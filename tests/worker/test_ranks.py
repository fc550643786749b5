"""Data-parallel ranks: their plans in one, their bytes apart."""

import copy
import dataclasses
import pickle
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.grids import few
from tests.inside.worker import change_ranks, tier_groups
from tests.jobs import copy_job, key_of, storage_job
from tests.multiprocess.stepped_storage import PRIVATE, SHARED
from tests.worker.rank_lives import Lives
from tpu_offload import ConfigError, JobResult, JobState, KVLayout, OffloadConfig, OffloadWorker, RankPlans
from tpu_offload.errors import TransferError
from tpu_offload.kernels import BlockMoves, Flight, Phase, part_of_rank
from tpu_offload.types import Direction, JobKind, StepPlan, StepReport
from tpu_offload.worker.host_memory import check_copied
from tpu_offload.worker.storage import stack as storage_stack


def caches_of_ranks(num_ranks=4, num_blocks=8):
    mesh = Mesh(np.array(jax.devices()[:num_ranks]), ("rank",))
    sharding = NamedSharding(mesh, PartitionSpec("rank"))
    return [jax.device_put(np.zeros((num_ranks * num_blocks, 4, 2, 2, 8), np.uint16), sharding) for _ in range(2)]


def save(job_id, *, block=0):
    return copy_job(job_id, JobKind.SAVE, (block,), (block,))


def finished(*job_ids, oldest=0):
    results = tuple(JobResult(job_id=job_id, state=JobState.FINISHED) for job_id in job_ids)
    return StepReport(worker_id=0, results=results, num_host_slots=(9,), lost_slots=((0, 0, 2),), oldest_job_id=oldest)


@pytest.mark.parametrize(
    ("faults", "settings"), [(0.0, {}), (0.1, {}), (0.05, {"max_load_gb_per_step": 1e-6, "blocks_per_chunk": 2})]
)
def test_every_byte_of_every_rank_is_right(caplog, faults, settings):
    lives = Lives(7, faults=faults, **settings)
    lives.run(80)
    assert min(counts["loaded"] for counts in lives.counts) > 5
    assert sum(counts["swapped in"] for counts in lives.counts) > 5
    failed = [record for record in caplog.records if record.name == "tpu_offload.worker.jobs"]
    assert bool(failed) == (faults > 0)
    assert lives.num_checked > 2000
    lives.close()


STORAGE: dict[str, Any] = {"storage_wait_s": 6, "storage_lookup_wait_s": 4, "num_cpu_chunks": 10}


@pytest.mark.parametrize("faults", [0.0, 0.06])
@pytest.mark.parametrize(
    "tiers",
    few([(PRIVATE,), (SHARED,), (PRIVATE, SHARED)], (PRIVATE, SHARED), unpack=False),
    ids=["private", "shared", "both"],
)
def test_every_byte_of_every_rank_comes_back_from_storage(tiers, faults):
    settings = STORAGE | {"storage_tier": ";".join(tiers), "num_storage_chunks": ";".join(["30"] * len(tiers))}
    lives = Lives(7, faults=faults / 2, storage_faults=faults, **settings)
    lives.run(120)  # 50 steps stored 39 to 186: it depends on the moments at which copies end
    assert sum(counts["stored"] for counts in lives.counts) > 40
    assert sum(counts["promoted"] for counts in lives.counts) > 20
    assert lives.num_checked > 2000
    lives.close()


def test_storage_of_one_rank_in_the_memory_of_another_is_noticed(monkeypatch):
    def of_pair(spec, arena, rank):
        return part_of_rank(spec, arena, rank // 2 * 2)

    monkeypatch.setattr(storage_stack, "part_of_rank", of_pair)
    lives = Lives(7, **STORAGE, storage_tier=PRIVATE, num_storage_chunks=30)
    with pytest.raises(AssertionError, match=r"rank \d block="):
        lives.run(50)
    lives.close()


@pytest.mark.parametrize(
    ("holder_id", "names"),
    [(None, ["worker-0", "worker-1"]), (2, ["worker-4", "worker-5"])],
    ids=["one engine", "several"],
)
def test_each_rank_has_files_of_its_own_and_finds_them_again(tmp_path, holder_id, names):
    def start():
        caches = caches_of_ranks(2)
        layout = KVLayout.from_caches(caches, block_size=4)
        config = OffloadConfig.create(
            num_cpu_chunks=8,
            storage_tier="file",
            storage_options=str(tmp_path),
            num_storage_chunks=4,
            skip_jax_precompile=True,
        )
        worker = OffloadWorker(config, layout, caches, holder_id=holder_id)
        worker.wait_until_allocated()
        return worker, caches, RankPlans(2)

    def run(worker, caches, ranks, *plans):
        plan = ranks.merge(plans)
        worker.end_step(plan, worker.begin_step(plan, caches))
        reports = [ranks.split(worker.poll())]
        while worker.has_flights:
            reports.append(ranks.split(worker.poll(wait=True)))
        return reports

    worker, caches, ranks = start()
    values = np.arange(caches[0].size, dtype=np.uint16).reshape(caches[0].shape)
    caches = [jax.device_put(values + i, cache.sharding) for i, cache in enumerate(caches)]
    saves = [StepPlan(step_id=1, jobs=(save(1), save(2, block=rank)), next_job_id=3) for rank in range(2)]
    run(worker, caches, ranks, *saves)
    jobs = [storage_job(3, JobKind.CASCADE, [(5 + rank, rank)]) for rank in range(2)]
    reports = run(worker, caches, ranks, *(StepPlan(step_id=2, jobs=(job,), next_job_id=4) for job in jobs))
    results = [[r for report in reports for r in report[rank].results] for rank in range(2)]
    assert [[(r.job_id, r.state) for r in own] for own in results] == [[(3, JobState.FINISHED)]] * 2
    worker.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == names

    worker, _, ranks = start()
    setups = [report.setup for report in ranks.split(worker.poll())]
    assert [setup.stored_keys for setup in setups] == [((key_of(5),),), ((key_of(6),),)]
    assert [setup.storage_chunks for setup in setups] == [(4,)] * 2
    worker.close()


def test_reports_tell_each_rank_of_its_own_jobs_in_storage():
    """One that hangs there has not ended, however many later jobs have, and delays no other."""
    ranks = RankPlans(2)
    jobs = (storage_job(1, JobKind.CASCADE, [(1, 1)]), save(2))
    ranks.merge([StepPlan(step_id=1, jobs=jobs, next_job_id=3), StepPlan(step_id=1, jobs=jobs[1:], next_job_id=3)])
    report = dataclasses.replace(finished(2, 3, oldest=4), storage_job_ids=(1,))
    first, second = ranks.split(report)
    assert (first.storage_job_ids, first.oldest_job_id) == ((1,), 3)
    assert (second.storage_job_ids, second.oldest_job_id) == ((), 3)
    assert ranks.job_id(0, 1) == 1
    first, _ = ranks.split(finished(1, oldest=4))
    assert ([r.job_id for r in first.results], first.storage_job_ids, first.oldest_job_id) == ([1], (), 3)


def test_copies_of_a_rank_to_the_places_of_another_are_noticed():
    lives = Lives(7)
    for copies in tier_groups(lives.worker):
        change_ranks(copies, lambda ranks: np.maximum(ranks - 1, 0))
    with pytest.raises(AssertionError):
        lives.run(40)
    lives.close()


def test_loads_of_one_rank_do_not_take_the_limit_of_another():
    """Before one step each rank copies as much as if it were alone."""
    caches = caches_of_ranks(2)
    layout = KVLayout.from_caches(caches, block_size=4)
    config = OffloadConfig.create(
        num_cpu_chunks=8, max_load_gb_per_step=2.5 * layout.block_nbytes_per_device / 2**30, skip_jax_precompile=True
    )
    worker = OffloadWorker(config, layout, caches)
    worker.wait_until_allocated()
    ranks = RankPlans(2)
    blocks = tuple(range(6))
    saves = [StepPlan(step_id=1, jobs=(copy_job(1, JobKind.SAVE, blocks, blocks),), next_job_id=2)] * 2
    caches = worker.begin_step(ranks.merge(saves), caches)
    worker.end_step(ranks.merge(saves), caches)
    loads = [
        StepPlan(
            step_id=2, jobs=(copy_job(2, JobKind.LOAD, blocks[:n], blocks[:n], request_id=f"r{n}"),), next_job_id=3
        )
        for n in (6, 2)
    ]
    caches = worker.begin_step(ranks.merge(loads), caches)
    assert worker.take_written_loads() == (4,), "the short load of the second rank"
    for step in (3, 4):
        caches = worker.begin_step(
            ranks.merge([StepPlan(step_id=step, next_job_id=3), StepPlan(step_id=step, next_job_id=3)]), caches
        )
    assert worker.take_written_loads() == (3,)
    worker.close()


def test_saves_of_all_ranks_are_one_dispatch():
    lives = Lives(3)
    (copies,) = tier_groups(lives.worker)
    copier: Any = copies.copiers[Direction.SAVE]
    dispatched, copy = [], copier.save

    def recorded(segment_id, moves, kv_caches):
        dispatched.append(moves)
        return copy(segment_id, moves, kv_caches)

    copier.save = recorded
    plans = [StepPlan(step_id=1, jobs=(save(1, block=rank),), next_job_id=2) for rank in range(4)]
    plan = lives.ranks.merge(plans)
    lives.caches = lives.worker.begin_step(plan, lives.caches)
    lives.worker.end_step(plan, lives.caches)
    (moves,) = dispatched
    assert (moves.ranks.tolist(), moves.block_ids.tolist()) == ([0, 1, 2, 3], [0, 1, 2, 3])
    reports = lives.ranks.split(lives.worker.poll(wait=True))
    assert [[(r.job_id, r.state) for r in report.results] for report in reports] == [[(1, JobState.FINISHED)]] * 4
    lives.close()


# Plans and reports.


def test_jobs_of_equal_ids_are_told_apart():
    ranks = RankPlans(3)
    plan = ranks.merge(
        [
            StepPlan(step_id=5, jobs=(save(1), save(2)), next_job_id=3),
            StepPlan(step_id=5),
            StepPlan(step_id=9, jobs=(save(1),), next_job_id=2),
        ]
    )
    assert [(job.job_id, job.rank) for job in plan.jobs] == [(1, 0), (2, 0), (3, 2)]
    assert plan.next_job_id == 4
    reports = ranks.split(finished(3, 1, oldest=2))
    assert [[result.job_id for result in report.results] for report in reports] == [[1], [], [1]]
    assert [report.oldest_job_id for report in reports] == [2, 0, 2]
    assert {report.lost_slots for report in reports} == {((0, 0, 2),)}


def test_cancellations_and_jobs_that_were_never_begun():
    ranks = RankPlans(2)
    ranks.merge([StepPlan(step_id=1, jobs=(save(1),), next_job_id=2)] * 2)
    plan = ranks.merge([StepPlan(step_id=2, cancelled_job_ids=(1,), next_job_id=2), StepPlan(step_id=2, next_job_id=2)])
    assert plan.cancelled_job_ids == (1,)
    assert [ranks.job_id(rank, 1) for rank in (0, 1)] == [1, 2]
    reports = ranks.split(finished(oldest=3))
    assert [report.oldest_job_id for report in reports] == [2, 2]
    assert ranks.job_id(0, 1) == -1


def test_plans_that_come_again_or_late_are_not_merged_again():
    ranks = RankPlans(2)
    first = [StepPlan(step_id=1, jobs=(save(1),), next_job_id=2), StepPlan(step_id=1)]
    second = [StepPlan(step_id=2, jobs=(save(2),), next_job_id=3), StepPlan(step_id=2, jobs=(save(1),), next_job_id=2)]
    ranks.merge(first)
    assert ranks.merge(first).next_job_id == 2
    plan = ranks.merge(second)
    assert ranks.merge(second) is plan
    late = ranks.merge([first[0], StepPlan(step_id=3, next_job_id=2)])
    assert late.jobs == ()


def test_the_rank_that_knows_least_decides_whether_the_plan_is_stale():
    plans = [StepPlan(step_id=1, cache_epochs=((7, losses),)) for losses in (1, 0)]
    assert RankPlans(2).merge(plans).cache_epochs == ((7, 0),)


def test_each_host_compares_with_the_rank_that_knows_least_of_it():
    plans = [StepPlan(step_id=1, cache_epochs=epochs) for epochs in (((7, 1), (9, 0)), ((7, 0), (9, 1)), ())]
    assert RankPlans(3).merge(plans).cache_epochs == ((7, 0), (9, 0))


def test_a_missing_rank_is_an_error():
    with pytest.raises(ValueError, match="plans of 1 data-parallel ranks; expected 2, one of each"):
        RankPlans(2).merge([StepPlan(step_id=1)])
    plans: Any
    for plans in (None, [1, 2], [StepPlan(step_id=1), None]):
        with pytest.raises(ValueError, match=r"the plans of data-parallel ranks are .*; expected StepPlans"):
            RankPlans(2).merge(plans)
    num_ranks: Any
    for num_ranks in (0, -1, "2", None):
        with pytest.raises(ValueError, match=r"num_ranks=.*; expected at least 1, as KVLayout\.num_ranks"):
            RankPlans(num_ranks)


@pytest.mark.parametrize("through", [lambda plan: pickle.loads(pickle.dumps(plan)), copy.deepcopy])
def test_a_merged_plan_keeps_its_ranks_on_its_way(through):
    """Otherwise the blocks of the first rank would be copied for all."""
    jobs = [copy_job(1, JobKind.SAVE, [1], [2]), storage_job(2, JobKind.CASCADE, [(3, 4)])]
    plan = RankPlans(2).merge([StepPlan(step_id=1, jobs=(job,), next_job_id=3) for job in jobs])
    assert [job.rank for job in plan.jobs] == [0, 1]
    again = RankPlans(2).merge([StepPlan(step_id=1), StepPlan(step_id=1, jobs=tuple(jobs), next_job_id=3)])
    for merged in (plan, again):
        assert through(merged) == merged


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({0: (2, 2), 1: (1, 1)}, ""),
        ({0: (2, 1), 1: (1, 1)}, "copied 2 of 3"),
        ({0: (2, 2), 1: (0, 0)}, "copied 2 of 3"),
    ],
)
def test_a_host_counts_what_each_of_its_devices_has_copied_for_its_ranks(counts, message):
    """On several hosts: here ranks 0 and 1 of three, with two devices each."""
    shards = [
        SimpleNamespace(index=(slice(rank, rank + 1),), data=np.array([count]))
        for rank, of_devices in counts.items()
        for count in of_devices
    ]
    token: Any = SimpleNamespace(is_fully_addressable=False, addressable_shards=shards)
    ids = np.arange(5, dtype=np.int32)
    moves = BlockMoves(np.zeros(5, np.int64), ids, ids, np.array([0, 0, 1, 2, 2], np.int32))
    flight = Flight(Direction.SAVE, 0, moves, Phase.COPYING, token)
    with pytest.raises(TransferError, match=message) if message else nullcontext():
        check_copied(flight)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_path": "staged"}, "TPU_OFFLOAD_LOAD_PATH=staged: the KV caches are split over 4 data-parallel ranks"),
    ],
)
def test_settings_that_ranks_do_not_support(settings, message):
    caches = caches_of_ranks()
    layout = KVLayout.from_caches(caches, block_size=4)
    with pytest.raises(ConfigError, match=message):
        OffloadWorker(OffloadConfig.create(num_cpu_chunks=8, **settings), layout, caches)


def test_a_job_of_an_unknown_rank_fails():
    caches = caches_of_ranks()
    layout = KVLayout.from_caches(caches, block_size=4)
    worker = OffloadWorker(OffloadConfig.create(num_cpu_chunks=8, skip_jax_precompile=True), layout, caches)
    worker.wait_until_allocated()
    plan = StepPlan(step_id=1, jobs=(dataclasses.replace(save(1), rank=4),))
    worker.end_step(plan, worker.begin_step(plan, caches))
    (result,) = worker.poll().results
    assert "a save of rank 4; this worker has 4" in result.error
    worker.close()
