"""The worker's half of two storage tiers, on real arrays: each has its own threads, bound and end."""

import dataclasses
import os
import threading
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tests.inside.worker import worker_storage_tier
from tests.jobs import key_of
from tests.storage.memory_tier import FAULTY, NAME, SHARED, MemoryTier
from tests.worker.test_storage import FAILED, FINISHED, SIZE, StorageEngine
from tpu_offload.errors import ConfigError
from tpu_offload.types import JobKind, JobResult
from tpu_offload.worker.storage import stack as storage_stack


class TwoTiers(StorageEngine):
    """`StorageEngine` with a second tier; `on_far` sends a job there."""

    def __init__(self, **settings):
        super().__init__(**({"tier": (FAULTY, FAULTY), "num_storage_chunks": (32, 64)} | settings))

    @property
    def far(self):
        return worker_storage_tier(self.worker, 1)


def on_far(job):
    return dataclasses.replace(job, tier_id=1)


@pytest.fixture
def engine():
    engine = TwoTiers()
    engine.fill(range(4))
    yield engine
    engine.worker.close()


def test_every_bit_comes_back_from_the_tier_that_the_job_names(engine):
    near, far = engine.cascade((1, 0)), on_far(engine.cascade((1, 1), (2, 2)))
    engine.step(saves=[near, far])
    assert set(engine.states().values()) == {FINISHED}
    assert (set(engine.disk.values), set(engine.far.values)) == ({key_of(1)}, {key_of(1), key_of(2)})
    engine.expect_stored(far)
    promote = on_far(engine.promote((1, 3), (2, 0)))
    engine.step(loads=[promote])
    engine.expect_promoted(promote)
    assert engine.done(promote).state is FINISHED
    engine.check()
    missing = engine.promote((2, 0))
    engine.step(loads=[missing])
    assert engine.done(missing).missing_chunks == (0,), "the near tier does not have it"


@pytest.mark.parametrize("call", ["write", "read", "clear"])
@pytest.mark.parametrize("hangs_far", [False, True])
def test_a_tier_that_hangs_blocks_no_copy_of_the_other(engine, call, hangs_far):
    hanging, alive = (engine.far, engine.disk) if hangs_far else (engine.disk, engine.far)
    of_hanging, of_alive = (on_far, lambda job: job) if hangs_far else (lambda job: job, on_far)
    first = [of_hanging(engine.cascade((1, 0))), of_alive(engine.cascade((1, 0)))]
    engine.step(saves=first)
    assert set(engine.states().values()) == {FINISHED}
    hanging.gates[call] = gate = threading.Event()
    if call == "read":
        stuck = of_hanging(engine.promote((1, 1)))
        engine.step(loads=[stuck])
    else:
        stuck = of_hanging(engine.clear() if call == "clear" else engine.cascade((3, 0)))
        engine.step(saves=[stuck])
    assert hanging.began.wait(60)
    # Keys 3 and 5 have the same thread within a tier.
    write, read = of_alive(engine.cascade((5, 0))), of_alive(engine.promote((1, 2)))
    engine.step(loads=[read], saves=[write])
    results: dict[int, JobResult] = {}
    while len(results) < 2:  # and never the one that hangs
        results |= {result.job_id: result for result in engine.worker.poll(wait=True).results}
        engine.step()
    assert {job_id: result.state for job_id, result in results.items()} == {
        write.job_id: FINISHED,
        read.job_id: FINISHED,
    }
    assert key_of(5) in alive.values
    assert engine.worker.poll().storage_job_ids == (stuck.job_id,)
    gate.set()
    assert engine.done(stuck).state is FINISHED


def test_chunks_in_flight_are_bounded_for_each_tier():
    engine = TwoTiers(max_storage_gb_in_flight=(1e-9, 1.0))
    engine.fill(range(4))
    engine.disk.gates["write"] = engine.far.gates["write"] = gate = threading.Event()
    near, far = engine.cascade((1, 0), (2, 1), (3, 2)), on_far(engine.cascade((1, 0), (2, 1), (3, 2)))
    engine.step(saves=[near, far])
    gate.set()
    results = engine.drain()
    assert (results[near.job_id].state, results[near.job_id].failed_blocks) == (FAILED, (2,))
    assert "more than 2 records in flight to and from 0:" in results[near.job_id].error
    assert results[far.job_id].state is FINISHED
    engine.worker.close()


@pytest.mark.parametrize("tier_id", [2, -1, "0", None, True])
def test_a_job_of_no_tier_fails_in_one_line(engine, tier_id):
    job = dataclasses.replace(engine.cascade((1, 0)), tier_id=tier_id)
    demote = dataclasses.replace(engine.demote((2, 0)), tier_id=tier_id)
    promote = dataclasses.replace(engine.promote((3, 0)), tier_id=tier_id)
    engine.step(loads=[demote, promote], saves=[job])
    results = engine.drain()
    for one in (job, demote, promote):
        assert results[one.job_id].state is FAILED
        assert results[one.job_id].error == f"tier {tier_id!r}; this worker has 2, from 0 on"
    assert not engine.disk.values


def threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("tpu_offload-storage")}


def test_a_tier_that_cannot_be_made_closes_the_nearer_ones(tmp_path):
    before = threads()
    options = (f"{tmp_path},min_free_gb=0", "")
    with pytest.raises(ConfigError, match=r"^TPU_OFFLOAD_STORAGE_TIER=nowhere: there is no storage tier"):
        StorageEngine(tier=("file", "nowhere"), storage_options=options, num_storage_chunks=(4, 4))
    assert threads() == before
    engine = StorageEngine(tier="file", storage_options=options[0], num_storage_chunks=4)  # its lock is free
    engine.worker.close()


def test_close_closes_the_tiers_that_do_not_hang(monkeypatch, caplog):
    monkeypatch.setattr(storage_stack, "_CLOSE_S", 0.05)
    engine = TwoTiers(job_timeout_s=0.1)
    engine.fill([0])
    engine.disk.gates["write"] = gate = threading.Event()
    near, far = engine.disk, engine.far
    engine.step(saves=[engine.cascade((1, 0))])
    engine.wait_for("write")
    engine.worker.close()
    assert (near.num_closed, far.num_closed) == (0, 1)
    assert f"storage tier 0:{FAULTY} does not respond" in caplog.text
    gate.set()


class Listing(MemoryTier):
    def stored_keys(self):
        return [key_of(7)]


def test_the_first_reports_list_each_tier():
    engine = StorageEngine(tier=(f"{__name__}:Listing", SHARED), num_storage_chunks=(4, 8))
    setup = engine.worker.poll().setup
    assert setup.storage_chunks == (4, 8)
    assert setup.stored_keys == ((key_of(7),), ())
    assert setup.shares_storage == (False, True)
    engine.worker.close()


@pytest.mark.parametrize(
    ("hosts_of_rank", "holder_id"),
    [([0], 0), ([5], 0), ([2, 5], 1), (None, 7)],
    ids=["first", "other", "two", "one host"],
)
def test_a_shared_tier_numbers_the_hosts_of_each_rank(monkeypatch, hosts_of_rank, holder_id):
    """Not all hosts, or what is stored of one rank would not be found for another. On one host workers are stages."""
    sharding = SimpleNamespace(is_fully_addressable=hosts_of_rank is None)
    spec: Any = SimpleNamespace(cache_sharding=sharding, processes=lambda rank: hosts_of_rank or [0])
    monkeypatch.setattr(jax, "process_index", lambda: (hosts_of_rank or [0])[-1])
    assert storage_stack.shared_holder_id(spec, 3, worker_id=7) == holder_id


def test_a_size_in_gb_bounds_the_files(tmp_path):
    """The chunks are as many as the settings say, of records as large as they say, and the disk has less than that."""
    gb = 0.002
    engine = StorageEngine(
        tier="file", storage_options=f"{tmp_path},min_free_gb=0", num_storage_chunks=(), storage_gb=gb
    )
    spec = engine.disk.spec
    assert spec.record_nbytes == 4096 + -(-SIZE * engine.layout.block_nbytes_per_host // 4096) * 4096
    taken = sum(os.stat(path).st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    assert 0.9 * gb * 2**30 - spec.record_nbytes < taken <= gb * 2**30
    assert engine.worker.poll().setup.storage_chunks == (spec.num_chunks,)
    engine.worker.close()


def test_the_bytes_of_a_size_in_gb_are_those_of_all_devices():
    engine = StorageEngine(tier=NAME, num_devices=8, num_storage_chunks=(), storage_gb=0.01)
    assert engine.disk.spec.record_nbytes == 4096 + -(-SIZE * engine.layout.block_nbytes_per_host // 4096) * 4096
    engine.worker.close()


def test_demotions_of_two_tiers_read_their_slots_before_the_step_writes_them(engine):
    near, far = engine.demote((1, 0)), on_far(engine.demote((1, 0)))
    engine.expect_stored(near)
    save = engine.save([0, 1], [0, 1])
    engine.step(loads=[near, far], saves=[save])
    engine.expect_saved(save)
    assert set(engine.states().values()) == {FINISHED}
    for tier_id in (0, 1):
        promote = dataclasses.replace(engine.promote((1, 2 + tier_id)), tier_id=tier_id)
        assert promote.kind is JobKind.PROMOTE
        engine.step(loads=[promote])
        engine.expect_promoted(promote)
        assert engine.done(promote).state is FINISHED
        engine.check()
