"""Containers are found and counted, and growth is distinguished from fluctuation."""

import collections
import random
from typing import Any

import pytest

from tests.soak import container_census
from tests.soak.container_census import SizeHistory, container_sizes
from tests.soak.faults import Faults, FaultyCopier


class Part:
    """Visited, because its module is in `tests`."""

    __module__ = "tpu_offload.test"
    __slots__ = ("__weakref__", "entries", "unset")

    def __init__(self, entries):
        self.entries = entries


class Whole:
    """Likewise."""

    __module__ = "tpu_offload.test"

    def __init__(self):
        self.parts = {"a": Part([1, 2]), "b": Part([3])}
        self.queue = collections.deque([(), (4,)])
        self.itself = self
        self.number = 5
        self.other = random.Random()


def test_containers_are_found_wherever_they_are():
    assert container_sizes(Whole(), "it") == {
        "it.parts": 2,
        "it.parts[].entries": 3,
        "it.queue": 2,
        "it.queue[]": 1,
    }


def test_a_container_at_two_places_counts_once():
    shared = [1, 2]
    whole = Whole()
    whole.parts = {"a": Part(shared), "b": Part(shared)}
    assert container_sizes(whole, "it")["it.parts[].entries"] == 2


def test_a_wrapped_copier_is_looked_into():
    """Otherwise the containers of a soak's copiers would not be counted."""
    faults = Faults(1, job_timeout_s=1.0, clock=lambda: 0.0)
    part: Any = Part([1, 2])
    arena: Any = None
    assert container_sizes(FaultyCopier(part, arena, faults), "it")["it._copier.entries"] == 2


def history_of(samples):
    history = SizeHistory()
    for sample in samples:
        history.add(sample)
    return history


def grown_tables(samples):
    return history_of(samples).grown()


def test_a_long_history_stays_small_and_keeps_its_shape(monkeypatch):
    monkeypatch.setattr(container_census, "_MOST_SAMPLES", 40)
    history = history_of({"full": 300, "leak": 10 * i} for i in range(5000))
    assert all(len(sizes) == history.num_samples < 40 for sizes in history.sizes.values())
    assert list(history.grown()) == ["leak"]
    assert history.largest(1).keys() == {"leak"}
    assert 45_000 < history.largest(1)["leak"] < 50_000
    assert history.num_containers == 2


def noisy(start, slope, *, num=30, noise=10, seed=0):
    rng = random.Random(seed)
    return [{"t": int(start + slope * i + rng.uniform(-noise, noise))} for i in range(num)]


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_and_noise_is_not(seed):
    assert grown_tables(noisy(20, 6, num=120, seed=seed)) != {}
    assert grown_tables(noisy(900, 2, num=400, seed=seed)) != {}
    assert grown_tables(noisy(500, 0, noise=200, seed=seed)) == {}
    assert grown_tables(noisy(20, 1, noise=9, seed=seed)) == {}, "a few entries, in a few samples"


def test_what_fills_up_first_and_stays_has_not_grown():
    assert grown_tables([{"t": min(20 * i, 300)} for i in range(40)]) == {}


def test_a_table_that_comes_up_late_has_grown():
    samples: list[dict[str, Any]] = [{} for _ in range(14)] + [{"t": 90 * i} for i in range(1, 7)]
    assert list(grown_tables(samples)) == ["t"]


def test_too_few_samples_tell_nothing():
    assert grown_tables(noisy(0, 100, num=10)) == {}
