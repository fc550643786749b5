"""Planted bugs in the flow between host tier and storage: the random lives find each of them."""

import importlib
import types
from collections.abc import Callable

import pytest

from tests.simulation.mutations import Mutation, apply
from tests.storage import hard_lives
from tests.storage.lives import live

_NUM_SEEDS = 60

MUTATIONS = (
    Mutation(
        "demotions are dispatched after the saves of their step",
        "StoragePlanner._plan_demotion",
        "JobKind.DEMOTE",
        "JobKind.CASCADE",
    ),
    Mutation(
        "the evicted are demoted in every later step",
        "StoragePlanner._plan_demotion",
        "victims, self._victims = _1, {}",
        "victims = _1",
    ),
    Mutation(
        "demotions ignore the room in storage",
        "StoragePlanner._plan_demotion",
        "[_1 for _2 in victims if _3][: max(0, room)]",
        "[_1 for _2 in victims if _3]",
    ),
    Mutation(
        "what is demoted is deleted after it",
        "StoragePlanner._plan_demotion",
        "self._to_delete.pop(key, None)",
        "pass",
    ),
    Mutation("a reset keeps what is to be demoted", "StoragePlanner.plan", "self._victims = {}", "pass"),
    Mutation("all that is evicted is admitted", "StoragePlanner._note_evicted", "self._admission.admits(key)", "True"),
    Mutation("all that is saved is admitted", "StoragePlanner.offer", "self._admission.admits(key)", "True"),
    Mutation("one sighting is enough", "AdmissionFilter.__init__", "2 if _ else 1", "1"),
    Mutation("sightings count as hits", "AdmissionFilter.observe", "self._counts_sightings", "True"),
    Mutation(
        "a request waits anew each time that it is looked up",
        "LoadPlanner.answer",
        "request.arriving_since_s is None",
        "True",
    ),
    Mutation(
        "a request waits for storage for ever", "StoragePlanner.wait_s", "return request.storage_wait_s", "return 1e9"
    ),
    Mutation("a forced recompute loads", "LoadCosts._prefers", "return self._mode is LoadMode.LOAD", "return True"),
    Mutation(
        "a promotion that failed is published",
        "StoragePlanner._end_promotion",
        "[chunk for i, chunk in enumerate(chunks) if i not in bad]",
        "chunks",
    ),
    Mutation(
        "a write that failed counts as stored",
        "StoragePlanner._end_cascade",
        "self._forget(key)",
        "self._stored[key] = None",
    ),
)


# Only lives with restarts, late reports and partial failures have these.
HARD_MUTATIONS = (
    Mutation("what a restarted worker has lost is stored", "StoragePlanner.adopt", "self._forget(key)", "pass"),
    Mutation("what nobody knows stays in storage", "StoragePlanner.adopt", "self._delete_unknown(listed)", "pass"),
    Mutation(
        "a deletion that failed in part is over", "StoragePlanner._end_cascade", "self._to_delete[_] = None", "pass"
    ),
    Mutation(
        "what a killed worker was writing goes on",
        "ReportHandler._handle_restart",
        "self._adopt_stored(report)",
        "pass",
    ),
)


def _plant(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the one method that the mutation changes."""
    mutant = apply(mutation)
    module = types.ModuleType(mutant.module)
    module.__file__ = str(mutant.path)
    exec(compile(mutant.source, str(mutant.path), "exec"), module.__dict__)
    class_name, _, method = mutation.function.partition(".")
    planted = vars(getattr(module, class_name))[method]
    monkeypatch.setattr(getattr(importlib.import_module(mutant.module), class_name), method, planted)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found(mutation, monkeypatch):
    _expect_found(mutation, monkeypatch, live)


@pytest.mark.parametrize("mutation", HARD_MUTATIONS, ids=lambda m: m.name)
def test_a_bug_is_found_under_more_faults(mutation, monkeypatch):
    _expect_found(mutation, monkeypatch, hard_lives.live)


def _expect_found(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, one: Callable[[int], object]) -> None:
    _plant(mutation, monkeypatch)
    for seed in range(_NUM_SEEDS):
        try:
            one(seed)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{_NUM_SEEDS} lives with this bug broke no rule")
