"""The embedded engine above an S3 server that is killed at random moments under load, and returns with its objects.

    python -m tests.storage.server_kills --kills 100 [--seed 0] [--json FILE]

In each outage every token is that of an engine without storage, the breaker opens while the server is dead and closes
when it is back, and in the end the server has exactly what the scheduler takes for stored. Half of the time the server
is frozen first, and the engine has to make 20 steps beside it. Some objects are damaged while the server is dead. At
times the engine restarts: beside a server that lives, it finds all that was stored; beside one that is dead, it starts
empty.

What is waited for is counted in requests or steps, so no result depends on the speed of the machine.
"""

import argparse
import dataclasses
import functools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from tests.engine.helpers import TINY, make_request, random_tokens, serve
from tests.inside.engine import offload_scheduler
from tests.inside.scheduler import storage_planner
from tests.storage import killed_server, servers, stores
from tests.storage.killed_server import Killer
from tests.storage.objects import wait_until_swept
from tests.storage.test_engine import TIGHT, make_offload, settle, tier_of
from tpu_offload import OffloadStats
from tpu_offload.engine import Engine, Request, RequestOutput
from tpu_offload.storage import Verdict, open_inspector
from tpu_offload.storage.object_names import name_of

NUM_PROMPTS = 10
CAPACITY = 100  # chunks; the prompts have 135, and the host tier 30
_MOST_TURNS = 300  # a generous end of what takes a few


def request(name: str, number: int) -> Request:
    """A prompt of 10 to 16 blocks, greedy or sampled."""
    prompt = random_tokens(number, 40 + 3 * number)
    return make_request(name, prompt, max_tokens=6, temperature=float(number % 2), seed=number)


@functools.cache
def right_tokens() -> Sequence[tuple[int, ...]]:
    """By prompt, what an engine without storage answers."""
    engine = Engine(TINY, TIGHT)
    outputs = serve(engine, [request(str(i), i) for i in range(NUM_PROMPTS)])
    return [outputs[str(i)].tokens for i in range(NUM_PROMPTS)]


@dataclasses.dataclass
class Counts:
    """What happened.

    Attributes:
      frozen: kills before which the server was frozen.
      openings: of breakers.
      failed_chunks: whose copy failed, because the server was dead or the record damaged.
      temporary_files: what the server was writing when it died.
      restored_chunks: that engines found at their start.
      steps_s: seconds of steps that gave tokens, beside a server that is alive, frozen and dead.
      threads, descriptors: open in this process after each outage.
    """

    kills: int = 0
    frozen: int = 0
    requests: int = 0
    openings: int = 0
    failed_chunks: int = 0
    written_chunks: int = 0
    read_chunks: int = 0
    damaged_objects: int = 0
    temporary_files: int = 0
    restarts: int = 0
    restarts_beside_a_dead_server: int = 0
    restored_chunks: int = 0
    steps_s: dict[str, list[float]] = dataclasses.field(default_factory=lambda: {"alive": [], "frozen": [], "dead": []})
    threads: list[int] = dataclasses.field(default_factory=list)
    descriptors: list[int] = dataclasses.field(default_factory=list)

    def summary(self) -> Mapping[str, Any]:
        """Numbers only."""
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        for state, times in self.steps_s.items():
            if len(times) > 1:
                cuts = statistics.quantiles(times, n=1000, method="inclusive")
                found[f"step_{state}_ms"] = {
                    "steps": len(times),
                    "p50": round(cuts[499] * 1e3, 2),
                    "p99": round(cuts[989] * 1e3, 2),
                    "longest": round(max(times) * 1e3, 2),
                }
        for name in ("threads", "descriptors"):
            counts = getattr(self, name)
            found[name] = {"first": counts[0], "most": max(counts), "last": counts[-1]} if counts else {}
        return found


@final
class EngineLife:
    """Serves random prompts while the server dies and returns. Close it at the end.

    Args:
      directory: where the server has its objects.
      server: it runs.
      seed: decides everything but the moments of threads.
    """

    def __init__(self, directory: Path, server: servers.Server, seed: int) -> None:
        self._directory = directory
        self._server = server
        self._rng = random.Random(seed)
        self._killer = Killer(server, self._rng)
        self._num_served = 0
        self._is_dead = False
        self.counts = Counts()
        self._engine = self._start()

    def close(self) -> None:
        """Ends the engine. The next one deletes all that is not its own, and what is left are right records."""
        self._restart()
        names = self._records()
        wait_until_swept()
        assert set(self._objects()) == names
        assert len(killed_server.objects_in(self._directory)) == len(names) + 1, "one marker, and nothing else"
        self._end()
        # Of the files, because rclone answers a request for a range with all of the object.
        found = stores.verdicts(open_inspector(f"file://{self._directory}/bucket/kv"))
        assert found.keys() <= {Verdict.GOOD, Verdict.DAMAGED}, found
        assert found.get(Verdict.DAMAGED, 0) <= self.counts.damaged_objects

    def outage(self) -> None:
        """The server is killed under load, and returns."""
        openings = self._stats().num_breaker_openings
        freezes_first = self._rng.random() < 0.5
        self._killer.arm(freezes_first=freezes_first)
        for _ in self._turns("the server is killed"):
            if self._killer.killed.is_set():
                break
        assert not self._killer.hung, "the engine makes no steps beside a frozen server"
        self._is_dead = True
        self.counts.kills += 1
        self.counts.frozen += freezes_first
        for _ in self._turns("a breaker opens"):
            if self._stats().num_breaker_openings > openings:
                break
        self._damage()
        if self._rng.random() < 0.1:
            self._end()
            self._engine = self._start()
            self.counts.restarts_beside_a_dead_server += 1
        self._server.start()
        self._is_dead = False
        self._recover()
        self.counts.threads.append(threading.active_count())
        self.counts.descriptors.append(len(os.listdir("/proc/self/fd")))
        if self._rng.random() < 0.1:
            self._restart()

    def _recover(self) -> None:
        """Serves until the tier is used in both directions, and has what it should have."""
        before = self._stats()
        for _ in self._turns("the server is used again"):
            settle(self._engine)
            stats = self._stats()
            is_used = min(
                stats.promoted_chunks - before.promoted_chunks, stats.cascaded_chunks - before.cascaded_chunks
            )
            if is_used > 0 and not stats.num_open_breakers and set(self._objects()) == self._records():
                break
        assert (stats.num_jobs_in_flight, stats.num_quarantined_chunks) == (0, 0)
        assert len(self._records()) <= CAPACITY

    def _restart(self) -> None:
        """Beside a server that lives: all that is stored is found, except what has lost its length."""
        nbytes = tier_of(self._engine).spec.record_nbytes
        stored = {name for name, path in self._objects().items() if path.stat().st_size == nbytes}
        self._end()
        self._engine = self._start()
        assert self._records() == stored, "a restart finds what was stored"
        self.counts.restored_chunks += self._stats().restored_chunks
        self.counts.restarts += 1

    # The engine.

    def _start(self) -> Engine:
        engine = Engine(
            TINY,
            TIGHT,
            offload=make_offload(
                storage_tier="object",
                storage_options=killed_server.url(self._server.port),
                num_storage_chunks=CAPACITY,
                storage_wait_s=0.1,
                breaker_failures=3,
                breaker_retry_s=0.01,
            ),
        )
        self._killer.watch(tier_of(engine))
        engine.step = self._timed(engine.step)
        return engine

    def _end(self) -> None:
        """Closes the engine. Its counters are added up."""
        stats = self._stats()
        self.counts.openings += stats.num_breaker_openings
        self.counts.failed_chunks += stats.failed_storage_chunks
        self.counts.written_chunks += stats.cascaded_chunks
        self.counts.read_chunks += stats.promoted_chunks
        self._engine.close()
        left = [thread.name for thread in threading.enumerate() if "storage" in thread.name]
        assert not left, f"threads are left: {left}"

    def _timed(self, step: Callable[[], list[RequestOutput]]) -> Callable[[], list[RequestOutput]]:
        def timed() -> list[RequestOutput]:
            is_frozen, start_s = self._killer.is_frozen, time.perf_counter()
            outputs = step()
            if outputs:  # one that has nothing to compute may wait for copies
                self._killer.step()
                state = "dead" if self._is_dead else "frozen" if is_frozen else "alive"
                self.counts.steps_s[state].append(time.perf_counter() - start_s)
            return outputs

        return timed

    def _turns(self, until: str) -> Iterator[None]:
        """Serves a few prompts a turn, and checks their tokens; too many turns are an error."""
        for _ in range(_MOST_TURNS):
            numbers = self._rng.sample(range(NUM_PROMPTS), self._rng.randint(1, 4))
            requests = [request(f"{self._num_served + i}", number) for i, number in enumerate(numbers)]
            self._num_served += len(requests)
            outputs = serve(self._engine, requests)
            for one, number in zip(requests, numbers, strict=True):
                assert outputs[one.request_id].tokens == right_tokens()[number], f"prompt {number}: other tokens"
            self.counts.requests += len(requests)
            yield
        raise AssertionError(f"not within {_MOST_TURNS} turns: {until}; {self._stats()}")

    def _stats(self) -> OffloadStats:
        stats = self._engine.offload_stats()
        assert stats is not None
        return stats

    # The store.

    def _records(self) -> set[str]:
        """The names, below their generation, of what the scheduler takes for stored."""
        return {name_of(key) for key in storage_planner(offload_scheduler(self._engine)).records.stored}

    def _objects(self) -> Mapping[str, Path]:
        """The files of objects of the tier's current generation, by name."""
        root = killed_server.generation_below(self._directory, tier_of(self._engine))
        return {str(path.relative_to(root)): path for path in killed_server.objects_in(root)}

    def _damage(self) -> None:
        """While the server is dead."""
        self.counts.temporary_files += killed_server.remove_temporary_files(self._directory)
        paths = list(self._objects().values())
        for path in self._rng.sample(paths, min(len(paths), self._rng.choice([0, 0, 2, 6]))):
            killed_server.damage(path, self._rng)
            self.counts.damaged_objects += 1


def run(num_kills: int, seed: int, *, report: Callable[[str], None] = lambda line: None) -> Counts:
    """A life with so many outages.

    Args:
      num_kills: outages.
      seed: of everything that is drawn.
      report: called with a line after each outage.
    Raises:
      AssertionError: a rule was broken.
    """
    with tempfile.TemporaryDirectory() as folder, killed_server.store(Path(folder)) as server:
        life = EngineLife(Path(folder), server, seed)
        for i in range(num_kills):
            life.outage()
            report(f"{i + 1}/{num_kills} outages, {life.counts.requests} requests")
        life.close()
    return life.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    args = parser.parse_args()
    os.environ.update(killed_server.CREDENTIALS)
    summary = run(args.kills, args.seed, report=lambda line: print(f"\r{line}", end="", file=sys.stderr)).summary()
    print(json.dumps(summary, indent=2))
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
