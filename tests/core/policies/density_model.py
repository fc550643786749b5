"""Hit density as it is defined: each chunk alone, no runs, slices or queues, all ages exact. O(chunks) a victim."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from tpu_offload.core.policies import base, constant_rates, density, lifetimes, run_classes, runs
from tpu_offload.types import ChunkKey

AGES = lifetimes.AGES
NUM_GROUPS = len(AGES) + 1
STARTS = [0.0, *AGES, 2 * AGES[-1]]


def group_of(age: int) -> int:
    group = 0
    while group < len(AGES) and AGES[group] <= age:
        group += 1
    return group


def class_of(num_uses: int, interval: float, num_chunks: int) -> int:
    """The last class whose chunks have been used at most this often; of many uses, that of the mean interval."""
    if num_uses >= run_classes.MANY_USES:
        place = math.floor(interval - (num_chunks.bit_length() - 2)) + 1
        return run_classes.FIRST_INTERVAL + min(max(place, 0), run_classes.NUM_INTERVALS - 1)
    classes = range(run_classes.NUM_ORIGINS, run_classes.FIRST_INTERVAL)
    return max(c for c in classes if run_classes.CLASS_USES[c] <= num_uses)


def of_its_pool(class_id: int) -> list[int]:
    return [c for c, pool in enumerate(run_classes.POOLS) if pool == run_classes.POOLS[class_id]]


class Chunk:
    """A chunk with its current lifetime and its uses so far."""

    def __init__(self, key: ChunkKey, parent: ChunkKey | None, use_id: int, origin: int) -> None:
        self.key, self.parent, self.use_id, self.class_id = key, parent, use_id, origin
        self.num_uses = 1
        self.interval = 0.0
        self.time = 0
        self.resident = True


class Worth:
    """Hit density from counted lifetimes. Tables by class and age group."""

    def __init__(self) -> None:
        self.factors = run_classes.CLASS_USES
        self.uses: Counter[tuple[int, int]] = Counter()
        self.elsewhere: defaultdict[tuple[int, int], float] = defaultdict(float)  # what other tiers gave for these
        self.ends: Counter[tuple[int, int]] = Counter()
        self.run_size = 1.0
        self.table: dict[tuple[int, int], float] = {}
        # For the question whether age matters: predicted rates and shares that others leave, and at the last estimate
        # uses less what others gave, and chunks alive.
        self.rates: dict[tuple[int, int], float] = {}
        self.shares: defaultdict[tuple[int, int], float] = defaultdict(lambda: 1.0)
        self.runs: Counter[tuple[int, int]] = Counter()  # that were used since, and not in HBM
        self.hits_then: dict[tuple[int, int], float] = {}
        self.alive_then: Counter[tuple[int, int]] = Counter()
        self.evidence, self.all_uses, self.all_exposure = ([0.0] * len(self.factors) for _ in range(3))
        self.learn([], 0, 0)

    def end(self, lives: list[tuple[int, int]], *, used: bool, num_in_hbm: int = 0, num_in_storage: int = 0) -> None:
        """Lifetimes (class, age) end together: equal ones are of one run. HBM served the use of the first.

        Storage had the first, too, perhaps more of them.
        """
        num_elsewhere = max(num_in_hbm, num_in_storage)
        for elsewhere, some in (
            (1.0, lives[:num_in_hbm]),
            (base.STORAGE_WORTH, lives[num_in_hbm:num_elsewhere]),
            (0.0, lives[num_elsewhere:]),
        ):
            for (class_id, age), num in Counter(some).items():
                self.ends[class_id, group_of(age)] += num
                self.uses[class_id, group_of(age)] += num * used
                self.elsewhere[class_id, group_of(age)] += num * elsewhere
                self.run_size += 0.001 * (num - self.run_size)
        if used:
            self.runs.update((class_id, group_of(age)) for class_id, age in set(lives[num_in_hbm:]))

    def learn(self, alive: list[tuple[int, int]], youngest: int, elapsed: int) -> None:
        first = group_of(max(1, youngest))
        alive_now = Counter((class_id, max(group_of(age), first)) for class_id, age in alive)
        for c in range(len(self.factors)):
            self.compare(c, first, alive_now, elapsed)
        self.hits_then = {place: num - self.elsewhere[place] for place, num in self.uses.items()}
        self.alive_then = alive_now
        self.runs.clear()
        uses, elsewhere, ends = (pooled(counts, first) for counts in (self.uses, self.elsewhere, self.ends))
        for class_id, age in alive:
            for c in of_its_pool(class_id):
                ends[c, max(group_of(age), first)] += 1
        last = max((group for _, group in ends), default=first)
        classes = range(len(self.factors))
        weight = lifetimes.PRIOR_RUNS * self.run_size
        chances, shares = {}, {}
        for group in range(first, last + 1):
            reached = [
                sum(ends[c, g] for g in range(group, last + 1)) - (ends[c, group] - uses[c, group]) / 2 for c in classes
            ]
            used = [uses[c, group] for c in classes]
            common = (sum(used) + weight * lifetimes.PRIOR_HAZARD) / (sum(reached) + weight)
            mean = (sum(map(float.__mul__, self.factors, map(float, reached))) + weight) / (sum(reached) + weight)
            for c in classes:
                prior = min(common * self.factors[c] / mean, lifetimes.MAX_PRIOR)
                chances[c, group] = min((used[c] + weight * prior) / (reached[c] + weight), lifetimes.MAX_HAZARD)
            common = (sum(used) - sum(elsewhere[c, group] for c in classes) + weight) / (sum(used) + weight)
            for c in classes:
                shares[c, group] = (used[c] - elsewhere[c, group] + weight * common) / (used[c] + weight)
        for c in classes:
            for group in range(first, last + 1):
                self.table[c, group] = best_rate(chances, shares, c, group, first, last)
            for group in range(NUM_GROUPS):
                known = min(max(group, first), last)
                later = STARTS[last + 1] / STARTS[group + 1] if group > last else 1
                width = STARTS[known + 1] - STARTS[known]
                self.table[c, group] = self.table[c, known] * later
                self.shares[c, group] = shares[c, known] if group <= last else 1.0
                self.rates[c, group] = (
                    -math.log(1 - chances[c, known]) / (width if known > first else STARTS[known + 1]) * later
                )
            if self.evidence[c] > constant_rates.ENOUGH:
                rate = self.all_uses[c] / self.all_exposure[c]
                for group in range(NUM_GROUPS):
                    known = min(max(group, first), last)
                    self.table[c, group] = rate * best_share(rate, shares, c, known, first, last)

    def compare(self, c: int, first: int, alive_now: Counter[tuple[int, int]], elapsed: int) -> None:
        """The evidence that age does not matter, from the ages at which chunks of a class were used."""
        uses: defaultdict[int, float] = defaultdict(float)
        used_runs: Counter[int] = Counter()
        exposure: defaultdict[int, float] = defaultdict(float)
        for group in range(NUM_GROUPS):
            uses[max(group, first)] += (
                self.uses[c, group] - self.elsewhere[c, group] - self.hits_then.get((c, group), 0)
            )
            used_runs[max(group, first)] += self.runs[c, group]
            alive = (self.alive_then[c, group] + alive_now[c, group]) / 2
            exposure[max(group, first)] += alive * elapsed * self.shares[c, group]
        total = sum(exposure.values())
        if total:
            mean = sum(exposure[group] * self.rates[c, group] for group in exposure) / total
            doubt = constant_rates.DOUBT
            for group in exposure:
                if exposure[group]:
                    predicted = (1 - doubt) * self.rates[c, group] + doubt * mean
                    self.evidence[c] += used_runs[group] * math.log(mean / predicted)
        self.all_uses[c] += sum(uses.values())
        self.all_exposure[c] += total

    def of(self, class_id: int, age: int) -> float:
        return self.table[class_id, group_of(age)]


def pooled(counts: Mapping[tuple[int, int], float], first: int) -> defaultdict[tuple[int, int], float]:
    """For each class the counts of its pool; groups before `first` are not distinguished."""
    found: defaultdict[tuple[int, int], float] = defaultdict(float)
    for (class_id, group), num in counts.items():
        for c in of_its_pool(class_id):
            found[c, max(group, first)] += num
    return found


def best_share(rate: float, shares, class_id: int, begin: int, first: int, last: int) -> float:
    """The share of the uses that others leave, up to the optimal stopping age; uses come at this rate."""
    best = uses = hits = 0.0
    for group in range(begin, last + 1):
        start = 0.0 if group == first else STARTS[group]
        end = STARTS[group + 1] if group < last else math.inf
        used = math.exp(-rate * start) - math.exp(-rate * end)
        uses, hits = uses + used, hits + used * shares[class_id, group]
        if uses:
            best = max(best, hits / uses)
    return best or 1.0


def best_rate(chances, shares, class_id: int, begin: int, first: int, last: int) -> float:
    """Ratio of hits to space, up to the optimal stopping age."""
    best, left, uses, room = 0.0, 1.0, 0.0, 0.0
    for group in range(begin, last + 1):
        used = left * chances[class_id, group]
        uses += used * shares[class_id, group]
        room += (left - used / 2) * (STARTS[group + 1] - (0.0 if group == first else STARTS[group]))
        left -= used
        best = max(best, uses / room)
    return best


class SlowDensity:
    """A tier that evicts the leaf with the lowest hit density."""

    def __init__(self, num_chunks: int) -> None:
        self.size = num_chunks
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.worth = Worth()
        self.now = self.use_id = 0
        self.next_learn, self.last_learn = runs.LEARN_EVERY, 0
        self.ghosts: dict[ChunkKey, None] = {}
        self.end_chance = 1.0
        # By the chunk before it: the use that saved it, and the last chunk of its prompt.
        self.ends: dict[ChunkKey, tuple[int, bytes]] = {}

    def is_resident(self, key: ChunkKey | None) -> bool:
        return key in self.chunks and self.chunks[key].resident

    def serve(self, prompt: list[ChunkKey], *, num_in_hbm: int = 0, num_in_storage: int = 0) -> int:
        """Returns how many chunks were found."""
        self.use_id += 1
        self.now += len(prompt)
        num_found = next((i for i, key in enumerate(prompt) if not self.is_resident(key)), len(prompt))
        self.learn_ends(prompt)
        num_resident = sum(chunk.resident for chunk in self.chunks.values())
        for _ in range(num_resident + sum(not self.is_resident(key) for key in prompt) - self.size):
            self.evict_one(set(prompt))
        ended: list[tuple[int, int]] = []
        num_ended_in_hbm = num_ended_in_storage = 0
        origin = 0
        for i, key in enumerate(prompt):
            chunk = self.chunks.get(key)
            if chunk is None:
                chunk = self.chunks[key] = Chunk(key, prompt[i - 1] if i else None, self.use_id, origin)
            else:
                ended.append((chunk.class_id, self.now - chunk.time))
                num_ended_in_hbm += i < num_in_hbm
                num_ended_in_storage += i < num_in_storage
                newest = 1 / min(chunk.num_uses, run_classes.MANY_USES)
                chunk.interval = (1 - newest) * chunk.interval + newest * math.log2(max(1, self.now - chunk.time))
                chunk.num_uses += 1
                chunk.class_id = class_of(chunk.num_uses, chunk.interval, self.size)
                origin = min(chunk.num_uses.bit_length(), run_classes.NUM_ORIGINS - 1)
            chunk.time, chunk.use_id, chunk.resident = self.now, self.use_id, True
            self.ghosts.pop(key, None)
        self.worth.end(ended, used=True, num_in_hbm=num_ended_in_hbm, num_in_storage=num_ended_in_storage)
        if len(prompt) > 1 and all(self.chunks[key].num_uses == 1 for key in prompt[-2:]):
            self.ends[prompt[-2]] = (self.use_id, prompt[-1])
        self.forget()
        if self.now >= self.next_learn:
            elapsed, self.last_learn = self.now - self.last_learn, self.now
            self.next_learn = self.now + runs.LEARN_EVERY
            alive = [(chunk.class_id, self.now - chunk.time) for chunk in self.chunks.values()]
            self.worth.learn(alive, self.size // runs.SLICES, elapsed)
        return num_found

    def learn_ends(self, prompt: list[ChunkKey]) -> None:
        for i, key in enumerate(prompt[:-1]):
            if key in self.ends:
                _, end = self.ends.pop(key)
                self.end_chance += ((prompt[i + 1] == end) - self.end_chance) * density.END_WEIGHT

    def evict_one(self, protected: set[ChunkKey]) -> None:
        inner = {chunk.parent for chunk in self.chunks.values() if chunk.resident}
        leaves = [c for c in self.chunks.values() if c.resident and c.key not in inner and c.key not in protected]
        if self.end_chance < 0.5:
            ends = [chunk for chunk in leaves if self.ends.get(chunk.parent, (0, b""))[1] == chunk.key]  # type: ignore[arg-type]
            if ends:
                del self.chunks[min(ends, key=lambda chunk: chunk.time).key]
                return
        victim = min(leaves, key=lambda chunk: (self.worth.of(chunk.class_id, self.now - chunk.time), chunk.time))
        victim.resident = False
        self.ghosts[victim.key] = None

    def forget(self) -> None:
        most = max(density.MIN_TRACKED, self.size * density.TRACKED)
        while len(self.ghosts) > most:
            key = next(iter(self.ghosts))
            del self.ghosts[key]
            chunk = self.chunks.pop(key)
            self.worth.end([(chunk.class_id, self.now - chunk.time)], used=False)
