"""Hit density by class and age, against its definition."""

import dataclasses
import math
import random

import numpy as np
import pytest

from tpu_offload.core.policies import lifetimes
from tpu_offload.core.policies.lifetimes import Lifetimes

NUM_USES = (1.0, 1.0, 2.0, 8.0)


def density(learnt: Lifetimes, ages) -> np.ndarray:
    """[age, class]"""
    densities = np.array(learnt.densities).reshape(-1, learnt.num_classes)
    return densities[[learnt.first_density(age) // learnt.num_classes for age in ages]]


@dataclasses.dataclass(frozen=True)
class Life:
    class_id: int
    num_chunks: int
    age: int
    end: str  # used, used in HBM, forgotten (censored), or alive (still running)


def group_of(age: float) -> int:
    return sum(start <= age for start in lifetimes.AGES)


class BySlowDefinition:
    """The same from a plain list of lifetimes, one sum at a time."""

    def __init__(self, lives: list[Life], num_uses=NUM_USES, weights: list[float] | None = None) -> None:
        self.chances: dict[tuple[int, int], float] = {}
        self.num_uses = num_uses
        mean = 1.0
        for life in lives:
            if life.end != "alive":
                mean += 0.001 * (life.num_chunks - mean)
        self.prior_weight = lifetimes.PRIOR_RUNS * mean
        alive = [group_of(life.age) for life in lives if life.end == "alive"]
        self.first = min(alive, default=group_of(1))
        groups = [max(group_of(life.age), self.first) for life in lives]
        self.lives = list(zip(lives, groups, weights or [1.0] * len(lives), strict=True))

    def uses(self, class_id: int, group: int, ends=("used", "used in HBM")) -> float:
        return sum(
            weight * life.num_chunks
            for life, its, weight in self.lives
            if (life.class_id, its) == (class_id, group) and life.end in ends
        )

    def reached(self, class_id: int, group: int) -> float:
        """Those that ended without a use may have done so anywhere in the group: they count half."""
        total = 0.0
        for life, its, weight in self.lives:
            if life.class_id == class_id and its >= group:
                half = its == group and not life.end.startswith("used")
                total += weight * life.num_chunks * (0.5 if half else 1)
        return total

    def chance(self, class_id: int, group: int) -> float:
        if (class_id, group) not in self.chances:
            self.chances[class_id, group] = self.chance_as_defined(class_id, group)
        return self.chances[class_id, group]

    def chance_as_defined(self, class_id: int, group: int) -> float:
        classes = range(len(self.num_uses))
        uses, reached = [self.uses(c, group) for c in classes], [self.reached(c, group) for c in classes]
        weight = self.prior_weight
        common = (sum(uses) + weight * lifetimes.PRIOR_HAZARD) / (sum(reached) + weight)
        mean_factor = (sum(n * r for n, r in zip(self.num_uses, reached, strict=True)) + weight) / (
            sum(reached) + weight
        )
        prior = min(common * self.num_uses[class_id] / mean_factor, lifetimes.MAX_PRIOR)
        chance = (uses[class_id] + weight * prior) / (reached[class_id] + weight)
        return min(chance, lifetimes.MAX_HAZARD)

    def share(self, class_id: int, group: int) -> float:
        """Of the uses, those that HBM does not serve."""
        uses, weight = [self.uses(c, group) for c in range(len(self.num_uses))], self.prior_weight
        hits = [self.uses(c, group, ends=("used",)) for c in range(len(self.num_uses))]
        common = (sum(hits) + weight) / (sum(uses) + weight)
        return (hits[class_id] + weight * common) / (uses[class_id] + weight)

    def worth(self, class_id: int, age: int) -> float:
        """Over all stopping ages, the highest ratio of expected hits to the expected time until a use or that age."""
        starts = [0.0, *lifetimes.AGES, 2 * lifetimes.AGES[-1]]
        last = max((its for life, its, weight in self.lives), default=self.first)
        begin = max(group_of(age), self.first)
        if begin > last:  # no lifetime reached that age
            return self.worth(class_id, math.ceil(starts[last])) * starts[last + 1] / starts[begin + 1]
        best, left, uses, time = 0.0, 1.0, 0.0, 0.0
        for group in range(begin, last + 1):
            start = 0.0 if group == self.first else starts[group]
            chance = self.chance(class_id, group)
            uses += left * chance * self.share(class_id, group)
            time += (left + left * (1 - chance)) / 2 * (starts[group + 1] - start)
            left *= 1 - chance
            best = max(best, uses / time)
        return best


def random_lives(seed: int, num: int, *, with_hbm: bool = False) -> list[Life]:
    rng = random.Random(seed)
    lives = []
    for _ in range(num):
        end = rng.choice(["used", "used in HBM" if with_hbm else "used", "forgotten", "alive"])
        lives.append(Life(rng.randrange(4), rng.randint(1, 30), int(2 ** rng.uniform(0, 20)), end))
    return lives


def add(learnt: Lifetimes, lives: list[Life]) -> None:
    for life in lives:
        if life.end != "alive":
            used, in_hbm = life.end.startswith("used"), life.end == "used in HBM"
            learnt.end(life.class_id, life.num_chunks, life.age, used=used, elsewhere=float(in_hbm))


def learn(learnt: Lifetimes, lives: list[Life]) -> None:
    alive = [life for life in lives if life.end == "alive"]
    ages = [life.age for life in alive] or [1]
    learnt.learn(ages, [[life.num_chunks * (life.class_id == c) for c in range(4)] for life in alive] or [[0] * 4])


AGES = [0, 1, 15, 16, 17, 100, 1000, 12_345, 100_000, 2**20, 2**30]


def assert_worth_is_by_definition(learnt: Lifetimes, slow: BySlowDefinition) -> None:
    expected = [[slow.worth(class_id, age) for class_id in range(4)] for age in AGES]
    np.testing.assert_allclose(density(learnt, AGES), expected, rtol=1e-9)


@pytest.mark.parametrize("num", [1, 3, 30, 300])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_hbm", [False, True])
def test_hit_density_is_the_best_ratio_of_uses_to_space_over_all_ages(num, seed, with_hbm) -> None:
    lives = random_lives(seed, num, with_hbm=with_hbm)
    learnt = Lifetimes(NUM_USES, half_life=10**9)
    add(learnt, lives)
    learn(learnt, lives)
    assert_worth_is_by_definition(learnt, BySlowDefinition(lives))


def test_observations_count_half_after_the_half_life() -> None:
    old, new = random_lives(0, 200), random_lives(1, 100)
    learnt = Lifetimes(NUM_USES, half_life=50)
    add(learnt, old)
    learn(learnt, [])
    learn(learnt, [])  # halves once per half life, not each time
    add(learnt, new)
    learn(learnt, new)
    ended = [life for life in old if life.end != "alive"]
    weights = [0.25] * len(ended) + [1.0 if life.end == "alive" else 0.5 for life in new]
    assert_worth_is_by_definition(learnt, BySlowDefinition([*ended, *new], weights=weights))


def test_a_running_lifetime_is_not_accumulated() -> None:
    """Running lifetimes are not added to the counts: they are counted when they end."""
    lives = random_lives(0, 50)
    learnt = Lifetimes(NUM_USES, half_life=10**9)
    add(learnt, lives)
    learn(learnt, lives)
    before = density(learnt, AGES)
    learn(learnt, lives)
    np.testing.assert_array_equal(density(learnt, AGES), before)


def test_the_prior_falls_with_age_and_grows_with_uses() -> None:
    worth = density(Lifetimes((1.0, 2.0, 4.0, 8.0), half_life=100), [2**i for i in range(4, 40)])
    assert (np.diff(worth, axis=0) < 0).all()
    assert (np.diff(worth, axis=1) > 0).all()


def test_few_observations_move_it_a_little_and_many_all_the_way() -> None:
    worths = []
    for num in (0, 1, 1000):
        learnt = Lifetimes((1.0, 1.0), half_life=10**9)
        for _ in range(num):
            learnt.end(0, 1, 2000, used=False)
            learnt.end(1, 1, 100, used=True)
        learnt.learn([1], [[0, 0]])
        worths.append(density(learnt, [100])[0])
    (none, same), (once, once_used), (never, always) = worths
    assert none == same
    assert 0.3 < once / once_used < 0.9
    assert never < always / 100


def test_censored_lifetimes_do_not_bias_it() -> None:
    """Chunks with a known distribution, most of which are forgotten at a random age before their use."""
    rng = random.Random(1)
    seen, cut = Lifetimes((1.0,), half_life=10**9), Lifetimes((1.0,), half_life=10**9)
    num_used = 0
    for _ in range(40_000):
        comes_back = rng.random() < 0.3
        age = int(rng.expovariate(1 / 3000)) if comes_back else 200_000
        seen.end(0, 1, age, used=comes_back)
        patience = int(2 ** rng.uniform(4, 16))
        cut.end(0, 1, min(age, patience), used=age <= patience)
        num_used += age <= patience
    assert num_used < 40_000 * 0.3 * 0.7, "it is too easy: most were seen to the end"
    for learnt in (seen, cut):
        learnt.learn([1], [[0]])
    ages = [1, 100, 1000, 3000, 10_000]
    np.testing.assert_allclose(density(cut, ages), density(seen, ages), rtol=0.1)


def test_running_lifetimes_count_as_not_yet_used() -> None:
    learnt = Lifetimes((1.0, 1.0), half_life=10**9)
    for class_id in (0, 1):
        for _ in range(100):
            learnt.end(class_id, 1, 500, used=True)
    learnt.learn([100_000], [[0, 10_000]])
    young = density(learnt, [100])[0]
    assert young[1] < young[0], "running lifetimes were ignored"


def test_classes_of_a_pool_learn_from_each_other_and_others_do_not() -> None:
    alone = Lifetimes((2.0, 2.0, 2.0), half_life=1000)
    pooled = Lifetimes((2.0, 2.0, 2.0), half_life=1000, pools=[0, 0, 1])
    for known in (alone, pooled):
        for _ in range(100):
            known.end(0, 1, 500, used=True)
            known.end(2, 1, 500, used=False)
        known.learn([1], [[0.0] * 3])
    first, second, third = density(pooled, [100])[0]
    assert first == second > 2 * third
    first, second, _ = density(alone, [100])[0]
    assert first > 1.2 * second


def test_where_age_does_not_matter_the_value_is_the_rate_of_use_times_the_part_that_hbm_leaves() -> None:
    """HBM serves all uses at ages below 1024, and none later; the rate is one use in 1000."""
    plain, behind = (Lifetimes((1.0,), half_life=10**9) for _ in range(2))
    rng = random.Random(0)
    ages = [int(rng.expovariate(1 / 1000)) for _ in range(20_000)]
    for learnt in (plain, behind):
        even = np.full((1, 2), 500.0)  # at two ages, of which the hazard rates predict only the first
        learnt.constant_rates.observe(even, even, 1000 * even, np.array([[0.001, 1e-9]]))
        for age in ages:
            learnt.end(0, 1, age, used=True, elsewhere=float(learnt is behind and age < 1024))
        learnt.learn([1], [[0.0]])
    assert (density(plain, [0, 100, 5000, 10**9]) == 0.001).all()
    young, half, old, older = density(behind, [0, 512, 5000, 10**9])[:, 0]
    assert young == pytest.approx(0.001 * math.exp(-1.024), rel=0.02)
    assert half == pytest.approx(0.001 * math.exp(-0.512), rel=0.02)
    assert old == older == pytest.approx(0.001, rel=0.02)


def test_what_hbm_always_has_is_worth_little_however_often_it_is_used() -> None:
    learnt = Lifetimes((1.0, 1.0), half_life=10**9)
    for _ in range(3000):
        learnt.end(0, 1, 100, used=True, elsewhere=1.0)
        learnt.end(1, 1, 5000, used=True)
    learnt.learn([1], [[0.0] * 2])
    in_hbm, other = density(learnt, [1])[0]
    assert in_hbm < 0.25 * other, "all that is left is the prior"


def differ(lifetimes: Lifetimes) -> None:
    """Gives evidence that parts of class 0 are used at different rates: the first often, the others never."""
    num_parts = lifetimes.num_classes - len(lifetimes.part_rates.evidence)
    first = np.eye(num_parts)[:, :1]  # at one age
    lifetimes.part_rates.observe(100 * first, np.ones_like(first), 0.9 * first)
    assert lifetimes.parts_differ()[0]


def test_parts_of_a_class_count_in_it_and_their_values_are_in_proportion_to_its_own() -> None:
    """Class 0 has two parts. The first is used at 0.9 of its lifetimes, the second, which has as many, at 0.1."""
    learnt, plain = Lifetimes((1.0, 2.0), half_life=10**9, parts=[0, 0]), Lifetimes((1.0, 2.0), half_life=10**9)
    for i in range(2000):
        for part, used in ((0, i % 10 < 9), (1, i % 10 < 1)):
            learnt.end(2 + part, 1, 500, used=used)
            plain.end(0, 1, 500, used=used)
        for known in (learnt, plain):
            known.end(1, 1, 500, used=i % 2 == 0)
    plain.learn([1], [[0.0] * 2])
    learnt.learn([1], [[0.0] * 4])
    np.testing.assert_array_equal(
        density(learnt, AGES)[:, 2:], density(learnt, AGES)[:, [0, 0]], "they may be the same"
    )
    differ(learnt)
    learnt.learn([1], [[0.0] * 4])
    np.testing.assert_allclose(density(learnt, AGES)[:, :2], density(plain, AGES), rtol=1e-9)
    whole, _, often, rarely = density(learnt, [100])[0]
    assert often > 1.3 * whole
    assert rarely < 0.3 * whole


def test_a_part_with_few_observations_is_worth_as_much_as_its_class() -> None:
    learnt = Lifetimes((1.0,), half_life=10**9, parts=[0, 0, 0])
    for i in range(1000):
        learnt.end(1, 1, 500, used=i % 2 == 0)
    learnt.end(2, 1, 500, used=True)
    differ(learnt)
    learnt.learn([1], [[0.0] * 4])
    whole, _, few, none = density(learnt, [100])[0]
    assert none == pytest.approx(whole)
    assert whole < few < 1.1 * whole


def test_parts_of_a_class_that_is_nearly_always_used_again_at_one_age_are_worth_no_less_than_it() -> None:
    learnt = Lifetimes((1.0,), half_life=10**9, parts=[0, 0])
    for _ in range(10_000):
        learnt.end(1, 1, 500, used=True)
        learnt.end(2, 1, 500, used=True)
    differ(learnt)
    learnt.learn([1], [[0.0] * 3])
    whole, *parts = density(learnt, [100])[0]
    assert parts == pytest.approx([whole, whole], rel=1e-3)


@pytest.mark.parametrize("often", [True, False], ids=["one is used ten times as often", "both alike"])
def test_parts_whose_chunks_live_only_between_two_estimates_are_compared(often) -> None:
    """In a small tier that is the rule: a lifetime of 100 ends long before the next estimate."""
    learnt = Lifetimes((1.0,), half_life=10**9, parts=[0, 0])
    for _ in range(20):
        for i in range(50):
            learnt.end(1, 4, 100, used=True)
            learnt.end(2, 4, 100, used=not often or i % 10 == 0)
        learnt.learn([1], [[0.0] * 3], elapsed=2048)
    assert learnt.parts_differ() == [often]
