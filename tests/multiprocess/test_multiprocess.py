"""Workers in separate processes: no wrong byte, and the same copies in the same order on all of them.

A few short runs of the rig; `scripts/multiprocess` runs more.
"""

import pytest

from tests.grids import few, few_setups
from tests.multiprocess.cluster import Cluster
from tests.multiprocess.messages import Faults, Setup, Transport
from tests.multiprocess.run import run_setup
from tests.multiprocess.stepped_storage import PRIVATE, SHARED

STAGED = {"save_path": "staged", "load_path": "staged"}
LATE_AND_LOST = Transport(plan_again=0.2, plan_late=0.1, report_lost=0.1, report_again=0.1)


@pytest.fixture(scope="module")
def processes(programs_of_hosts):
    cluster = Cluster(2, 2)
    yield cluster
    cluster.close()
    programs_of_hosts.exchange()


@pytest.fixture
def run(processes):
    def run(**setup):
        return run_setup(processes, Setup(**{"num_steps": 50, "swap_blocks": 12} | setup))

    return run


def storage(*tiers, num_chunks=40, **settings):
    return {
        "storage_tier": ";".join(tiers),
        "num_storage_chunks": ";".join([str(num_chunks)] * len(tiers)),
        "num_cpu_chunks": 12,
        "storage_wait_s": 6,  # steps
        "storage_lookup_wait_s": 4,
    } | settings


def assert_right(outcome):
    assert not outcome.refused
    assert not outcome.violation
    assert outcome.num_checked > 300
    assert outcome.counts["loaded"]


def test_workers_dispatch_alike_and_a_seed_repeats(run):
    unlike = {0: Faults(slow=0.4), 1: Faults(silence=0.3)}  # allowed differences between hosts
    first, again = (run(seed=1, settings=STAGED, faults=unlike) for _ in range(2))
    assert_right(first)
    assert first.dispatched[0] == first.dispatched[1]
    assert first.counts["swapped in"]
    assert first == again


@pytest.mark.parametrize("settings", [{}, STAGED], ids=["direct", "staged"])
def test_copies_that_fail_on_one_process(run, settings):
    faults = {0: Faults(save=0.1, segment=0.05), 1: Faults(load=0.1)}
    outcome = run(seed=2, settings=settings, faults=faults, reset=0.03, restart=0.03)
    assert_right(outcome)
    assert outcome.counts["num_failed_jobs"] > 3
    assert outcome.counts["failed loads"]
    assert outcome.counts["restarts"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("windows", "num_rows"),
    [((9,), 0), ((), 40), ((5, 14), 40)],
    ids=["windows", "states", "windows and states"],
)
def test_layer_groups(run, windows, num_rows):
    """Every byte of every group, with failures on one process and restarts; and the same copies without them."""
    model = {"windows": windows, "num_rows": num_rows, "num_blocks": 40 * (1 + len(windows))}
    settings = {"num_cpu_chunks": 60, "state_share": 0.25}
    outcome = run(seed=4, settings=settings, **model, faults={0: Faults(slow=0.3), 1: Faults(silence=0.2)})
    assert_right(outcome)
    assert outcome.counts["swapped in"]
    assert outcome.dispatched[0] == outcome.dispatched[1]
    faults = {0: Faults(save=0.05), 1: Faults(load=0.05, caches=0.02)}
    assert_right(run(seed=5, settings=settings, **model, faults=faults, restart=0.03, max_ahead=2))


RANKS = {
    "a rank on each process": {"data_ranks": 2},
    "two ranks on each process": {"data_ranks": 4},
    "ranks that span processes": {"data_ranks": 2, "data_ranks_span_hosts": True},
    "windows and states": {"data_ranks": 2, "windows": (9,), "num_rows": 40, "num_blocks": 80},
}


@pytest.mark.parametrize("model", few_setups({name: (model,) for name, model in RANKS.items()}, "windows and states"))
def test_data_parallel_ranks(run, model):
    """Each rank has a scheduler; each process sees only its own devices' part of a copy."""
    settings = {"num_cpu_chunks": 60, "state_share": 0.25} if "windows" in model else {"num_cpu_chunks": 12}
    outcome = run(seed=6, settings=settings, **model, faults={0: Faults(slow=0.3), 1: Faults(silence=0.2)})
    assert_right(outcome)
    assert outcome.counts["swapped in"]
    assert outcome.dispatched[0] == outcome.dispatched[1]
    faults = {0: Faults(save=0.05, segment=0.02), 1: Faults(load=0.05, caches=0.02)}
    transport = Transport(plan_again=0.1, plan_late=0.05, report_lost=0.05, report_again=0.1)
    outcome = run(seed=7, settings=settings, **model, faults=faults, transport=transport, restart=0.03, max_ahead=2)
    assert_right(outcome)
    assert outcome.counts["num_failed_jobs"] > 3


@pytest.mark.parametrize("tiers", few([(PRIVATE,), (SHARED,), (PRIVATE, SHARED)], (PRIVATE, SHARED), unpack=False))
def test_storage(run, tiers):
    """Each process stores its own shards; what one cannot write or read is not loaded on the others."""
    outcome = run(seed=1, settings=storage(*tiers), faults={0: Faults(slow=0.3), 1: Faults(silence=0.2)})
    assert_right(outcome)
    assert outcome.counts["promoted_chunks"] > 5
    assert outcome.dispatched[0] == outcome.dispatched[1]
    faults = {0: Faults(storage=0.2, save=0.05, segment=0.02), 1: Faults(storage=0.1, frozen=0.1, load=0.05)}
    settings = storage(*tiers, storage_write_on="eviction", num_chunks=9)
    outcome = run(seed=2, settings=settings, faults=faults, reset=0.02, restart=0.05, restart_without_caches=0.5)
    assert_right(outcome)
    assert outcome.counts["cascaded_chunks"] > 5


@pytest.mark.parametrize("model", few_setups({name: (model,) for name, model in RANKS.items()}, "windows and states"))
def test_storage_of_data_parallel_ranks(run, model):
    """A process stores what its devices have of each rank; of ranks without devices there, it has nothing to store."""
    larger = {"num_cpu_chunks": 24, "state_share": 0.25} if "windows" in model else {}
    unlike = {0: Faults(slow=0.3), 1: Faults(silence=0.2)}
    outcome = run(seed=8, settings=storage(PRIVATE, num_chunks=60) | larger, **model, faults=unlike)
    assert_right(outcome)
    assert outcome.counts["promoted_chunks"] > 5
    assert outcome.counts["failed_storage_chunks"] == 0
    assert outcome.dispatched[0] == outcome.dispatched[1]
    faults = {0: Faults(storage=0.2, save=0.05, segment=0.02), 1: Faults(storage=0.1, frozen=0.1, load=0.05)}
    settings = storage(PRIVATE, SHARED, num_chunks=60) | larger
    outcome = run(seed=9, settings=settings, **model, faults=faults, reset=0.02, restart=0.05, max_ahead=2)
    assert_right(outcome)
    assert outcome.counts["cascaded_chunks"] > 5
    assert outcome.counts["failed_storage_chunks"] > 3


@pytest.mark.wide
def test_storage_of_layer_groups(run):
    settings = storage(PRIVATE, SHARED, num_chunks=60) | {"num_cpu_chunks": 24, "state_share": 0.25}
    faults = {0: Faults(storage=0.1), 1: Faults(frozen=0.05)}
    outcome = run(seed=3, num_steps=80, settings=settings, windows=(9,), num_rows=40, num_blocks=80, faults=faults)
    assert_right(outcome)
    assert outcome.counts["promoted_chunks"] > 5


@pytest.mark.parametrize("num_chunks", [9, 12])
def test_unequal_memory_gives_the_same_programs(run, num_chunks):
    outcome = run(seed=3, available_chunks={1: num_chunks}, swap_blocks=0)
    assert_right(outcome)
    assert outcome.dispatched[0] == outcome.dispatched[1]


@pytest.mark.parametrize("settings", [{}, STAGED], ids=["direct", "staged"])
def test_duplicate_plans_are_executed_once(run, settings):
    outcome = run(seed=4, settings=settings, transport=Transport(plan_again=0.2))
    assert_right(outcome)
    assert outcome.counts["duplicate plans"] > 10
    assert outcome.dispatched[0] == outcome.dispatched[1]


def test_messages_that_are_late_or_lost(run):
    outcome = run(seed=5, transport=LATE_AND_LOST, faults={1: Faults(slow=0.4, silence=0.2)})
    assert_right(outcome)
    assert outcome.counts["late plans"] > 3


@pytest.mark.parametrize("max_ahead", [1, 4])
def test_plans_made_before_a_loss_of_the_caches(run, max_ahead):
    faults = {0: Faults(caches=0.04), 1: Faults(caches=0.08)}
    outcome = run(seed=6 + max_ahead, num_steps=80, max_ahead=max_ahead, faults=faults)
    assert_right(outcome)
    assert outcome.counts["losses of caches"] > 2


def test_everything_at_once(run):
    faults = {0: Faults(save=0.05, caches=0.03, slow=0.3), 1: Faults(load=0.05, caches=0.03, silence=0.2)}
    outcome = run(
        seed=12,
        num_steps=80,
        settings={"save_on": ("compute", "preemption", "eviction")},
        max_ahead=4,
        faults=faults,
        transport=LATE_AND_LOST,
        reset=0.02,
        restart=0.04,
        restart_without_caches=0.5,
    )
    assert_right(outcome)
    assert outcome.counts["restarts"]


@pytest.mark.parametrize(
    "setup",
    [
        {"num_workers": 1},
        {"worker_ids": {1: 0}},
        {"settings_of": {1: STAGED}},
        {"settings_of": {1: {"blocks_per_chunk": 2}}},
        {"settings_of": {1: {"num_staging_blocks": 6}}},
    ],
    ids=str,
)
def test_workers_that_do_not_fit_are_refused(run, setup):
    outcome = run(seed=3, num_steps=20, **setup)
    assert outcome.refused.startswith("ConfigError: ")
    assert len(outcome.refused.splitlines()) == 1


def test_nothing_is_copied_before_all_workers_have_reported(run, caplog):
    outcome = run(seed=3, num_workers=3)
    assert not outcome.violation
    assert outcome.dispatched == ((), ())
    assert "until all 3 workers have reported" in caplog.text


def test_the_rig_finds_wrong_bytes(run):
    outcome = run(seed=3, faults={1: Faults(misplaced=1.0)})
    assert "wrong KV" in outcome.violation
    assert {rank for _, rank, _ in outcome.wrong} == {1}


def test_a_planted_divergence_is_found(run):
    """Without lockstep a host where copies take longer dispatches others, and the rig says so."""
    outcome = run(seed=3, settings=STAGED, faults={1: Faults(slow=0.5)}, without_lockstep=True)
    assert "process 1 has dispatched" in outcome.violation


def test_the_rig_finds_unlike_copies(run):
    outcome = run(seed=3, faults={1: Faults(caches=0.1)})
    assert not outcome.violation
    assert outcome.difference
