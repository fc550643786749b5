"""Whether age matters for the uses of a class: what counts as evidence, and what the default policy does with it."""

import random

import numpy as np
import pytest

from tests.compiled import interpreted_only
from tests.core.policies.traffic import Tier, chain, conversations, questions
from tests.inside.policy import lifetimes_of
from tpu_offload.core.policies import POLICIES, constant_rates, density
from tpu_offload.core.policies.constant_rates import ConstantRates, PartRates
from tpu_offload.core.policies.density import DensityPolicy
from tpu_offload.core.policies.run_classes import origin_of

EXPOSURE = np.array([[4000.0, 2000.0, 1000.0, 1000.0]])  # chunks times time, in four age groups
FALLING = np.array([[0.08, 0.04, 0.02, 0.01]])  # rates by age


def observe(constant: ConstantRates, uses: np.ndarray, *, times: int = 1, rates: np.ndarray = FALLING) -> None:
    """Uses of chunks, in runs of four."""
    for _ in range(times):
        constant.observe(uses, uses / 4, EXPOSURE, rates)


def test_uses_at_the_same_rate_at_all_ages_are_found_and_so_is_the_rate() -> None:
    constant = ConstantRates(1)
    observe(constant, 0.03 * EXPOSURE)
    is_constant, rates = constant.found()
    assert is_constant.tolist() == [True]
    assert rates == pytest.approx([0.03])


def test_uses_at_the_ages_that_were_predicted_are_not() -> None:
    constant = ConstantRates(1)
    observe(constant, FALLING * EXPOSURE, times=50)
    assert not constant.found()[0].any()


def test_only_the_ages_count_not_how_many_uses_were_predicted() -> None:
    one, other = ConstantRates(1), ConstantRates(1)
    observe(one, 0.001 * EXPOSURE, times=2)
    observe(other, 0.001 * EXPOSURE, times=2, rates=FALLING * 30)
    assert one.evidence == pytest.approx(other.evidence)
    assert one.evidence > 0


def test_one_use_that_was_thought_impossible_is_not_enough_however_long_the_run() -> None:
    """It may be the first run that ever got so old."""
    constant = ConstantRates(1)
    rates = np.array([[0.1, 0.1, 0.1, 1e-12]])
    constant.observe(np.array([[0.0, 0, 0, 500]]), np.array([[0.0, 0, 0, 1]]), EXPOSURE, rates)
    assert 1 < constant.evidence[0] <= -np.log(constant_rates.DOUBT)
    assert not constant.found()[0].any()


def test_evidence_wears_off_and_the_rate_follows() -> None:
    constant = ConstantRates(1)
    observe(constant, 0.03 * EXPOSURE)
    for _ in range(4):
        constant.halve()
        observe(constant, FALLING * EXPOSURE / 20)
    assert not constant.found()[0].any()
    assert constant.found()[1] < [0.02]


def test_without_any_use_nothing_is_found() -> None:
    constant = ConstantRates(1)
    observe(constant, np.zeros((1, 4)), times=10)
    constant.observe(np.zeros((1, 4)), np.zeros((1, 4)), np.zeros((1, 4)), FALLING)
    assert not constant.found()[0].any()


TWO_PARTS = np.array([[1000.0, 1000.0], [3000.0, 1000.0]])  # chunks times time, of two parts in two age groups
APART = np.array([[0.08, 0.04], [0.01, 0.005]])  # their rates


@pytest.mark.parametrize(("actual", "differ"), [(APART, True), (np.full((2, 2), 0.02), False)])
def test_parts_differ_where_their_rates_predict_which_are_used(actual, differ) -> None:
    parts = PartRates(np.ones((1, 2)))
    assert not parts.found().any()
    for _ in range(20):
        parts.observe(actual * TWO_PARTS / 4, TWO_PARTS, APART)
    assert parts.found() == [differ]
    assert differ or parts.evidence < 0


def test_that_all_parts_are_used_more_at_one_age_is_no_evidence_nor_is_an_age_that_one_part_has() -> None:
    parts = PartRates(np.ones((1, 2)))
    same = np.array([[0.08, 0.01], [0.08, 0.01]])
    parts.observe(np.full((2, 2), 100.0), TWO_PARTS, same)
    parts.observe(np.full((2, 2), 100.0), TWO_PARTS * np.eye(2), APART)
    assert parts.evidence == pytest.approx([0], abs=1e-9)


def test_evidence_that_parts_differ_wears_off() -> None:
    parts = PartRates(np.ones((1, 2)))
    parts.observe(APART * TWO_PARTS, TWO_PARTS, APART)
    (before,) = parts.evidence
    parts.halve()
    assert parts.evidence == [before / 2]
    assert before > 0


def test_each_class_has_its_own_evidence_that_its_parts_differ() -> None:
    """Two classes with two parts each; those of the second are used at one rate."""
    parts = PartRates(np.repeat(np.eye(2), 2, axis=1))
    exposure, rates = np.concatenate([TWO_PARTS, TWO_PARTS]), np.concatenate([APART, APART])
    actual = np.concatenate([APART, np.full((2, 2), 0.02)])
    for _ in range(20):
        parts.observe(actual * exposure / 4, exposure, rates)
    assert parts.found().tolist() == [True, False]


# --- in the policy --------------------------------------------------------------------------------


def classes_found(tier: Tier) -> np.ndarray:
    assert isinstance(tier.policy, DensityPolicy)
    return lifetimes_of(tier.policy).constant_rates.found()[0]


def hits_of(name: str, seed: int) -> int:
    prompts = questions(seed)
    tier = Tier(POLICIES[name](), 800)
    tier.serve_all(prompts[:1000])
    return tier.serve_all(prompts[1000:])


@pytest.mark.parametrize("num_in_hbm", [0, 12])
def test_a_run_that_a_request_uses_in_pieces_is_one_observation(num_in_hbm) -> None:
    """Else the evidence would depend on the size of a step."""
    policy = DensityPolicy()
    tier, prompt = Tier(policy, 100), chain("a", 20)
    tier.serve(prompt)
    use = tier.new_use(num_in_hbm)
    for num_chunks in (8, 15, 20):
        tier.index.touch(use, prompt, num_chunks)
    lifetimes = lifetimes_of(policy)
    assert lifetimes.all_uses.sum() == 20
    assert lifetimes.all_elsewhere.sum() == num_in_hbm
    assert lifetimes.all_runs.sum() == 1
    tier.serve(prompt)
    assert lifetimes.all_runs.sum() == 2


def test_documents_asked_about_at_random_are_kept_by_how_often_not_by_when() -> None:
    tier = Tier(DensityPolicy(), 800)
    tier.serve_all(questions(0))
    assert classes_found(tier)[[0, 5, 6, 7]].all(), "those used once to five times"


def test_it_hits_as_often_as_by_frequency_and_less_often_without(monkeypatch) -> None:
    found = sum(hits_of("density", seed) for seed in range(3))
    by_frequency = sum(hits_of("wtinylfu", seed) for seed in range(3))
    monkeypatch.setattr(constant_rates, "ENOUGH", float("inf"))
    by_age = sum(hits_of("density", seed) for seed in range(3))
    assert found > 0.995 * by_frequency
    assert found > 1.005 * by_age


def test_age_matters_in_conversations() -> None:
    policy = DensityPolicy()
    tier = Tier(policy, 300)
    tier.serve_all(conversations(random.Random(0), 6000))
    assert lifetimes_of(policy).constant_rates.evidence[5] < -20, "a conversation that was silent for long is over"
    assert not classes_found(tier)[:10].any(), "all but the system prompts, which are used at random"


def scanned(seed: int, num_requests: int) -> list[list]:
    """Questions about documents of 3 to 12 chunks, and for each of them a longer prompt that never returns."""
    rng = random.Random(seed)
    documents = [chain(f"document {i}", rng.randint(3, 12)) for i in range(400)]
    prompts = []
    for i, document in enumerate(rng.choices(documents, k=num_requests)):
        prompts.append(chain(f"question {i}", 1, document))
        prompts.append(chain(f"scan {i}", rng.randint(16, 40)))
    return prompts


def test_a_scan_of_longer_prompts_is_told_apart_and_displaces_nothing(monkeypatch) -> None:
    hits = []
    for enough in (constant_rates.ENOUGH, float("inf")):
        monkeypatch.setattr(constant_rates, "ENOUGH", enough)
        tier = Tier(DensityPolicy(), 3000)
        prompts = scanned(0, 2000)
        tier.serve_all(prompts[:1500])
        hits.append(tier.serve_all(prompts[1500:]))
        assert isinstance(tier.policy, DensityPolicy)
        assert lifetimes_of(tier.policy).parts_differ()[0] == (enough < 100)
        tier.index.check_invariants()
    assert hits[0] > 1.01 * hits[1], hits


def agents(seed: int, num_agents: int) -> list[list]:
    """Agents whose prompts grow at short intervals, and are read three times more long after that."""
    rng, start_s = random.Random(seed), 0.0
    asked = []
    for i in range(num_agents):
        start_s += rng.expovariate(0.12)
        time_s, prompt = start_s, chain(f"agent {i}", 5)
        for step in range(rng.randint(5, 30)):
            asked.append((time_s, prompt))
            time_s += rng.expovariate(1 / 6)
            prompt = chain(f"agent {i} {step}", 2, prompt)
        for _ in range(3):
            time_s += rng.uniform(100, 300)
            asked.append((time_s, prompt))
    asked.sort(key=lambda one: one[0])
    return [chain(f"question {i}", 1, prompt) for i, (_, prompt) in enumerate(asked)]


def hits_of_agents(size: int) -> int:
    """Hits with the default policy, after learning."""
    prompts, tier = agents(0, 250), Tier(DensityPolicy(), size)
    tier.serve_all(prompts[:2000])
    num_hits = tier.serve_all(prompts[2000:])
    tier.index.check_invariants()
    return num_hits


@interpreted_only
def test_what_waited_long_for_its_last_use_is_told_from_what_is_in_use(monkeypatch) -> None:
    """They were used equally often. ARC, whose frequent list has what was used twice at short intervals, is as good."""
    prompts, hits = agents(0, 250), []
    found = PartRates.found
    for are_found in (found, lambda parts: found(parts) & False):
        with monkeypatch.context() as patch:
            patch.setattr(PartRates, "found", are_found)
            hits.append(hits_of_agents(200))
    arc = Tier(POLICIES["arc"](), 200)
    arc.serve_all(prompts[:2000])
    assert hits[0] > 1.1 * hits[1], hits
    assert hits[0] > 0.97 * arc.serve_all(prompts[2000:])


@interpreted_only
def test_what_follows_what_waited_long_is_told_from_the_next_step_of_an_agent(monkeypatch) -> None:
    """The three readers of what an agent has done each ask a question of their own, which nobody asks again."""
    hits = []
    for origin in (origin_of, lambda num_uses, _: min(num_uses.bit_length(), 4)):
        with monkeypatch.context() as patch:
            patch.setattr(density, "origin_of", origin)
            hits.append(hits_of_agents(400))
    assert hits[0] > 1.05 * hits[1], hits


def test_lengths_are_not_told_apart_where_they_say_nothing() -> None:
    tier = Tier(DensityPolicy(), 800)
    tier.serve_all(questions(0))
    assert isinstance(tier.policy, DensityPolicy)
    assert not lifetimes_of(tier.policy).parts_differ()[0]
