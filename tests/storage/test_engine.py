"""The embedded engine above a small host tier and storage: the same tokens, found through storage, and counted."""

import dataclasses
import os
import threading

import pytest

from tests.engine.helpers import SMALL_ENGINE, TINY, num_loaded, rounds, serve, serve_rounds, tokens_of
from tests.grids import few
from tests.inside.engine import model_runner, offloading, one_worker, storage_tier
from tests.storage import stores
from tests.storage.memory_tier import FAULTY, NAME
from tpu_offload import OffloadConfig
from tpu_offload.engine import Engine, RequestOutput
from tpu_offload.storage import STORAGE_TIERS, RecordFormat, RegisteredTier, open_inspector
from tpu_offload.worker import OffloadWorker

# One conversation fills most of HBM, and two the host tier, so that each turn pushes the others out of both.
TIGHT = dataclasses.replace(SMALL_ENGINE, num_blocks=28, max_num_seqs=3)
HOST_CHUNKS = 30


def make_offload(**changes):
    settings = {
        "num_cpu_chunks": HOST_CHUNKS,
        "host_segment_gb": 0.0001,
        "storage_tier": NAME,
        "num_storage_chunks": 256,
        "storage_wait_s": 60.0,
        "load_mode": "load",  # else the machine's speed decides
    }
    return OffloadConfig.create(**(settings | changes))


def tier_of(engine):
    return storage_tier(engine)


def settle(engine):
    """Steps until an engine without requests has nothing in flight."""
    glue, runner = offloading(engine), model_runner(engine)
    for _ in range(500):
        if not glue.has_jobs:
            return
        plan, runner.kv_caches = glue.before_forward((), runner.kv_caches)
        glue.after_forward(plan, runner.kv_caches)
        glue.poll(wait=True)
        engine.check_invariants()
    raise AssertionError("an idle engine never comes to rest")


def serve_slowly(engine, all_rounds):
    """One request after the other, and storage comes to rest before the next."""
    outputs: dict[str, RequestOutput] = {}
    for requests in all_rounds:
        for request in requests:
            outputs |= serve(engine, [request])
            settle(engine)
    return outputs


@pytest.fixture(scope="module")
def plain():
    return tokens_of(serve_rounds(Engine(TINY, TIGHT), rounds()))


@pytest.mark.parametrize(
    "changes",
    few(
        [
            {},
            {"save_path": "staged", "load_path": "staged"},
            {"save_path": "fused", "load_path": "fused", "block_size_buckets": (1, 2, 4)},
            {"blocks_per_chunk": 3, "num_cpu_chunks": 10},
            {"decode_save": True},
            {"max_storage_gb_in_flight": 1e-9},
            {"num_storage_chunks": 40},
        ],
        first=2,
    ),
    ids=str,
)
def test_conversations_return_through_storage(plain, changes):
    engine = Engine(TINY, TIGHT, offload=make_offload(**changes))
    outputs = serve_slowly(engine, rounds())
    assert tokens_of(outputs) == plain
    stats = engine.offload_stats()
    # One that is smaller than all prompts together, in turn, has always just evicted the next one.
    assert (stats.promoted_chunks > 0) == ("num_storage_chunks" not in changes)
    assert (stats.num_evicted_storage_chunks > 0) == ("num_storage_chunks" in changes)
    assert stats.promoted_tokens == stats.promoted_chunks * TIGHT.block_size * changes.get("blocks_per_chunk", 1)
    assert stats.cascaded_chunks > 0
    assert stats.num_failed_jobs == stats.failed_storage_chunks == 0
    assert len(tier_of(engine).values) == stats.num_stored_chunks
    assert tier_of(engine).most_values <= changes.get("num_storage_chunks", 256)
    if not changes:
        without = Engine(TINY, TIGHT, offload=make_offload(storage_tier=""))
        assert num_loaded(outputs) > num_loaded(serve_slowly(without, rounds())), "storage brings hits"
        without.close()
    engine.close()


def test_all_at_once(plain):
    engine = Engine(TINY, TIGHT, offload=make_offload())
    assert tokens_of(serve_rounds(engine, rounds())) == plain
    assert engine.offload_stats().num_failed_jobs == 0
    engine.close()


def test_a_line_of_registration_is_all_that_a_tier_takes(plain, monkeypatch):
    monkeypatch.setitem(STORAGE_TIERS, "memory", RegisteredTier(NAME))
    engine = Engine(TINY, TIGHT, offload=make_offload(storage_tier="memory"))
    assert tokens_of(serve_slowly(engine, rounds())) == plain
    assert engine.offload_stats().promoted_chunks > 0
    engine.close()


def test_wrong_bytes_would_be_noticed(plain, monkeypatch):
    """What makes the comparisons above worth something: with no checksum, damaged chunks change the tokens."""
    monkeypatch.setattr(RecordFormat, "verify", lambda own, record, key, *, generation: own.payload_of(record))
    engine = Engine(TINY, TIGHT, offload=make_offload(storage_tier=FAULTY))
    tier_of(engine).damage = "another chunk"
    assert tokens_of(serve_slowly(engine, rounds())) != plain
    engine.close()


@pytest.mark.parametrize("fault", ["one bit", "short", "another chunk", "read", "write", "delete"])
def test_a_bad_tier_costs_hits_and_no_token(plain, fault):
    num_chunks = 40 if fault == "delete" else 256  # full, or never
    offload = make_offload(storage_tier=FAULTY, num_storage_chunks=num_chunks, breaker_failures=3)
    engine = Engine(TINY, TIGHT, offload=offload)
    tier = tier_of(engine)
    if fault in ("read", "write", "delete"):
        tier.failing = {fault}
    else:
        tier.damage = fault
    outputs = serve_slowly(engine, rounds())
    assert tokens_of(outputs) == plain
    stats = engine.offload_stats()
    assert stats.failed_storage_chunks > 0
    assert stats.num_failed_jobs == 0, "storage failed, and no copy between HBM and host memory"
    assert stats.num_breaker_openings == 1
    assert (stats.promoted_chunks == 0) == (fault != "delete")
    engine.close()


def test_a_tier_that_never_answers_stops_no_step(plain):
    """Each call hangs, so a step that entered the tier would not return."""
    engine = Engine(TINY, TIGHT, offload=make_offload(storage_tier=FAULTY, storage_wait_s=0.01))
    first, second, third = rounds()
    tier = tier_of(engine)
    outputs = serve_slowly(engine, [first])
    tier.gates = dict.fromkeys(("read", "write", "delete", "clear"), gate := threading.Event())
    outputs |= serve_rounds(engine, [second])
    assert tier.began.is_set(), "calls are in flight"
    engine.reset_cache()
    outputs |= serve_rounds(engine, [third])
    assert engine.offload_stats().num_jobs_in_flight > 0
    assert threading.current_thread().name not in tier.threads
    gate.set()
    settle(engine)
    assert tokens_of(outputs) == plain
    engine.close()


def test_a_reset_empties_storage(plain):
    engine = Engine(TINY, TIGHT, offload=make_offload())
    first, second, third = rounds()
    outputs = serve_slowly(engine, [first])
    old = set(tier_of(engine).values)
    engine.reset_cache()
    outputs |= serve_slowly(engine, [second])
    assert engine.offload_stats().promoted_chunks == 0, "nothing of before is found"
    outputs |= serve_slowly(engine, [third])
    assert engine.offload_stats().promoted_chunks > 0
    assert not old & set(tier_of(engine).values)
    assert tokens_of(outputs) == plain
    engine.close()


# --- restart --------------------------------------------------------------------------------------


def on_disk(directory, **changes):
    return make_offload(storage_tier="file", storage_options=f"{directory},min_free_gb=0", **changes)


def test_a_restart_finds_what_was_stored(plain, tmp_path):
    first, second, third = rounds()
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    outputs = serve_slowly(engine, [first, second])
    num_stored = engine.offload_stats().num_stored_chunks
    assert num_stored > 0
    assert engine.offload_stats().restored_chunks == 0
    engine.close()
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    assert engine.offload_stats().num_stored_chunks == engine.offload_stats().restored_chunks == num_stored
    again = serve_slowly(engine, [third])
    stats = engine.offload_stats()
    assert tokens_of(outputs | again) == plain
    assert num_loaded(again) > 0
    assert stats.promoted_chunks > 0
    assert stats.num_failed_jobs == stats.failed_storage_chunks == 0
    engine.close()


def restored_by_another(directory, *, model=TINY, **changes):
    """What the next engine takes as stored, and that its tokens are those of its model."""
    engine = Engine(model, TIGHT, offload=on_disk(directory, **changes))
    restored = engine.offload_stats().restored_chunks
    outputs = tokens_of(serve_slowly(engine, rounds()))
    engine.close()
    assert outputs == tokens_of(serve_rounds(Engine(model, TIGHT), rounds()))
    return restored


def test_another_model_and_another_layout_find_nothing(tmp_path):
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    serve_slowly(engine, rounds()[:1])
    engine.close()
    assert restored_by_another(tmp_path, model=dataclasses.replace(TINY, seed=TINY.seed + 1)) == 0
    assert restored_by_another(tmp_path) == 0, "and the first one has lost its chunks to it"
    assert restored_by_another(tmp_path, blocks_per_chunk=2, num_cpu_chunks=15) == 0


def test_a_reset_is_durable(tmp_path):
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    serve_slowly(engine, rounds()[:1])
    engine.reset_cache()
    settle(engine)
    tier_of(engine).close()  # as if it were killed now
    assert restored_by_another(tmp_path) == 0


def test_what_is_saved_after_a_reset_is_found_by_no_other_process(tmp_path, caplog):
    """The weights may be others by then than those that the fingerprint names."""
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    engine.reset_cache()
    serve_slowly(engine, rounds()[:1])
    num_stored = engine.offload_stats().num_stored_chunks
    assert num_stored > 0
    engine.close()
    with caplog.at_level("INFO", logger="tpu_offload"):
        engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    assert engine.offload_stats().restored_chunks == 0
    assert f"storage tier 0:file: 0 of the {num_stored} records of earlier runs can be found" in caplog.text
    settle(engine)
    serve_slowly(engine, rounds()[:1])
    num_stored = engine.offload_stats().num_stored_chunks
    engine.close()
    assert stores.num_current(open_inspector(str(tmp_path))) == num_stored, "and takes no room"


def test_a_reset_that_was_killed_leaves_what_was_right_for_the_weights_of_the_start(tmp_path):
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    serve_slowly(engine, rounds()[:1])
    num_stored = engine.offload_stats().num_stored_chunks
    engine.reset_cache()
    tier_of(engine).close()  # killed before the worker has heard of it
    assert restored_by_another(tmp_path) == num_stored > 0


def test_damaged_files_cost_hits_and_no_token(plain, tmp_path):
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    first, second, third = rounds()
    outputs = serve_slowly(engine, [first, second])
    engine.close()
    segment = tmp_path / "worker-0" / "segment-000.kv"
    data = bytearray(segment.read_bytes())
    for place in range(4100, len(data), 8192):
        data[place] ^= 1
    segment.write_bytes(data)
    engine = Engine(TINY, TIGHT, offload=on_disk(tmp_path))
    outputs |= serve_slowly(engine, [third])
    assert tokens_of(outputs) == plain
    assert engine.offload_stats().failed_storage_chunks > 0
    engine.close()


@pytest.mark.parametrize("tier", ["file", "object"])
def test_records_that_are_cut_short_fail_once_and_are_written_again(tmp_path, tier):
    """As those with flipped bits. In an outage, they would be kept and read again and again."""
    options = f"{tmp_path},min_free_gb=0" if tier == "file" else f"file://{tmp_path}"
    offload = make_offload(storage_tier=tier, storage_options=options, breaker_failures=10**6, breaker_retry_s=1e-3)
    engine = Engine(TINY, TIGHT, offload=offload)
    rounds_of = iter(rounds(6, max_tokens=1))
    serve_slowly(engine, [next(rounds_of)])
    num_cut = engine.offload_stats().num_stored_chunks
    records = [path for path in tmp_path.rglob("*.kv") if path.is_file()]
    for path in records:
        os.truncate(path, 4096 if tier == "object" else 0)
    assert len(records) == (num_cut if tier == "object" else 1)
    serve_slowly(engine, [next(rounds_of), next(rounds_of)])
    stats = engine.offload_stats()
    assert 0 < stats.failed_storage_chunks <= num_cut
    serve_slowly(engine, rounds_of)
    later = engine.offload_stats()
    assert later.failed_storage_chunks == stats.failed_storage_chunks, "each fails once"
    assert later.promoted_chunks > stats.promoted_chunks + num_cut
    engine.close()


def test_an_idle_engine_waits_for_storage_no_longer_than_its_request(plain):
    """A read hangs: `poll` returns in time for the request to be computed."""
    engine = Engine(TINY, TIGHT, offload=make_offload(storage_tier=FAULTY, storage_wait_s=0.05))
    first, second, third = rounds()
    outputs = serve_slowly(engine, [first])
    tier_of(engine).gates["read"] = gate = threading.Event()
    worker, waits = one_worker(engine), []
    assert isinstance(worker, OffloadWorker)
    poll = worker.poll

    def recorded(*, wait=False, wait_s=1.0):
        waits.append(wait_s if wait and worker.has_flights else 0.0)
        return OffloadWorker.poll(worker, wait=wait, wait_s=wait_s)

    worker.poll = recorded
    for request in second:
        outputs |= serve(engine, [request])
    assert 0 < max(waits) <= 0.05
    gate.set()
    worker.poll = poll
    settle(engine)
    outputs |= serve_slowly(engine, [third])
    assert tokens_of(outputs) == plain
    engine.close()
