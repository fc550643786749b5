"""Events of the host tier: by layer group, and such that a router finds with them what lookups find."""

import pytest

from tests.core.fakes import FakeEngine, FakeWorker, tokens
from tests.core.router import Router, num_in_host_tier
from tests.core.test_states import state_engine
from tests.core.window_engine import WindowEngine
from tests.inside.scheduler import chunk_index, job_table
from tpu_offload import JobKind, TierEvent, TierEventKind
from tpu_offload.core import inspection
from tpu_offload.core.index import Checkpoint, ChunkIndex, NewPiece
from tpu_offload.core.policies import LRUPolicy, Use
from tpu_offload.piece_keys import piece_key
from tpu_offload.types import BlockHash, ChunkKey, Pool

STORED, REMOVED, CLEARED = TierEventKind.STORED, TierEventKind.REMOVED, TierEventKind.CLEARED


def test_events_follow_saves_evictions_losses_and_resets() -> None:
    engine = FakeEngine(record_events=True, num_cpu_chunks=5)
    router = Router(engine.scheduler)
    engine.serve("a", tokens(12))
    router.check_chunks()
    assert len(router.hashes[0]) == 3
    engine.serve("b", tokens(16, start=50))
    router.check_chunks()
    assert len(router.hashes[0]) == 5
    engine.workers[0].lose(0, 2, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    router.check_chunks()
    assert len(router.hashes[0]) < 5
    engine.scheduler.reset()
    router.check_chunks()
    assert router.hashes == [set()]


def test_a_failed_save_is_no_event() -> None:
    engine = FakeEngine(record_events=True)
    engine.add("a", tokens(12))
    engine.step({"a": 12})
    engine.apply(engine.workers[0], engine.workers[0].finish(fail=True))
    assert engine.scheduler.take_events() == []


@pytest.mark.parametrize("asked_for", [False, True])
def test_without_record_events_there_are_no_events(asked_for) -> None:
    engine = FakeEngine(record_events=asked_for)
    engine.serve("a", tokens(12))
    assert bool(engine.scheduler.take_events()) == asked_for


def test_who_describes_chunks_knows_until_when_to_keep_the_requests() -> None:
    """The chunks of a job in flight may still become events, and events may be left."""
    engine = FakeEngine(record_events=True)
    assert not engine.scheduler.job_ids
    for name, start in (("a", 0), ("b", 50)):
        engine.add(name, tokens(12, start=start))
        engine.step({name: 12})
    in_flight = [job.job_id for job in job_table(engine.scheduler)]
    assert len(in_flight) == 2
    assert (engine.scheduler.job_ids, engine.scheduler.has_events) == (range(in_flight[0], in_flight[1] + 1), False)
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert engine.scheduler.has_events
    assert not engine.scheduler.job_ids
    assert len(engine.scheduler.take_events()[0].block_hashes) == 6
    assert not engine.scheduler.has_events


# Several layer groups. Blocks have 4 tokens, and a chunk is a block.


def hashes_of(engine: WindowEngine, prompt: list[int]) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    engine.hasher.extend(hashes, prompt)
    return hashes


def found_and_named(engine: WindowEngine, router: Router, prompt: list[int]) -> tuple[int, int]:
    """The tokens of a prompt that a lookup finds, and those that the events name."""
    router.take()
    hashes = hashes_of(engine, prompt)
    return num_in_host_tier(engine.scheduler, hashes, len(prompt)), router.num_cached_tokens(hashes, len(prompt))


def test_each_group_has_its_own_events() -> None:
    """Two window groups of 2 and 1 chunks, then states: what each has, at the one boundary of a prompt."""
    engine = state_engine((9, 5))
    engine.serve("a", tokens(42))
    hashes = hashes_of(engine, tokens(42))
    stored = {0: hashes[:10], 1: hashes[8:10], 2: hashes[9:10], 3: hashes[9:10]}
    events = engine.scheduler.take_events()
    assert events == [
        TierEvent(kind=STORED, block_hashes=tuple(some), group_id=group_id) for group_id, some in stored.items()
    ]
    assert engine.scheduler.take_events() == []


def test_window_groups_of_one_size_have_events_each() -> None:
    engine = WindowEngine((9, 9))
    engine.serve("a", tokens(42))
    by_group = {event.group_id: event.block_hashes for event in engine.scheduler.take_events()}
    assert by_group[1] == by_group[2] == by_group[0][-2:]


def test_a_piece_is_stored_once_every_worker_has_it() -> None:
    engine = WindowEngine((9,), num_rows=40, workers=[FakeWorker(i, num_host_states=16) for i in range(2)])
    engine.add("a", tokens(42))
    engine.step({"a": 40})
    assert engine.scheduler.take_events() == []
    engine.apply(engine.workers[0], engine.workers[0].finish())
    assert engine.scheduler.take_events() == []
    engine.apply(engine.workers[1], engine.workers[1].finish())
    assert [(event.kind, event.group_id) for event in engine.scheduler.take_events()] == [
        (STORED, 0),
        (STORED, 1),
        (STORED, 2),
    ]


def test_pieces_whose_save_failed_are_no_event() -> None:
    engine = state_engine((9,))
    (worker,) = engine.workers
    engine.add("a", tokens(42))
    engine.step({"a": 40})
    engine.apply(worker, worker.finish(1))
    assert [event.group_id for event in engine.scheduler.take_events()] == [0]
    engine.apply(worker, worker.finish(fail=True))
    assert engine.scheduler.take_events() == []


def test_what_a_checkpoint_leaves_when_it_moves_is_removed() -> None:
    """Generated tokens take it along: the oldest window chunk and the state go, what both boundaries need stays."""
    engine = state_engine((9,), decode_save=True)
    router = Router(engine.scheduler)
    request = engine.add("a", tokens(41))
    assert request is not None
    engine.step({"a": 40})
    engine.settle()
    for i in range(8):
        assert engine.generate(request, i)
        engine.step({"a": 1})
        engine.settle()
    router.take()
    hashes = hashes_of(engine, request.tokens)
    assert router.hashes == [set(hashes[:12]), set(hashes[8:12]), {hashes[9], hashes[11]}]
    assert found_and_named(engine, router, [*request.tokens, 7]) == (48, 48)


def test_evicted_pieces_are_removed() -> None:
    engine = state_engine(num_host_states=2)
    router = Router(engine.scheduler)
    for i in range(4):
        engine.serve(f"r{i}", tokens(22, start=100 * i))
        prompts = [tokens(22, start=100 * k) for k in range(i + 1)]
        lengths = [found_and_named(engine, router, prompt) for prompt in prompts]
        assert all(found == named for found, named in lengths)
        assert sum(found > 0 for found, _ in lengths) == min(2, i + 1) == len(router.hashes[1])


def test_lost_pieces_are_removed_at_once() -> None:
    engine = WindowEngine((9, 5))
    router = Router(engine.scheduler)
    engine.serve("a", tokens(42))
    save = next(job for plan in engine.plans for job in plan.of(JobKind.SAVE) if job.parts[0].group_id)
    slot = save.parts[0].host_block_ids[0]
    assert found_and_named(engine, router, tokens(42)) == (40, 40)
    engine.workers[0].lose(slot, slot + 1, blocks_per_chunk=1)
    engine.apply(engine.workers[0], [])
    (event,) = engine.scheduler.take_events()
    assert (event.kind, event.group_id, event.block_hashes) == (REMOVED, 1, tuple(hashes_of(engine, tokens(42))[8:9]))


def test_a_reset_clears_all_groups_and_what_is_being_saved_is_no_event() -> None:
    engine = state_engine((9,))
    engine.serve("a", tokens(42))
    engine.add("b", tokens(42, start=100))
    engine.step({"b": 40})
    engine.scheduler.reset()
    engine.settle()
    (event,) = engine.scheduler.take_events()
    assert event == TierEvent(kind=CLEARED, block_hashes=(), group_id=None)


def test_events_of_many_pieces_come_in_parts(monkeypatch) -> None:
    monkeypatch.setattr(inspection, "_MAX_EVENT_CHUNKS", 33)
    workers = [FakeWorker(num_host_chunks=400)]
    engine = WindowEngine(
        (4 * 40 + 1,) * 3, num_blocks=400, num_cpu_chunks=400, num_staging_blocks=400, workers=workers
    )
    prompt = tokens(4 * 50 + 1)
    engine.serve("a", prompt)
    parts: list[list[TierEvent]] = []
    while part := engine.scheduler.take_events():
        parts.append(part)
    assert [sum(len(event.block_hashes) for event in part) for part in parts] == [33, 33, 33, 33, 33, 5]
    hashes = hashes_of(engine, prompt)
    for group_id, first in ((0, 0), (1, 10), (2, 10), (3, 10)):
        named = [h for part in parts for event in part if event.group_id == group_id for h in event.block_hashes]
        assert named == hashes[first:]


# Boundaries without a checkpoint of their own.


def test_a_prompt_shorter_than_the_window_can_continue_at_each_of_its_boundaries() -> None:
    engine = WindowEngine((41, 41))
    router = Router(engine.scheduler)
    engine.serve("a", tokens(34))
    for num_tokens in (5, 9, 17, 18, 33):
        prompt = tokens(num_tokens) + tokens(6, start=500)
        end = num_tokens // 4 * 4
        assert found_and_named(engine, router, prompt) == (end, end)
    assert engine.serve("b", tokens(17) + tokens(6, start=500)) == 16
    assert engine.serve("c", tokens(17) + tokens(6, start=600)) == 16
    engine.scheduler.check_invariants()


def test_between_the_checkpoints_of_two_turns_a_third_prompt_can_continue() -> None:
    engine = WindowEngine((17,))  # 4 chunks
    router = Router(engine.scheduler)
    engine.serve("a", tokens(33))  # chunks 4 to 7
    engine.serve("b", tokens(41))  # and 6 to 9
    prompt = tokens(37) + tokens(8, start=500)
    assert found_and_named(engine, router, prompt) == (36, 36)
    assert engine.serve("c", prompt) == 36


def test_shared_pieces_that_a_load_reads_stay_when_the_checkpoint_that_they_were_saved_for_is_evicted() -> None:
    engine = WindowEngine((41,))
    router = Router(engine.scheduler)
    engine.serve("a", tokens(34))
    request = engine.add("b", tokens(17) + tokens(8, start=500))
    assert request is not None
    assert request.num_computed == 16
    table = chunk_index(engine.scheduler).checkpoints
    while table.evict_one(()) is not None:
        pass
    engine.scheduler.check_invariants()
    engine.settle()
    engine.check_bytes(request)
    assert [found_and_named(engine, router, tokens(n)) for n in (34, 17, 13)] == [(16, 16), (16, 16), (12, 12)]
    engine.remove("b")
    engine.scheduler.check_invariants()


@pytest.mark.parametrize("states", [False, True])
def test_a_dropped_checkpoint_that_a_load_reads_is_not_found(states) -> None:
    """If its pieces are of one boundary only; the events say the same."""
    index = ChunkIndex(
        LRUPolicy(), record=True, window_chunks=() if states else (1,), first_slots=(0, 100) if states else (0,)
    )
    index.grow(Pool.CHUNKS, 10)
    if states:
        index.grow(Pool.STATES, 4)
    keys = [ChunkKey(b"%d" % i) for i in range(2)]
    index.complete(keys, index.allocate(Use(0), keys, range(2)), success=True)
    begun = index.begin_checkpoint(keys, 2, max_chunks=4)
    assert begun is not None
    index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
    index.checkpoints.hold(begun[0])
    index.take_changes()
    index.checkpoints.drop(begun[0])
    assert index.checkpoints.find(keys, 0, 2)[0] is None
    (change,) = index.take_changes()
    assert (change.found, change.of_pieces, len(change.keys or ())) == (False, True, 1)
    index.checkpoints.release(begun[0])
    assert index.take_changes() == []
    index.check_invariants()


def test_a_window_chunk_that_was_lost_and_saved_anew_is_not_saved_a_third_time() -> None:
    """The checkpoint before the new one still has the lost slot."""
    index = ChunkIndex(LRUPolicy(), record=True, window_chunks=(3,))
    index.grow(Pool.CHUNKS, 20)
    keys = [ChunkKey(b"%d" % i) for i in range(5)]
    index.complete(keys, index.allocate(Use(0), keys, range(5)), success=True)

    def save(end: int, before: Checkpoint | None = None) -> tuple[Checkpoint, list[NewPiece]]:
        begun = index.begin_checkpoint(keys, end, max_chunks=9, before=before)
        assert begun is not None
        index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
        return begun

    before, pieces = save(4)
    index.checkpoints.lose_pieces([piece.slot for piece in pieces if piece.number == 2])
    assert [piece.number for piece in save(3)[1]] == [0, 2]
    found, boundary, _ = index.checkpoints.find(keys, 0, 4)
    assert found is not None
    assert boundary == 4, "all of its pieces are there"
    assert [piece.number for piece in save(5, before)[1]] == [4]
    stored = [key for change in index.take_changes() if change.of_pieces and change.found for key in change.keys or ()]
    assert len(stored) == 6, "chunk 2 twice"
    index.check_invariants()


class PartlyLost:
    """A checkpoint after 5 chunks with two window chunks and a state, READY and held. The last window chunk is lost.

    Attributes:
      checkpoint: it.
      state: the name of its state.
    """

    def __init__(self) -> None:
        self.index = ChunkIndex(LRUPolicy(), record=True, window_chunks=(2,), first_slots=(0, 100))
        self.index.grow(Pool.CHUNKS, 20)
        self.index.grow(Pool.STATES, 4)
        self.keys = [ChunkKey(b"%d" % i) for i in range(6)]
        self.index.complete(self.keys, self.index.allocate(Use(0), self.keys, range(6)), success=True)
        self.checkpoint, pieces = self.save(5)
        self.state = piece_key(self.keys[4], 1)
        self.index.checkpoints.hold(self.checkpoint)
        self.index.checkpoints.lose_pieces([piece.slot for piece in pieces if piece.number == 4 and piece.group == 0])
        self.index.take_changes()

    def save(self, end: int) -> tuple[Checkpoint, list[NewPiece]]:
        begun = self.index.begin_checkpoint(self.keys, end, max_chunks=9)
        assert begun is not None
        self.index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
        return begun

    def find(self) -> Checkpoint | None:
        found, boundary, _ = self.index.checkpoints.find(self.keys, 0, 5)
        assert (boundary == 5) == (found is not None)
        return found

    def removed(self) -> set[ChunkKey]:
        """What ceased to be known since the last call; nothing else may have changed."""
        changes = self.index.take_changes()
        assert not any(change.found for change in changes)
        return {key for change in changes for key in change.keys or ()}


def test_a_checkpoint_takes_the_window_chunk_that_was_saved_anew() -> None:
    case = PartlyLost()
    case.save(6)  # and the lost window chunk with it
    case.index.take_changes()
    mended = case.find()
    assert mended is not None
    assert mended is not case.checkpoint  # which a load reads
    assert case.removed() == set()
    assert case.find() is mended
    case.index.checkpoints.release(case.checkpoint)
    assert case.removed() == set()
    assert case.find() is mended
    case.index.check_invariants()


def test_nothing_knows_the_state_of_an_evicted_checkpoint_that_a_load_still_reads() -> None:
    case = PartlyLost()
    case.save(6)
    assert case.find() is not None
    case.index.take_changes()
    case.index.checkpoints.evict_at([case.keys[4]])
    assert case.find() is None
    assert case.state in case.removed()
    case.index.checkpoints.release(case.checkpoint)
    assert case.state not in case.removed()
    case.index.check_invariants()


def test_a_checkpoint_of_which_a_part_is_lost_takes_no_state() -> None:
    case = PartlyLost()
    case.index.checkpoints.release(case.checkpoint)
    assert case.index.checkpoints.num_states == 1
    assert case.find() is None
    assert case.index.checkpoints.num_states == 0
    assert case.state in case.removed()
    case.index.check_invariants()


def test_a_load_settles_the_checkpoint_whose_save_has_begun_since_it_was_found() -> None:
    """Else the next step of the request that saves it would supersede it."""
    index = ChunkIndex(LRUPolicy(), window_chunks=(3,))
    index.grow(Pool.CHUNKS, 20)
    keys = [ChunkKey(b"%d" % i) for i in range(4)]
    index.complete(keys, index.allocate(Use(0), keys, range(4)), success=True)
    begun = index.begin_checkpoint(keys, 3, max_chunks=9)
    assert begun is not None
    index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
    found, boundary, _ = index.checkpoints.find(keys, 0, 2)
    assert found is not None
    assert boundary == 2
    index.checkpoints.hold(found)
    begun = index.begin_checkpoint(keys, 2, max_chunks=9, rolls=True)
    assert begun is not None
    index.use_checkpoint(found, 2)
    assert begun[0].was_loaded
    assert not begun[0].rolls
    index.checkpoints.release(found)
    index.check_invariants()


def test_without_record_nothing_is_kept_of_pieces() -> None:
    index = ChunkIndex(LRUPolicy(), window_chunks=(2,))
    index.grow(Pool.CHUNKS, 20)
    keys = [ChunkKey(b"%d" % i) for i in range(3)]
    index.complete(keys, index.allocate(Use(0), keys, range(3)), success=True)
    begun = index.begin_checkpoint(keys, 3, max_chunks=9)
    assert begun is not None
    index.checkpoints.complete([piece.slot for piece in begun[1]], success=True)
    index.checkpoints.lose_pieces([begun[1][0].slot])
    assert index.checkpoints.find(keys, 0, 3)[0] is None
    assert not index.has_changes
    assert index.take_changes() == []
