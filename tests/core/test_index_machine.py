"""ChunkIndex with each eviction policy as a state machine against plain dicts and lists."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.core.plain_index import INVALID, PENDING, READY, PlainIndex, Resident
from tests.grids import few
from tpu_offload.core.index import ChunkIndex
from tpu_offload.core.policies import DEFAULT_POLICY, POLICIES, PriorityPolicy, Use, density, run_keys, runs
from tpu_offload.types import ChunkKey, Pool

SETTINGS = settings(max_examples=150, stateful_step_count=60, derandomize=True, deadline=None)
MAX_SLOTS = 9


def _prefix(names: str) -> list[ChunkKey]:
    return [ChunkKey(name.encode()) for name in names.split()]


# They share heads; none of the keys sorts like its place.
PREFIXES = [_prefix(names) for names in ("s0 s1 q2 q3 q4", "s0 s1 b2 b3", "s0 m1 m2", "d0 d1 c2", "e0 a1", "x0")]
KEYS = sorted({key for prefix in PREFIXES for key in prefix})

prefixes = st.sampled_from(PREFIXES)
ages = st.sampled_from([0, 0, 1, 2, 5])
slots = st.integers(0, MAX_SLOTS)
many_slots = st.sampled_from([6, 7, 8, MAX_SLOTS, 5, 4, 3, 2, 1, 0])

faulty = precondition(lambda self: self.faulty)


class IndexMachine(RuleBasedStateMachine):
    """Requests of six prefixes compete for a few slots."""

    name: str

    def make_policy(self):
        return PriorityPolicy(POLICIES[self.name])

    def check_order(self, victim, candidates):
        """Checks what holds for the order of evictions under every policy."""
        self.plain.check_priority(victim, candidates)

    @initialize(
        num_slots=many_slots, served=st.lists(prefixes, min_size=2, max_size=4), faulty=st.booleans(),
        priorities=st.sampled_from([(0,), (0, 1), (5,), (-1, 0, 2), (-100, 7, 100)]),
    )  # fmt: skip
    def begin(self, num_slots, served, faulty, priorities):
        self.index = ChunkIndex(self.make_policy(), record=True)
        self.plain = PlainIndex(PREFIXES)
        self.uses: list[Use] = []
        self.saves: list[tuple[list[ChunkKey], list[int]]] = []
        self.doomed: set[int] = set()  # slots that a save in flight may not fill any more
        self.found: set[ChunkKey] = set()  # by the changes that the index has reported
        self.faulty = faulty
        self.priorities = priorities
        self.grow(num_slots)
        for prefix in served:
            self.serve(prefix, len(prefix))

    def use_of(self, age):
        """The use of a new request, or of the one `age` requests before."""
        if 0 < age < len(self.uses):
            return self.uses[-age]
        number = len(self.uses)
        self.uses.append(Use(number, priority=self.priorities[number % len(self.priorities)]))
        return self.uses[-1]

    def changes(self) -> tuple[list[ChunkKey], list[ChunkKey]]:
        """Chunks that the last call added to the lookups, and those that it took from them, in order."""
        changes = [
            (key, found)
            for keys, found, _ in self.index.take_changes()
            for key in (sorted(self.found) if keys is None else keys)
        ]
        for key, found in changes:
            assert (key in self.found) is not found, "reported twice, or never reported before"
            (self.found.add if found else self.found.remove)(key)
        return [key for key, found in changes if found], [key for key, found in changes if not found]

    # Slots.

    @precondition(lambda self: self.plain.num_slots < MAX_SLOTS)
    @rule(num_slots=many_slots)
    def grow(self, num_slots):
        self.index.grow(Pool.CHUNKS, num_slots)
        self.plain.grow(num_slots)

    @faulty
    @rule(first=slots, num=st.integers(1, MAX_SLOTS))
    def lose_slots(self, first, num):
        self.lose(first, first + num)

    def lose(self, first, end):
        plain = self.plain
        lost = self.index.invalidate_slots(first, end)
        assert sorted(lost) == sorted(key for key in plain.keys(READY) if first <= plain.chunks[key].slot < end)
        assert self.changes() == ([], lost)
        plain.invalidate(lost)
        self.doomed.update(slot for _, slots in self.saves for slot in slots if first <= slot < end)

    @faulty
    @rule(num_slots=slots, num_at_once=slots)
    def a_worker_starts_anew(self, num_slots, num_at_once):
        self.lose(num_slots, MAX_SLOTS)
        self.index.shrink(Pool.CHUNKS, num_slots)
        self.plain.shrink(num_slots)
        self.agrees_with_the_model()
        self.grow(num_at_once)

    @precondition(lambda self: self.plain.quarantined)
    @rule(data=st.data())
    def end_quarantine(self, data):
        ended = data.draw(st.lists(st.sampled_from(self.plain.quarantined), unique=True, min_size=1))
        self.index.end_quarantine(ended)
        for slot in ended:
            self.plain.quarantined.remove(slot)
            self.plain.give_back(slot)

    # Saves.

    @rule(prefix=prefixes, num=st.integers(1, 5))
    def serve(self, prefix, num):
        """A request from its match to the end of its save, or of the last one that is in flight."""
        self.match(prefix, 0, use=True, pin=False, num=num)
        self.save(prefix, 0, num, num, own=True, others=set(), age=1)
        self.touch(prefix, num, age=1)
        if self.saves:
            self.end_save(-1, [True] * 5)

    @rule(
        prefix=prefixes, first=st.integers(0, 4), num=st.integers(1, 5), room=st.integers(1, 5),
        own=st.booleans(), others=st.sets(st.sampled_from(KEYS), max_size=2), age=ages,
    )  # fmt: skip
    def save(self, prefix, first, num, room, own, others, age=0):
        plain = self.plain
        while first and (first > len(prefix) or prefix[first - 1] not in plain.chunks):
            first -= 1
        end = min(first + num, len(prefix))
        invalid = plain.keys(INVALID)
        reached = next((i for i in range(first, end) if prefix[i] in invalid), end)
        missing = [i for i in range(first, reached) if prefix[i] not in plain.chunks]
        found, looked_at = self.index.missing(prefix, first, end)
        assert (list(found), looked_at) == (missing, reached)
        if missing:
            # As the scheduler does it: with one hole, protecting the chunk before it protects all before it.
            one_hole = not own and missing == list(range(first, reached))
            protected = others | set(prefix[max(first - 1, 0) : first] if one_hole else prefix[:end])
            self.allocate(self.use_of(age), prefix, missing[:room], protected)

    def allocate(self, use, prefix, numbers, protected):
        plain = self.plain
        granted = self.index.allocate(use, prefix, numbers, protected=protected)
        added, evicted = self.changes()
        assert added == []
        victims = iter(evicted)
        # More than one round only if slots of victims are not usable, because a worker has fewer.
        while num_evicted := max(0, min(len(numbers) - len(plain.free), plain.num_evictable(protected))):
            for _ in range(num_evicted):
                victim = next(victims, None)
                assert victim is not None, "too few were evicted"
                candidates = plain.candidates(protected, plain.chunks)
                assert victim in candidates, "it is in use, unfinished or protected, or another chunk follows it"
                self.check_order(victim, candidates)
                plain.evict(victim)
        assert next(victims, None) is None, "more were evicted than had to be"
        num_granted = min(len(numbers), len(plain.free))
        assert granted == plain.free[:num_granted]
        del plain.free[:num_granted]
        keys = [prefix[i] for i in numbers[:num_granted]]
        if keys:
            plain.chunks.update(zip(keys, map(Resident, granted), strict=True))
            plain.recency.use(prefix[: numbers[num_granted - 1] + 1])
            plain.use(use, keys)
            self.saves.append((keys, granted))

    @precondition(lambda self: self.saves)
    @rule(
        number=st.integers(0, 3),
        copied=st.lists(st.booleans(), min_size=5),
        good=st.booleans(),
        quarantine=st.booleans(),
    )
    def a_save_ends(self, number, copied, good, quarantine):
        """Whole or in part."""
        good = good or not self.faulty
        self.end_save(number % len(self.saves), [True] * 5 if good else copied, quarantine=quarantine)

    def end_save(self, number, copied, *, quarantine=False):
        """Publishes what was copied, then removes the rest."""
        keys, slots = self.saves.pop(number)
        copied = [ok and slot not in self.doomed for ok, slot in zip(copied, slots, strict=False)]
        self.doomed.difference_update(slots)
        for success in (True, False):
            part = [i for i, ok in enumerate(copied) if ok is success]
            if part:
                self.complete([keys[i] for i in part], [slots[i] for i in part], success, quarantine and not success)

    def complete(self, keys, slots, success, quarantine):
        plain = self.plain
        self.index.complete(keys, slots, success=success, quarantine=quarantine)
        if success:
            assert self.changes() == (keys, [])
            for key in keys:
                plain.chunks[key].state = READY
            return
        for key in reversed(keys):
            plain.lose(key, quarantine=quarantine)
        plain.sweep()

    # Lookups.

    @rule(prefix=prefixes, num=st.integers(1, 5))
    def pin_a_prefix(self, prefix, num):
        self.match(prefix, 0, use=True, pin=True, num=num)

    @rule(prefix=prefixes, first=st.integers(0, 4), use=st.booleans(), pin=st.booleans(), num=st.integers(1, 5))
    def match(self, prefix, first, use, pin, num):
        plain, found = self.plain, []
        for key in prefix[first:]:
            if plain.state(key) is not READY:
                break
            found.append(plain.chunks[key].slot)
        assert self.index.find(prefix, first) == found
        if use and first + len(found):
            self.touch(prefix, first + len(found))
        if pin and found:
            keys = prefix[first : first + min(num, len(found))]
            self.index.pin(keys)
            plain.pins.append(keys)

    @rule(prefix=prefixes, num=st.integers(1, 5), age=ages)
    def touch(self, prefix, num, age=0):
        num = min(num, len(prefix))
        use = self.use_of(age)
        self.index.touch(use, prefix, num)
        self.plain.recency.use(prefix[:num])
        self.plain.use(use, prefix[:num])

    @precondition(lambda self: self.plain.pins)
    @rule(data=st.data(), shorter=st.integers(1, 4))
    def a_load_takes_less_than_was_found(self, data, shorter):
        """Replaces a longer pin by a shorter one; the chunks they cover may be invalid by now."""
        pins = self.plain.pins
        number = data.draw(st.integers(0, len(pins) - 1))
        longer = pins[number]
        keys = longer[: max(1, len(longer) - shorter)]
        self.index.pin(keys)
        self.index.unpin(longer)
        pins[number] = keys
        self.plain.sweep()

    @rule(
        uses=st.lists(st.tuples(prefixes, st.integers(1, 5), st.booleans()), min_size=2, max_size=6),
        wanted=st.permutations(PREFIXES), room=st.integers(1, 3),
    )  # fmt: skip
    def what_was_pinned_keeps_its_age(self, uses, wanted, room):
        """Evictions for saves skip pinned chunks, and evict them once unpinned; nothing is used in between."""
        pins = self.plain.pins
        num_pins = len(pins)
        for prefix, num, pin in uses:
            self.touch(prefix, num)
            self.match(prefix, 0, use=False, pin=pin, num=num)
        for prefix in wanted[:2]:
            self.save(prefix, 0, 5, room, own=True, others=set())
        while len(pins) > num_pins:
            self.index.unpin(pins.pop())
            self.plain.sweep()
        for prefix in wanted[2:]:
            self.save(prefix, 0, 5, 1, own=True, others=set())

    @precondition(lambda self: self.plain.pins)
    @rule(data=st.data())
    def unpin(self, data):
        pins = self.plain.pins
        self.index.unpin(pins.pop(data.draw(st.integers(0, len(pins) - 1))))
        self.plain.sweep()

    # Losses.

    @faulty
    @rule(number=st.integers(0, 10))
    def invalidate_one(self, number):
        if ready := self.plain.keys(READY):
            self.invalidate([ready[number % len(ready)]])

    @faulty
    @rule(prefix=prefixes, place=st.integers(0, 2), num_lost=st.integers(0, 2), pin=st.booleans(), fails=st.booleans())
    def invalidate_one_that_others_follow(self, prefix, place, num_lost, pin, fails):
        """A request may have it in HBM and load those, while another saves it again, and more before it is lost."""
        place = min(place, len(prefix) - 1)
        self.serve(prefix, 5)
        self.invalidate([prefix[place]])
        self.match(prefix, place + 1, use=True, pin=pin, num=5)
        self.save(prefix, place, 1, 1, own=True, others=set())
        self.invalidate(prefix[: min(place, num_lost)])
        if fails and self.saves:
            self.end_save(-1, [False] * 5)

    @faulty
    @rule(keys=st.lists(st.sampled_from([*KEYS, b"unknown"]), unique=True))
    def invalidate(self, keys):
        ready = [key for key in keys if self.plain.state(key) is READY]
        assert self.index.invalidate(keys) == ready
        assert self.changes() == ([], ready)
        self.plain.invalidate(ready)

    @faulty
    @rule()
    def clear(self):
        self.index.clear()
        added, gone = self.changes()
        assert (added, gone) == ([], sorted(self.plain.keys(READY)))
        self.plain.clear()

    @faulty
    @rule(num_slots=slots, num_at_once=slots)
    def a_worker_loses_all(self, num_slots, num_at_once):
        self.clear()
        self.index.shrink(Pool.CHUNKS, num_slots)
        self.plain.shrink(num_slots)
        self.agrees_with_the_model()
        self.grow(num_at_once)

    @invariant()
    def agrees_with_the_model(self):
        index, plain = self.index, self.plain
        index.check_invariants()
        assert index.take_changes() == []
        assert index.num_deferred == 0 or index.tidy() == []
        assert self.found == set(plain.keys(READY))
        assert {key: index.state(key) for key in KEYS} == {key: plain.state(key) for key in KEYS}
        assert [key for key in KEYS if key in index] == sorted(plain.chunks)
        assert len(index) == len(plain.chunks)
        assert (index.num_slots(Pool.CHUNKS), index.num_free_slots) == (plain.num_slots, len(plain.free))
        assert (index.num_quarantined_slots, index.num_evicted) == (len(plain.quarantined), plain.num_evicted)
        tails = [keys[-1] for keys in plain.pins]
        index.check_holds(pins={key: tails.count(key) for key in tails}, pending=set(plain.keys(PENDING)))
        assert sorted(key for keys, _ in self.saves for key in keys) == sorted(plain.keys(PENDING))


class LRUIndexMachine(IndexMachine):
    """Of the chunks that can be evicted, the one used longest ago is the victim."""

    def make_policy(self):
        return POLICIES["lru"]()

    def check_order(self, victim, candidates):
        self.plain.recency.check(victim, candidates)


@pytest.fixture(autouse=True)
def _slices_end_soon(monkeypatch):
    """Density learns, merges slices and forgets within the few chunks of this model."""
    monkeypatch.setattr(runs, "MIN_SLICE", 4)
    monkeypatch.setattr(runs, "LEARN_EVERY", 8)
    monkeypatch.setattr(density, "MIN_TRACKED", 4)
    monkeypatch.setattr(run_keys, "_SLAB", 2)


@pytest.mark.parametrize("name", few(POLICIES, "density"))
def test_index(name):
    num_examples = SETTINGS.max_examples if name == DEFAULT_POLICY else SETTINGS.max_examples // 3
    machine = type(name, (IndexMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=num_examples))


@pytest.mark.wide
def test_index_with_lru_and_no_priorities():
    run_state_machine_as_test(LRUIndexMachine, settings=SETTINGS)
