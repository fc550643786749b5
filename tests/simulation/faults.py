"""The faults of a simulated run: each is an action of its trace, and changes workers, channels or the clock."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, final

from tests.inside.scheduler import workers_of
from tests.simulation.channel import Channel
from tests.simulation.memory import mix
from tests.simulation.worker import FAULTY, NUM_KINDS, PARTIAL, SimWorker
from tpu_offload.types import Pool

if TYPE_CHECKING:
    from tests.simulation.world import World


@final
class Faults:
    """Injects the faults of one run.

    Args:
      world: the run.
    """

    def __init__(self, world: "World") -> None:
        self._world = world
        self.actions: Mapping[str, Callable[[int, int], None]] = {
            "tick": self._tick,
            "fail": self._fail,
            "fail_load": self._fail_load,
            "stall": self._stall,
            "drop": self._drop,
            "double": self._double,
            "hold": self._hold,
            "mute": self._mute,
            "lose_slots": self._lose_slots,
            "lose_swap": self._lose_swap,
            "restart": self._restart,
            "lose_caches": self._lose_caches,
            "repeat_plan": self._repeat_plan,
            "late_plan": self._late_plan,
            "abort_step": self._abort_step,
            "dead": self._die,
            "short": self._run_short,
            "move": self._move,
        }

    def stop(self) -> None:
        """Disarms all faults; what is delayed or lost already stays so."""
        self._world.num_aborted_next = 0
        for worker, channel in zip(self._world.workers, self._world.channels, strict=True):
            for faults in worker.faults.values():
                faults.clear()
            worker.stalled_until = 0
            worker.loses_caches = False
            if worker.segments is not None:
                worker.segments.fails = False
            channel.mute_until = channel.num_to_drop = channel.num_to_double = channel.hold_for = 0

    def _abort_step(self, a: int, b: int) -> None:
        world = self._world
        world.num_aborted_next, world.unaware = 1 + mix(b, 6) % 4, (0, a, -1)[b % 3]
        self._note("abort_step", f"the next step is not executed, and up to {world.num_aborted_next - 1} before it")

    def _worker(self, number: int) -> SimWorker:
        return self._world.workers[number % len(self._world.workers)]

    def _note(self, kind: str, line: str) -> None:
        self._world.counts[f"fault: {kind}"] += 1
        self._world.log(line)

    def _tick(self, a: int, b: int) -> None:
        seconds = (1.0, 4.0, 11.0)[a % 3]
        self._world.now_s += seconds
        self._note("tick", f"{seconds:g} s pass")

    def _fail(self, a: int, b: int) -> None:
        worker = self._worker(a)
        what = FAULTY[mix(b, 4) % len(FAULTY)]
        worker.faults[what].append(b)
        self._note("fail", f"the next {what} of worker {worker.worker_id} fails ({b % NUM_KINDS})")

    def _fail_load(self, a: int, b: int) -> None:
        worker, kind = self._worker(a), PARTIAL[b % len(PARTIAL)]
        worker.faults["load"].append(b - b % NUM_KINDS + kind)
        self._note("fail_load", f"the next load of worker {worker.worker_id} fails in part ({kind})")

    def _stall(self, a: int, b: int) -> None:
        worker = self._worker(a)
        num_steps = (10, 60, 140)[b % 3]
        worker.stalled_until = self._world.num_steps + num_steps
        self._note("stall", f"worker {worker.worker_id} stalls for {num_steps} steps")

    def _channel(self, number: int) -> tuple[int, Channel]:
        i = number % len(self._world.channels)
        return i, self._world.channels[i]

    def _drop(self, a: int, b: int) -> None:
        i, channel = self._channel(a)
        channel.num_to_drop += 1 + b % 2
        self._note("drop", f"the next {1 + b % 2} reports of worker {i} are lost")

    def _double(self, a: int, b: int) -> None:
        i, channel = self._channel(a)
        channel.num_to_double += 1
        self._note("double", f"the next report of worker {i} arrives twice")

    def _hold(self, a: int, b: int) -> None:
        i, channel = self._channel(a)
        channel.hold_for = (3, 10, 150)[b % 3]
        self._note("hold", f"the next report of worker {i} arrives {channel.hold_for} steps late")

    def _mute(self, a: int, b: int) -> None:
        i, channel = self._channel(a)
        channel.mute_until = self._world.num_steps + (20, 150)[b % 2]
        self._note("mute", f"all reports of worker {i} are lost for {(20, 150)[b % 2]} steps")

    def _lose_slots(self, a: int, b: int) -> None:
        worker = self._worker(a)
        before, num_ready = 0, worker.host.num_ready
        if worker.num_states_ready and mix(b, 3) % 2:
            before, num_ready = worker.max_slots, worker.num_states_ready
        if num_ready:
            first = before + b % num_ready
            end = first + 1 + mix(b, 1) % (before + num_ready - first)
            worker.lose_slots(first, end)
            self._note("lose_slots", f"worker {worker.worker_id} loses slots {first} to {end - 1}")

    def _run_short(self, a: int, b: int) -> None:
        worker = self._worker(a)
        if worker.segments is not None:
            worker.segments.fails = True
            self._note("short", f"the next segment of worker {worker.worker_id} cannot be allocated")

    def _move(self, a: int, b: int) -> None:
        if self._world.balance is not None:
            self._world.balance.wanted = Pool(a % 2)
            self._note("move", f"memory should move to {Pool(a % 2).name.lower()}")

    def _lose_swap(self, a: int, b: int) -> None:
        worker = self._worker(a)
        group_id = mix(b, 2) % len(worker.pools)
        pool = worker.pools[group_id]
        if pool.num_ready:
            first = b % pool.num_ready
            end = first + 1 + mix(b, 1) % (pool.num_ready - first)
            worker.lose_swap_blocks(group_id, first, end)
            self._note("lose_swap", f"worker {worker.worker_id} loses blocks {first} to {end - 1} of its swap pool")

    def _restart(self, a: int, b: int) -> None:
        worker = self._worker(a)
        if not workers_of(self._world.scheduler).known_epoch(worker.worker_id)[0]:
            return  # the scheduler could not know that it restarted
        missing = (0, 0, 1, 5)[mix(b, 7) % 4]
        worker.restart(with_hbm=bool(b % 2), growth=(1, 3, 1000)[mix(b, 5) % 3], num_missing=missing)
        self._world.channels[worker.worker_id].delay_all((0, 8)[mix(b, 6) % 2])
        self._world.dead.discard(worker.worker_id)
        self._note("restart", f"worker {worker.worker_id} restarts{', with its KV caches lost' if b % 2 else ''}")

    def _lose_caches(self, a: int, b: int) -> None:
        worker = self._worker(a)
        worker.loses_caches = True
        self._note("lose_caches", f"the next load of worker {worker.worker_id} destroys the KV caches")

    def _repeat_plan(self, a: int, b: int) -> None:
        worker = self._worker(a)
        self._world.repeats.append(worker.worker_id)
        self._note("repeat_plan", f"worker {worker.worker_id} receives the next plan three times")

    def _late_plan(self, a: int, b: int) -> None:
        worker = self._worker(a)
        self._world.late[worker.worker_id] = 1 + b % 3
        self._note("late_plan", f"worker {worker.worker_id} receives the next plan after {1 + b % 3} others")

    def _die(self, a: int, b: int) -> None:
        i = a % len(self._world.workers)
        self._world.dead.add(i)
        self._note("dead", f"worker {i} never reports again")
