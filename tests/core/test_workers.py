"""The number and setup of workers, and plans and requests after one loses its caches."""

import dataclasses
import logging

import pytest

from tests.core.fakes import LAYOUT, Clock, FakeEngine, FakeWorker
from tests.core.test_scheduler import tokens
from tpu_offload import (
    ConfigError,
    FailedLoad,
    JobResult,
    JobState,
    KVLayout,
    OffloadConfig,
    OffloadScheduler,
    RequestError,
)
from tpu_offload.types import CacheEpoch, JobKind, StepReport, WorkerSetup

CONFIG = OffloadConfig.create(num_staging_blocks=8, num_cpu_chunks=64, job_timeout_s=5.0)
SETUP = WorkerSetup(
    num_processes=2,
    process_index=0,
    fingerprint=LAYOUT.fingerprint().hex(),
    blocks_per_chunk=1,
    staging_blocks=8,
    max_load_blocks=CONFIG.max_load_blocks(LAYOUT),
    segment_slots=(32,),
    save_path="direct",
    load_path="direct",
    bucket_blocks=(),
    max_swap_blocks=0,
)


def setup(**changes):
    return dataclasses.replace(SETUP, **changes)


def scheduler(num_workers=2, clock=None):
    return OffloadScheduler(CONFIG, LAYOUT, num_workers=num_workers, clock=clock or Clock())


def report(worker_id=0, *, incarnation=7, num_host_chunks=16, **fields):
    return StepReport(
        worker_id=worker_id, results=(), num_host_slots=(num_host_chunks,), incarnation=incarnation, **fields
    )


def check_nothing_was_taken(scheduler, worker_id):
    assert scheduler.stats().num_host_chunks == 0
    if worker_id < 2:
        assert scheduler.plan_step(()).cache_epochs[worker_id] == (0, 0)
    scheduler.check_invariants()


def test_workers_with_the_expected_setup():
    offload = scheduler()
    for worker_id in range(2):
        offload.apply(report(worker_id, setup=setup(process_index=worker_id)))
    assert offload.stats().num_host_chunks == 16
    assert offload.plan_step(()).cache_epochs == ((7, 0), (7, 0))


@pytest.mark.parametrize(
    ("first", "worker_id", "second", "said"),
    [
        (None, 0, setup(num_processes=3), "worker 0 reports.*spread over 3 process.*workers 0 to 1: pass num_workers="),
        (None, 2, setup(), "worker 2 reports.*expects workers 0 to 1"),
        (setup(), 0, setup(process_index=1), "worker 0 is reported by more than one process"),
        (setup(), 1, setup(process_index=0), "worker 1 is reported by more than one process, or its process"),
        (setup(), 1, setup(process_index=1, save_path="staged"), "worker 1 has save_path='staged', worker 0 has 'dir"),
        (setup(), 1, setup(process_index=1, load_path="staged"), "TPU_OFFLOAD_LOAD_PATH"),
        (
            setup(),
            1,
            setup(process_index=1, segment_slots=(9,)),
            r"segment_slots=\(9,\), worker 0 has \(32,\).*HOST_SEGMENT_GB",
        ),
        (None, 0, setup(staging_blocks=4), "worker 0 has staging_blocks=4, the scheduler has 8"),
        (None, 0, setup(max_load_blocks=3), "TPU_OFFLOAD_MAX_LOAD_GB_PER_STEP"),
        (None, 0, setup(blocks_per_chunk=2), "TPU_OFFLOAD_BLOCKS_PER_CHUNK"),
        (None, 0, setup(bucket_blocks=(1, 2)), "TPU_OFFLOAD_BLOCK_SIZE_BUCKETS"),
        (None, 0, setup(max_swap_blocks=5), "TPU_OFFLOAD_SWAP_GB"),
        (None, 0, setup(fingerprint="x"), "the model and its KV caches"),
        (None, 0, setup(rival=9), "worker 0 is reported by more than one process"),
    ],
)
def test_a_worker_with_another_setup_is_an_error_with_its_first_report(first, worker_id, second, said):
    offload = scheduler()
    if first is not None:
        offload.apply(report(0, setup=first))
    for _ in range(2):  # and with the next one, until it is fixed
        with pytest.raises(ConfigError, match=said) as caught:
            offload.apply(report(worker_id, setup=second, incarnation=8))
        assert "\n" not in str(caught.value)
    if first is None:
        check_nothing_was_taken(offload, worker_id)


def test_workers_with_separate_caches_may_have_other_segment_sizes():
    offload = scheduler()
    for worker_id, chunks in enumerate((9, 32)):
        offload.apply(report(worker_id, setup=setup(num_processes=1, process_index=0, segment_slots=(chunks,))))
    assert offload.stats().num_host_chunks == 16


def test_a_worker_without_room_for_the_host_tier_is_no_mismatch():
    offload = scheduler()
    offload.apply(report(0, setup=setup()))
    offload.apply(
        report(1, num_host_chunks=0, setup=setup(process_index=1, save_path="", load_path="", segment_slots=()))
    )
    assert offload.stats().num_host_chunks == 0


def test_a_worker_that_never_reports_is_logged_once(caplog):
    clock = Clock()
    offload = scheduler(3, clock)
    offload.apply(report(1))
    offload.plan_step(())
    clock.now_s += 6
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            offload.plan_step(())
    (record,) = caplog.records
    assert "all 3 workers have reported; worker(s) 0, 2 have not in 5 s" in record.getMessage()


@pytest.mark.parametrize(
    "wrong",
    [7, "x", setup(num_processes=-1), setup(bucket_blocks=[1]), setup(max_swap_blocks=0.5), setup(save_path=None)],
)
def test_an_invalid_setup_is_ignored_with_its_report(wrong):
    offload = scheduler()
    offload.apply(report(0, setup=wrong))
    assert offload.stats().num_rejected_reports == 1


# --- caches that are gone -------------------------------------------------------------------------


def lost(worker_id=0, *, num_cache_losses=1, **fields):
    return StepReport(
        worker_id=worker_id,
        results=fields.pop("results", ()),
        num_host_slots=(64,),
        num_cache_losses=num_cache_losses,
        **fields,
    )


@pytest.fixture
def engine():
    return FakeEngine(num_blocks=64, num_staging_blocks=32, swap_gb=0.01, swap_mode="swap")


def test_nothing_of_a_request_is_saved_after_a_cache_loss_until_it_is_preempted(engine):
    engine.add("a", tokens(16))
    engine.step({"a": 3})
    update = engine.scheduler.apply(lost())
    assert update.lost_caches == (0,)
    assert engine.step({"a": 13})[0].of(JobKind.SAVE) == ()
    engine.scheduler.check_invariants()
    engine.remove("a", preempt=True)
    engine.add("a", tokens(16))
    assert [job.num_blocks for job in engine.step({"a": 16})[0].of(JobKind.SAVE)] == [4]


def test_a_cache_loss_is_reported_once_and_plans_name_the_new_caches(engine):
    assert engine.scheduler.plan_step(()).cache_epochs == ((0, 0),)
    assert engine.scheduler.apply(lost()).lost_caches == (0,)
    assert engine.scheduler.apply(lost()).lost_caches == ()
    assert engine.scheduler.plan_step(()).cache_epochs == ((0, 1),)
    assert engine.scheduler.apply(lost(num_cache_losses=0)).lost_caches == (), "an old report"
    assert engine.scheduler.plan_step(()).cache_epochs == ((0, 1),)


def test_a_cache_loss_that_the_engine_knows_is_not_reported(engine):
    engine.add("a", tokens(16))
    engine.step({"a": 7})
    engine.scheduler.mark_caches_lost(CacheEpoch(worker_id=0, incarnation=0, num_losses=1))
    engine.remove("a", preempt=True)
    engine.add("a", tokens(16))
    plan, _ = engine.step({"a": 16})
    assert plan.cache_epochs == ((0, 1),)
    assert len(plan.of(JobKind.SAVE)) == 1
    (job,) = plan.of(JobKind.SAVE)
    results = (JobResult(job_id=job.job_id, state=JobState.FINISHED),)
    assert engine.scheduler.apply(lost(results=results)).lost_caches == ()
    assert engine.scheduler.stats().num_resident_chunks == 4


def test_loads_in_flight_at_a_cache_loss_fail_with_no_valid_tokens(engine):
    engine.serve("a", tokens(16))
    engine.add("b", tokens(16))
    plan, _ = engine.step()
    assert len(plan.of(JobKind.LOAD)) == 1
    update = engine.scheduler.apply(lost())
    assert update.failed_loads == (FailedLoad(request_id="b", num_valid_tokens=0),)
    assert engine.scheduler.plan_step(()).cancelled_job_ids == (plan.of(JobKind.LOAD)[0].job_id,)


def test_a_cancel_is_repeated_until_every_worker_has_finished_with_the_load():
    workers = [FakeWorker(0, staged=True), FakeWorker(1, staged=True)]
    engine = FakeEngine(workers=workers, num_blocks=64)
    engine.serve("a", tokens(16))
    engine.add("b", tokens(16))
    (load,) = engine.step()[0].of(JobKind.LOAD)
    engine.remove("b")
    for _ in range(3):
        assert engine.scheduler.plan_step(()).cancelled_job_ids == (load.job_id,)
    cancelled = (JobResult(job_id=load.job_id, state=JobState.CANCELLED),)
    engine.scheduler.apply(StepReport(worker_id=0, results=cancelled, num_host_slots=(64,)))
    assert engine.scheduler.plan_step(()).cancelled_job_ids == (load.job_id,)
    engine.scheduler.apply(
        StepReport(worker_id=1, results=(), num_host_slots=(64,), oldest_job_id=load.job_id + 1)
    )  # its report got lost
    assert engine.scheduler.plan_step(()).empty
    engine.scheduler.check_invariants()


def test_a_promise_that_needs_no_kv_in_hbm_survives_a_cache_loss(engine):
    engine.serve("a", tokens(16))
    scheduler = engine.scheduler
    request = engine.add("b", tokens(16))
    engine.remove("b")
    num_tokens = scheduler.match("c", request.hashes, num_tokens=17, num_computed_tokens=0).num_tokens
    assert num_tokens == 16
    scheduler.apply(lost())
    scheduler.admit("c", [[40, 41, 42, 43, 44]], num_loaded_tokens=num_tokens)
    assert len(scheduler.plan_step(()).of(JobKind.LOAD)) == 1
    scheduler.check_invariants()


def test_a_promise_that_continues_lost_kv_is_void(engine):
    engine.serve("a", tokens(16))
    request = engine.add("b", tokens(16))
    engine.remove("b")
    scheduler = engine.scheduler
    num_tokens = scheduler.match("c", request.hashes, num_tokens=17, num_computed_tokens=8).num_tokens
    assert num_tokens == 8
    scheduler.apply(lost())
    scheduler.admit("c", [[40, 41, 42, 43, 44]], num_loaded_tokens=num_tokens)
    assert scheduler.take_update().failed_loads == (FailedLoad(request_id="c", num_valid_tokens=0),)
    assert scheduler.plan_step(()).of(JobKind.LOAD) == ()
    scheduler.check_invariants()
    # Matched again, with what HBM has of it by now, it is as any other.
    scheduler.preempt("c")
    num_tokens = scheduler.match("c", request.hashes, num_tokens=17, num_computed_tokens=8).num_tokens
    scheduler.admit("c", [[40, 41, 42, 43, 44]], num_loaded_tokens=num_tokens)
    assert num_tokens == 8
    assert len(scheduler.plan_step(()).of(JobKind.LOAD)) == 1
    scheduler.check_invariants()


@pytest.mark.parametrize(
    "wrong",
    [
        "x",
        5,
        CacheEpoch(worker_id=9, incarnation=0, num_losses=1),
        CacheEpoch(worker_id=-1, incarnation=0, num_losses=1),
        CacheEpoch(worker_id=0, incarnation=0, num_losses=2**70),
        CacheEpoch(worker_id="a", incarnation=0, num_losses=0),  # type: ignore[arg-type]
    ],
)
def test_an_unknown_epoch_is_refused(engine, wrong):
    with pytest.raises(RequestError) as caught:
        engine.scheduler.mark_caches_lost(wrong)
    assert "\n" not in str(caught.value)
    assert engine.scheduler.plan_step(()).cache_epochs == ((0, 0),)


def test_workers_may_all_restart_with_other_settings():
    offload = scheduler()
    for worker_id in range(2):
        offload.apply(report(worker_id, setup=setup(process_index=worker_id)))
    with pytest.raises(ConfigError):
        offload.apply(report(0, incarnation=8, setup=setup(save_path="staged")))
    for worker_id in (1, 0):
        offload.apply(report(worker_id, incarnation=8, setup=setup(process_index=worker_id, save_path="staged")))
    assert offload.plan_step(()).cache_epochs == ((8, 0), (8, 0))
    offload.apply(report(0, incarnation=7, setup=setup()))  # late, of before
    assert offload.stats().num_rejected_reports == 1


def test_an_impossible_swap_pool_is_a_config_error():
    offload = scheduler()
    with pytest.raises(ConfigError, match="TPU_OFFLOAD_SWAP_GB"):
        offload.apply(report(0, num_swap_blocks=(20,), setup=setup(max_swap_blocks=20)))


def test_nothing_is_swapped_out_after_a_cache_loss(engine):
    engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(64,), num_swap_blocks=(20,)))
    request = engine.add("a", tokens(16))
    engine.step({"a": 9})
    engine.scheduler.apply(lost(num_swap_blocks=(20,)))
    assert not engine.scheduler.swap.swap_out("a", [request.block_ids], num_computed_tokens=9)


def test_a_swap_out_planned_before_the_loss_is_reported_fails(engine):
    engine.scheduler.apply(StepReport(worker_id=0, results=(), num_host_slots=(64,), num_swap_blocks=(20,)))
    request = engine.add("a", tokens(16))
    engine.step({"a": 9})
    assert engine.scheduler.swap.swap_out("a", [request.block_ids], num_computed_tokens=9)
    engine.scheduler.preempt("a")
    engine.scheduler.apply(lost(num_swap_blocks=(20,)))
    (job,) = engine.scheduler.plan_step(()).of(JobKind.SWAP_OUT)
    results = (JobResult(job_id=job.job_id, state=JobState.FINISHED),)
    update = engine.scheduler.apply(lost(results=results, num_swap_blocks=(20,)))
    assert update.lost_swaps == ("a",)


def test_a_restarted_worker_has_lost_its_caches_too(engine):
    engine.scheduler.apply(report(incarnation=5))
    engine.add("a", tokens(16))
    engine.step({"a": 7})
    assert engine.scheduler.apply(report(incarnation=6)).lost_caches == (0,)
    plan, _ = engine.step({"a": 9})
    assert (plan.of(JobKind.SAVE), plan.cache_epochs) == ((), ((6, 0),))


def of_stages():
    """Two pipeline stages, the second with half of the first one's layers, and the setups of their workers."""
    group = LAYOUT.groups[0]
    (pages,) = group.page_groups
    half = dataclasses.replace(pages, layer_ids=pages.layer_ids[: pages.num_layers // 2])
    groups = (dataclasses.replace(group, page_groups=(half,)),)
    layouts = LAYOUT, dataclasses.replace(LAYOUT, groups=groups, stage_layers="the last")
    nbytes = LAYOUT.block_nbytes_per_device
    config = OffloadConfig.create(
        staging_buffer_gb=8 * nbytes / 2**30, max_load_gb_per_step=4 * nbytes / 2**30, host_gb=16 * nbytes / 2**30
    )
    setups = [
        setup(
            num_processes=1,
            fingerprint=layout.fingerprint().hex(),
            staging_blocks=config.staging_blocks(layout),
            max_load_blocks=config.max_load_blocks(layout),
        )
        for layout in layouts
    ]
    return config, KVLayout.of_stages(layouts), setups


def test_stages_have_setups_of_their_own_and_the_tier_is_that_of_the_largest():
    config, layout, setups = of_stages()
    assert [s.staging_blocks for s in setups] == [8, 16]
    assert (config.staging_blocks(layout), config.max_load_blocks(layout), config.host_chunks(layout)) == (8, 4, 16)
    offload = OffloadScheduler(config, layout, num_workers=2, clock=Clock())
    for worker_id, chunks in enumerate((16, 32)):
        offload.apply(report(worker_id, setup=setups[worker_id], num_host_chunks=chunks))
    assert offload.stats().num_host_chunks == 16
    with pytest.raises(ConfigError, match="worker 0 has fingerprint"):
        offload.apply(report(0, setup=setups[1], incarnation=8))


def test_stages_need_a_worker_each_and_no_request_swap():
    config, layout, _ = of_stages()
    with pytest.raises(ConfigError, match="num_workers=3 for 2 pipeline stages; expected one for each"):
        OffloadScheduler(config, layout, num_workers=3)
    with pytest.raises(ConfigError, match="request swap does not support pipeline stages"):
        OffloadScheduler(config.model_copy(update={"swap_gb": 1.0}), layout, num_workers=2)
