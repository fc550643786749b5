"""Policies by name, by `module:Class`, and passed to the scheduler: found, checked, and obeying priorities."""

import functools
import itertools
import sys

import pytest

from tests.compiled import interpreted_only
from tests.core.fakes import LAYOUT, FakeEngine, FakeWorker, tokens
from tests.core.policies import example
from tpu_offload import ConfigError, OffloadConfig, OffloadScheduler, RequestLimits
from tpu_offload.core.policies import (
    POLICIES,
    DensityPolicy,
    EvictionPolicy,
    LRUPolicy,
    PriorityPolicy,
    find_policy,
    registry,
)

_number = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module outside of the package and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(source: str) -> str:
        written.append(f"somebodys_policies_{next(_number)}")
        (tmp_path / f"{written[-1]}.py").write_text(source)
        return written[-1]

    yield write
    for name in written:
        sys.modules.pop(name, None)


def make_engine(**settings) -> FakeEngine:
    """With room for eight chunks in its host tier."""
    return FakeEngine(num_cpu_chunks=8, workers=[FakeWorker(num_host_chunks=8)], **settings)


def serve(engine: FakeEngine, name: str, start: int, *, priority: int = 0) -> int:
    """Four chunks of a prompt; returns how many tokens of it were loaded."""
    request = engine.add(name, tokens(16, start=start), limits=RequestLimits(priority=priority))
    num_loaded = request.num_computed
    engine.settle()
    engine.step({name: 16 - request.num_computed})
    engine.settle()
    engine.remove(name)
    engine.scheduler.check_invariants()
    return num_loaded


def test_the_example_runs_when_named_in_the_settings(module):
    name = f"{module(example.source())}:FIFOPolicy"
    config = OffloadConfig.from_env({"TPU_OFFLOAD_EVICTION_POLICY": name})
    engine = make_engine(eviction_policy=config.eviction_policy)
    serve(engine, "a", 100)
    serve(engine, "b", 200)
    assert serve(engine, "a again", 100) == 15  # LRU would have evicted a
    serve(engine, "c", 300)
    assert engine.scheduler.stats().num_evicted_chunks == 4
    assert serve(engine, "b again", 200) == 15
    assert serve(engine, "a at last", 100) == 0


def test_a_module_is_imported_once(module, tmp_path):
    log = tmp_path / "log"
    name = module(f"with open({str(log)!r}, 'a') as log:\n    log.write('imported.')\n{example.source()}")
    classes = {find_policy(f"{name}:FIFOPolicy") for _ in range(3)}
    make_engine(eviction_policy=f"{name}:FIFOPolicy")
    assert len(classes) == 1
    assert log.read_text() == "imported."


@pytest.mark.parametrize(
    ("source", "wanted", "error"),
    [
        (None, "nowhere_at_all:P", "nowhere_at_all cannot be imported .ModuleNotFoundError: No module named"),
        ("import nowhere_at_all", "P", "cannot be imported .ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("1 / 0", "P", "cannot be imported .ZeroDivisionError: division by zero"),
        ("class (", "P", "cannot be imported .SyntaxError: "),
        ("class FIFOPolicy: pass", "FifoPolicy", "has no FifoPolicy; did you mean FIFOPolicy"),
        ("", "P", "has no P$"),
        ("P = 3", "P", "P is 3; expected a class derived from tpu_offload.EvictionPolicy"),
        ("class P: pass", "P", "P is <class .*; expected a class derived from"),
        ("def P(): pass", "P", "P is <function P"),
        ("from tpu_offload import EvictionPolicy as P", "P", "Can't instantiate abstract class EvictionPolicy"),
        ("from tpu_offload.core.policies import PriorityPolicy as P", "P", "without arguments .TypeError: .*'make'"),
        pytest.param(
            "from tpu_offload.core.policies import LRUPolicy\nclass P(LRUPolicy):\n  def __init__(self): 1 / 0",
            "P",
            "without arguments .ZeroDivisionError: division by zero",
            marks=interpreted_only,
        ),
        (
            "from tpu_offload import EvictionPolicy\nclass P(EvictionPolicy):\n  def clear(self): pass",
            "P",
            "without arguments .TypeError: Can't instantiate abstract class P .*became_leaf",
        ),
    ],
    ids=str,
)
def test_an_unsuitable_class_is_refused_in_one_line(module, source, wanted, error):
    name = wanted if source is None else f"{module(source)}:{wanted}"
    for make in (lambda: find_policy(name), lambda: make_engine(eviction_policy=name)):
        with pytest.raises(ConfigError, match=error) as caught:
            make()
        assert str(caught.value).startswith(f"TPU_OFFLOAD_EVICTION_POLICY={name}: ")
        assert "\n" not in str(caught.value)


TALKATIVE = """
import numpy as np
class Talkative(FIFOPolicy):
    def resize(self, num_chunks): super().resize(num_chunks); return num_chunks
    def insert(self, *args): super().insert(*args); return 1
    def touch(self, *args): super().touch(*args); return 1
    def remove(self, *args): super().remove(*args); return args[0]
    def became_leaf(self, key): super().became_leaf(key); return True
    def clear(self): return tuple(super().clear())
    def evict(self, num_chunks, residents): super().evict(np.int64(num_chunks), residents); return num_chunks
"""


def test_what_a_policy_returns_for_nothing_is_ignored(module):
    engine = make_engine(eviction_policy=f"{module(example.source() + TALKATIVE)}:Talkative")
    for i in range(6):
        serve(engine, f"r{i}", 200 + 20 * i)
    assert serve(engine, "again", 300) == 15
    engine.scheduler.reset()
    assert serve(engine, "after a reset", 300) == 0


@interpreted_only
def test_all_abstract_methods_are_required():
    """A compiled class that is abstract can be made, so they are listed."""
    assert set(registry.REQUIRED) == EvictionPolicy.__abstractmethods__


def test_an_unknown_name():
    with pytest.raises(ConfigError, match=r"unknown eviction policy 'fifo'; expected one of density, .*, or module:"):
        find_policy("fifo")


# Priorities.


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("how", ["by name", "class", "function", "makes them with priorities"])
def test_however_it_is_given_it_obeys_priorities(name, how):
    policy = {
        "by name": None,
        "class": POLICIES[name],
        "function": functools.partial(POLICIES[name]),
        "makes them with priorities": lambda: PriorityPolicy(find_policy(name)),
    }[how]
    engine = make_engine(eviction_policy=name)
    if policy is not None:
        config = OffloadConfig.create(num_staging_blocks=8, num_cpu_chunks=8, save_path="staged", load_path="staged")
        engine.scheduler = OffloadScheduler(config, LAYOUT, policy=policy, clock=engine.clock)
        engine.scheduler.apply(engine.workers[0].report())
    serve(engine, "dear", 100, priority=1)
    for i in range(4):
        serve(engine, f"cheap {i}", 200 + 20 * i)
    assert serve(engine, "dear again", 100, priority=1) == 15


def test_the_example_obeys_priorities(module):
    engine = make_engine(eviction_policy=f"{module(example.source())}:FIFOPolicy")
    serve(engine, "dear", 100, priority=1)
    for i in range(4):
        serve(engine, f"cheap {i}", 200 + 20 * i)
    assert serve(engine, "dear again", 100, priority=1) == 15


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (
            LRUPolicy(),
            r"policy: got an instance of LRUPolicy; expected a class or factory, .*: pass LRUPolicy, not LRUPolicy\(\)",
        ),
        (PriorityPolicy(DensityPolicy), "policy: got an instance of PriorityPolicy; expected a class or factory"),
        (
            EvictionPolicy,
            "policy: it cannot be constructed without arguments .TypeError: Can't instantiate abstract class",
        ),
        (PriorityPolicy, "policy: it cannot be constructed without arguments"),
        (
            functools.cache(LRUPolicy),
            "policy: it returns the same LRUPolicy each time; expected a new one for each priority",
        ),
        (dict, "policy: it returns a dict; expected an EvictionPolicy"),
        ("lru", "policy: it cannot be constructed without arguments .TypeError: 'str' object is not callable"),
    ],
    ids=["made", "made with priorities", "abstract", "with arguments", "always the same", "another class", "name"],
)
def test_a_scheduler_refuses_an_unsuitable_factory(policy, error):
    with pytest.raises(ConfigError, match=error):
        OffloadScheduler(OffloadConfig.create(), LAYOUT, policy=policy)
