"""Planted bugs in the flow between host tier and storage: the random lives find each of them."""

from collections.abc import Callable

import pytest

from tests.compiled import interpreted_only
from tests.simulation.mutations import Mutation, planted
from tests.storage import hard_lives
from tests.storage.checkpoint_lives import CheckpointLife
from tests.storage.lives import live, live_shared

pytestmark = interpreted_only  # it exchanges the code of functions

_NUM_SEEDS = 60

MUTATIONS = (
    Mutation(
        "demotions are dispatched after the saves of their step",
        "StorageWrites._plan_demotion",
        "JobKind.DEMOTE",
        "JobKind.CASCADE",
    ),
    Mutation(
        "the evicted are demoted in every later step",
        "StorageWrites._plan_demotion",
        "victims, self._victims = _1, {}",
        "victims = _1",
    ),
    Mutation(
        "demotions ignore the room in storage",
        "StorageWrites._plan_demotion",
        "self._room_to_write() if may_write else 0",
        "9999",
    ),
    Mutation(
        "what is demoted is deleted after it",
        "StorageWrites._plan_writes",
        "self._records.to_delete.pop(name, None)",
        "pass",
    ),
    Mutation("a reset keeps what is to be demoted", "StorageWrites.plan", "self._victims = {}", "pass"),
    Mutation("all that is evicted is admitted", "StorageWrites.note_evicted", "self._admission.admits(key)", "True"),
    Mutation("all that is saved is admitted", "StorageWrites.offer", "self._admission.admits(key)", "True"),
    Mutation("one sighting is enough", "AdmissionFilter.__init__", "2 if _ else 1", "1"),
    Mutation("sightings count as hits", "AdmissionFilter.observe", "self._counts_sightings", "True"),
    Mutation(
        "the chunk before a demoted one is forgotten",
        "StorageWrites.note_evicted",
        "_Victim(slot, parent)",
        '_Victim(slot, ChunkKey(b""))',
    ),
    Mutation(
        "the chunk before one that is written is forgotten",
        "StorageWrites._add_chunks",
        "self._index.parent_in(found[0])",
        'ChunkKey(b"")',
    ),
    Mutation(
        "the chunk before an expected one is forgotten",
        "StorageWrites._expect",
        "self._index.parent_in(found[0])",
        'ChunkKey(b"")',
    ),
    Mutation(
        "what is expected takes room", "_Stored.__len__", "len(self._tree) - self.num_expected", "len(self._tree)"
    ),
    Mutation(
        "what was expected is not evicted once it is stored",
        "PolicyOrder._publish",
        "self._policy.became_leaf(key)",
        "pass",
    ),
    Mutation(
        "a request waits anew each time that it is looked up",
        "LoadPlanner.answer",
        "request.arrival.since_s is None",
        "True",
    ),
    Mutation(
        "a request waits for storage for ever",
        "StorageStackPlanner.read_wait_s",
        "return wait_s",
        "return 1e9",
    ),
    Mutation("a forced recompute loads", "LoadCosts._prefers", "return self._mode is LoadMode.LOAD", "return True"),
    Mutation(
        "a promotion that failed is published",
        "StorageReads.ended",
        "{slot for i, slot in enumerate(job.slots) if i in bad}",
        "set()",
    ),
    Mutation(
        "a write that failed counts as stored",
        "StorageWrites._end_write",
        "records.forget(name)",
        "records.add(name)",
    ),
    Mutation("all jobs go to the nearest tier", "TierJobs.plan", "self._tier_id", "0"),
    Mutation("a tier takes the jobs of all for its own", "TierJobs.of", "_1 == self._tier_id", "True"),
    Mutation("all jobs end in the nearest tier", "StorageStackPlanner._ended", "self._tiers[_1]", "self._tiers[0]"),
    Mutation("a reset clears the nearest tier alone", "StorageStackPlanner.reset", "self._tiers", "self._tiers[:1]"),
    Mutation(
        "promotions of each tier take half of the host tier",
        "StorageReads._max_slots",
        "self._index.num_slots(_1) // (2 * self._num_tiers)",
        "self._index.num_slots(_1) // 2",
    ),
    Mutation(
        "chunks that are being read take no memory",
        "StoredRecords.room_in_flight",
        "self.max_in_flight - len(self.writing) - len(self.promoting)",
        "self.max_in_flight - len(self.writing)",
    ),
)


SHARED_MUTATIONS = (
    Mutation("a chunk counts if any worker has it", "Job._add_found", "map(min, _1, _2)", "map(max, _1, _2)"),
    Mutation("what is missing counts as found", "LookupPlanner.ended", "prefix[:num_found]", "prefix"),
    Mutation(
        "an answer of before a reset counts",
        "LookupPlanner.ended",
        "job.state is not JobState.FINISHED",
        "not job.num_found",
    ),
    Mutation("a request asks again and again", "LookupPlanner._want", "request.arrival.note_asked(first, end)", "pass"),
    Mutation(
        "a failed read is asked for again",
        "LookupPlanner._unknown",
        "arrival.first_asked_chunk <= first < arrival.num_asked_chunks",
        "False",
    ),
    Mutation("a late lookup is waited for", "LookupPlanner.ask", "self._is_late", "False"),
    Mutation(
        "the wait for a lookup has no end",
        "LookupPlanner._estimate_s",
        "return self._costs.lookup_wait_s(_1, _2, _3, default_s=_4)",
        "return 1e9",
    ),
    Mutation(
        "what is in flight is asked for again",
        "LookupPlanner._want",
        "self._wanted.get(key) or self._asked.get(key)",
        "self._wanted.get(key)",
    ),
    Mutation(
        "keys of a new namespace are asked for",
        "LookupPlanner.reset",
        "self._was_reset, self._is_enabled = (True, False)",
        "pass",
    ),
    Mutation("a reset keeps what is to be asked for", "LookupPlanner.reset", "self._drop_wanted()", "pass"),
    Mutation(
        "lookups have no breaker",
        "StoragePlanner.__init__",
        "jobs.make_breaker('lookups in')",
        "type(jobs.make_breaker('none'))('none', num_failures=0, retry_s=1.0, clock=context.clock)",
    ),
    Mutation(
        "keys that were answered still count as in flight",
        "LookupPlanner.ended",
        "self._num_keys -= len(self._asked.pop(prefix[0]))",
        "self._asked.pop(prefix[0])",
    ),
    Mutation("what others have stored is deleted", "StoredRecords.forget", "not self.is_shared", "True"),
    Mutation("what is found exceeds the capacity", "StoragePlanner.add_found", "new[: max(0, records.room)]", "new"),
)


# Only lives with restarts, late reports and partial failures have these.
HARD_MUTATIONS = (
    Mutation("what a restarted worker has lost is stored", "StoragePlanner.adopt", "records.forget(name)", "pass"),
    Mutation(
        "what nobody knows stays in storage",
        "StoragePlanner.adopt",
        "self.writes.deletions.add_unknown(listed)",
        "pass",
    ),
    Mutation("a deletion that failed in part is over", "Deletions.ended", "records.to_delete[_] = None", "pass"),
    Mutation(
        "what a killed worker was writing goes on",
        "ReportHandler._handle_restart",
        "self._adopt_stored(report)",
        "pass",
    ),
)


CHECKPOINT_MUTATIONS = (
    Mutation(
        "a piece that could not be read is published",
        "StorageReads.ended",
        "{slot for i, slot in enumerate(job.slots) if i in bad}",
        "set()",
    ),
    Mutation(
        "a request waits for its target for ever",
        "StorageStackPlanner.read_wait_s",
        "return wait_s",
        "return 1e9",
    ),
    Mutation(
        "a checkpoint that is evicted is written from the slots of another",
        "StorageWrites.note_evicted_checkpoint",
        "_Victim(slot)",
        "_Victim(0)",
    ),
    Mutation(
        "a state counts as one record in flight",
        "StorageWrites._plan_writes",
        "self._records.writing.update(batch.names)",
        "self._records.writing.update(batch.keys)",
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found(mutation):
    _find(mutation, live)


@pytest.mark.parametrize("mutation", SHARED_MUTATIONS, ids=lambda m: m.name)
def test_a_bug_in_look_ups_is_found(mutation):
    _find(mutation, live_shared)


@pytest.mark.parametrize("mutation", HARD_MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found_under_more_faults(mutation):
    _find(mutation, hard_lives.live)


@pytest.mark.parametrize("mutation", CHECKPOINT_MUTATIONS, ids=lambda m: m.name)
def test_a_bug_in_checkpoints_is_found(mutation):
    _find(mutation, lambda seed: CheckpointLife(seed).run(100))


def _find(mutation: Mutation, one: Callable[[int], object]) -> None:
    with planted(mutation):
        for seed in range(_NUM_SEEDS):
            try:
                one(seed)
            except (AssertionError, KeyError):
                return
    pytest.fail(f"{_NUM_SEEDS} lives with this bug broke no rule")
