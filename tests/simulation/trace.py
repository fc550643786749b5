"""A run as data: the setup and a list of actions, both generated from a seed.

An action is a kind and two numbers. The numbers are interpreted by the state at that point (a worker's index, modulo
the number of workers), and an impossible action has no effect. So any sublist of actions can be run, and a failing list
can be shrunk.
"""

import dataclasses
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpu_offload.config import SaveEvent, SwapMode

Action = tuple[str, int, int]

# Rate per ten thousand steps of each kind of fault or event, in a run that has this kind.
RATES = {
    "abort": 300,
    "preempt": 500,
    "reset": 160,
    "tick": 300,
    "fail": 1000,
    "fail_load": 1500,
    "stall": 200,
    "drop": 200,
    "double": 200,
    "hold": 200,
    "mute": 60,
    "lose_slots": 60,
    "lose_swap": 80,
    "restart": 60,
    "dead": 40,
    "lose_caches": 120,
    "repeat_plan": 300,
    "late_plan": 200,
}
_EVERYDAY = ("abort", "preempt")

# Per ten thousand steps, in a run with states: memory moves between its pools, or an allocation fails.
MEMORY_RATES = {"move": 1000, "short": 60}

# Per ten thousand steps, in some runs: the forward pass of a step is not executed.
ABORT_STEP, ABORT_STEP_RATE = "abort_step", 500

KINDS = ("step", "arrive", *RATES, *MEMORY_RATES, ABORT_STEP)

# Runs with mostly one kind of event.
_FOCUSED: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "swap": lambda rng: {
        "num_swap_blocks": rng.choice([16, 40]),
        "delays": tuple(rng.choice([0, 1, 2]) for _ in range(4)),
        "report_delays": tuple(rng.choice([0, 0, 1]) for _ in range(4)),
        "blocks_per_chunk": rng.choice([1, 2]),
        "max_batch": rng.choice([3, 8, 16]),
        "num_blocks": rng.randint(18, 24),
        "swap_mode": "swap",
        "max_requests": 8,
    },
    "late": lambda rng: {
        "num_workers": rng.choice([2, 3, 4]),
        "num_slots": rng.choice([3, 8]),
        "staged": 255,
        "hbm_cache": False,
        "breaker_failures": 0,
        "delays": tuple(rng.choice([0, 2, 9]) for _ in range(4)),
    },
    "caches": lambda rng: {
        "num_workers": rng.choice([1, 2, 3]),
        "num_slots": rng.choice([8, 20, 48]),
        "ahead": rng.choice([1, 2, 3, 4]),
        "report_delays": tuple(rng.choice([0, 1, 3]) for _ in range(4)),
        "decode_save": True,
    },
    "long": lambda rng: {
        "num_workers": rng.choice([1, 1, 2, 3]),
        "num_slots": 48,
        "num_staging_blocks": rng.choice([3, 4, 6]),
        "num_blocks": rng.choice([50, 80]),
        "block_size": 2,
        "hbm_cache": rng.random() < 0.2,
        "blocks_per_chunk": rng.choice([1, 1, 2, 3]),
        "max_batch": 40,
        "staged": rng.choice([255, 255, 0b10101010, 0]),
        "max_load_blocks": rng.choice([2, 5]),
        "load_wait_s": rng.choice([5.0, 0.5]),
        "delays": tuple(rng.choice([0, 0, 1, 3]) for _ in range(4)),
    },
    "loads": lambda rng: {
        "num_slots": rng.choice([20, 48]),
        "num_staging_blocks": rng.choice([16, 32]),
        "num_blocks": rng.choice([20, 24, 40]),
        "block_size": 2,
        "hbm_cache": rng.random() < 0.4,
        "blocks_per_chunk": rng.choice([1, 1, 2, 3]),
        "max_requests": 8,
        "delays": tuple(rng.choice([0, 0, 2, 6]) for _ in range(4)),
    },
}
_FOCUSED_RATES = {
    "swap": {"preempt": 2500, "reset": 400, "restart": 400, "lose_swap": 300, "fail": 2000},
    "caches": {"lose_caches": 700, "restart": 200, "late_plan": 800, "repeat_plan": 800, "fail": 100, "drop": 300},
    "long": {
        "tick": 200,
        "stall": 100,
        "fail": 300,
        "fail_load": 1000,
        "lose_slots": 200,
        "reset": 300,
        "preempt": 500,
        "restart": 100,
    },
    "late": {"tick": 600, "stall": 800, "fail": 300, "reset": 100},
    "loads": {
        "tick": 500,
        "stall": 300,
        "fail": 300,
        "fail_load": 5000,
        "lose_slots": 200,
        "drop": 200,
        "reset": 300,
        "preempt": 200,
    },
}


MAX_WORKERS = 4
MIN_TOKENS = 16  # least capacity of HBM, so that a request fits

_RANGES = {
    "seed": (0, 2**63),
    "block_size": (1, 64),
    "blocks_per_chunk": (1, 16),
    "num_workers": (1, MAX_WORKERS),
    "num_blocks": (1, 10_000),
    "num_rows": (0, 10_000),
    "segment_slots": (0, 100),
    "num_slots": (0, 10_000),
    "num_staging_blocks": (1, 10_000),
    "num_swap_blocks": (0, 10_000),
    "max_batch": (1, 10_000),
    "max_drafts": (0, 100),
    "max_requests": (1, 9),  # limited by the number of names
    "num_salts": (1, 100),
    "staged": (0, 255),
    "ahead": (0, 8),
    "growth": (1, 10_000),
    "breaker_failures": (0, 1000),
    "save_after_sightings": (1, 15),
    "max_load_blocks": (0, 10_000),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes and settings of one run.

    Attributes:
      seed: its seed; only a label here.
      block_size: tokens in a block.
      blocks_per_chunk: blocks in a chunk.
      num_workers: workers.
      windows: per layer group with a sliding window, beside the one with full attention, its tokens.
      num_blocks: blocks of HBM, for all layer groups.
      num_rows: rows of HBM, if there is a layer group of states; else 0.
      num_slots: slots of the host tier; 0 turns it off. With states it has memory for one segment more, and each pool
        can have so many slots.
      segment_slots: with states and a host tier, slots in a segment of either pool; else 0.
      state_share: as in the settings.
      missing_segments: for each worker, segments that it has less memory than the settings say, at first.
      num_staging_blocks: the staging budget.
      num_swap_blocks: blocks of the swap pool; 0 turns request swap off.
      swap_mode: as in the settings.
      hbm_cache: whether HBM has a prefix cache.
      decode_save: as in the settings.
      save_on: as in the settings.
      save_after_sightings: as in the settings.
      max_batch: most tokens that a step computes.
      max_drafts: most draft tokens of a decoding request.
      max_requests: most requests in the engine.
      num_salts: number of cache salts.
      staged: bit 2 w is set if worker w stages saves, bit 2 w + 1 if it stages loads.
      delays: for each worker, most steps from the dispatch of a copy to its end.
      report_delays: for each worker, steps until a report arrives.
      ahead: number of steps that the engine plans ahead of the workers.
      max_load_blocks: most blocks that direct loads copy before one step; 0 for no limit.
      load_wait_s: as in the settings.
      save_wait_s: as in the settings; the default is longer than a run takes.
      growth: slots (and swap blocks) that each worker allocates per step.
      breaker_failures: as in the settings.
      breaker_retry_s: as in the settings.
    Raises:
      ValueError: a value is out of range.
    """

    seed: int = 0
    block_size: int = 2
    blocks_per_chunk: int = 1
    num_workers: int = 1
    windows: tuple[int, ...] = ()
    num_blocks: int = 16
    num_rows: int = 0
    num_slots: int = 8
    segment_slots: int = 0
    state_share: float = 0.5
    missing_segments: tuple[int, ...] = (0, 0, 0, 0)
    num_staging_blocks: int = 8
    num_swap_blocks: int = 0
    swap_mode: str = "swap"
    hbm_cache: bool = True
    decode_save: bool = False
    save_on: str = "compute"
    save_after_sightings: int = 1
    max_batch: int = 16
    max_drafts: int = 0
    max_requests: int = 8
    num_salts: int = 1
    staged: int = 0
    delays: tuple[int, ...] = (0, 0, 0, 0)
    report_delays: tuple[int, ...] = (0, 0, 0, 0)
    ahead: int = 0
    growth: int = 1000
    breaker_failures: int = 5
    breaker_retry_s: float = 5.0
    max_load_blocks: int = 0
    load_wait_s: float = 5.0
    save_wait_s: float = 1e6

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            _check(name, getattr(self, name), type(getattr(self, name)) is int, f"{least} to {most}", least, most)
        for name in ("hbm_cache", "decode_save"):
            _check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false", False, True)
        windows = self.windows
        _check("windows", windows, isinstance(windows, tuple) and len(windows) < 4, "up to three windows, in tokens")
        for window in windows:
            _check("windows", window, type(window) is int, "1 to 1000", 1, 1000)
        _check("state_share", self.state_share, type(self.state_share) is float, "0.01 to 0.99", 0.01, 0.99)
        for name in ("delays", "report_delays", "missing_segments"):
            values = getattr(self, name)
            _check(name, values, isinstance(values, tuple) and len(values) == MAX_WORKERS, "four numbers of steps")
            for value in values:
                _check(name, value, type(value) is int, "0 to 100", 0, 100)
        modes = [mode.value for mode in SwapMode]
        _check("swap_mode", self.swap_mode, self.swap_mode in modes, f"one of {', '.join(modes)}")
        events = {event.value for event in SaveEvent}
        known = isinstance(self.save_on, str) and set(self.save_on.split(",")) <= events
        _check("save_on", self.save_on, known, f"some of {', '.join(sorted(events))}")
        retry_s = self.breaker_retry_s
        _check("breaker_retry_s", retry_s, type(retry_s) in (int, float), "0.1 to 100", 0.1, 100)
        for name, longest_s in (("load_wait_s", 100.0), ("save_wait_s", 1e6)):
            wait_s = getattr(self, name)
            _check(name, wait_s, type(wait_s) in (int, float) and wait_s >= 0, f"0 to {longest_s:g}", 0, longest_s)
        if self.num_staging_blocks < self.blocks_per_chunk:
            raise ValueError(
                f"num_staging_blocks={self.num_staging_blocks} is under one chunk; expected at least "
                f"{self.blocks_per_chunk}, which is blocks_per_chunk"
            )
        num_groups = 1 + len(windows)
        if self.num_blocks // num_groups * self.block_size < MIN_TOKENS:
            raise ValueError(
                f"num_blocks={self.num_blocks} of {self.block_size} tokens are too few for a request; "
                f"expected {MIN_TOKENS} tokens or more in each of {num_groups} layer groups"
            )
        if (windows or self.num_rows) and "eviction" in self.save_on:
            raise ValueError(f"save_on={self.save_on} with windows or states; expected compute, preemption or both")
        if self.num_rows and (self.num_rows < 3 or self.max_drafts):
            raise ValueError(f"num_rows={self.num_rows}, max_drafts={self.max_drafts}; expected 3 or more, and 0")
        if (self.segment_slots > 0) != (self.num_rows > 0 and self.num_slots > 0):
            raise ValueError(
                f"segment_slots={self.segment_slots} with num_rows={self.num_rows} and num_slots={self.num_slots}; "
                "expected segments for rows in HBM and a host tier, and for nothing else"
            )
        least = 15 * self.segment_slots if self.segment_slots > 1 else 1  # as in `HostSegments.plan`
        if self.segment_slots and (self.num_slots % self.segment_slots or self.num_slots < least):
            raise ValueError(
                f"num_slots={self.num_slots} in segments of {self.segment_slots}; expected {least} or more"
            )

    @property
    def num_host_states(self) -> int:
        """Most rows of the host tier."""
        return self.num_slots if self.segment_slots else 0

    @property
    def num_segments(self) -> int:
        """Segments of both pools together; 0 without states."""
        return self.num_slots // self.segment_slots + 1 if self.segment_slots else 0


def _check(name: str, value: Any, good: bool, expected: str, least: float = 0, most: float = 0) -> None:
    if not good or (most and not least <= value <= most):
        raise ValueError(f"{name}={value!r:.60}; expected {expected}")


def generate(seed: int, num_steps: int) -> tuple[Setup, list[Action]]:
    """Generates the run of a seed."""
    rng = random.Random(seed)
    others = _draw_saving(random.Random(f"saving {seed}")) | _draw_loading(random.Random(f"loading {seed}"))
    others["ahead"] = random.Random(f"ahead {seed}").choice([0, 0, 1, 1, 2, 4])
    others["save_wait_s"] = random.Random(f"save wait {seed}").choice([1e6, 1e6, 0.5, 0.2])
    setup = dataclasses.replace(_draw_setup(rng, seed), **others)
    focus = rng.choice(["", "", "swap", "loads", "loads", "late", "caches", "caches", "long", "long"])
    if focus:
        setup = dataclasses.replace(setup, **_FOCUSED[focus](rng))
    setup = _with_groups(setup, random.Random(f"groups {seed}"))
    actions = _draw_actions(rng, num_steps, _FOCUSED_RATES.get(focus, {}))
    if setup.segment_slots:
        actions = _with_added(actions, MEMORY_RATES, [0, 1, 1, 3], random.Random(f"memory {seed}"))
    factors = [0, 0, 0, 0, 1, 3]
    return setup, _with_added(actions, {ABORT_STEP: ABORT_STEP_RATE}, factors, random.Random(f"failed passes {seed}"))


def _draw_setup(rng: random.Random, seed: int) -> Setup:
    blocks_per_chunk = rng.choice([1, 1, 1, 2, 2, 3])
    return Setup(
        seed=seed,
        block_size=rng.choice([2, 3, 4, 4]),
        blocks_per_chunk=blocks_per_chunk,
        num_workers=rng.choice([1, 1, 2, 2, 3, 4]),
        num_blocks=rng.randint(24, 60) if rng.random() < 0.3 else rng.randint(18, 26),
        num_slots=rng.choice([3, 8, 8, 20, 20, 48]) if rng.random() < 0.95 else 0,
        num_staging_blocks=max(blocks_per_chunk, rng.choice([2, 4, 8, 16, 32])),
        num_swap_blocks=rng.choice([0, 6, 16, 40]),
        swap_mode=rng.choice(["swap", "swap", "swap", "auto"]),
        hbm_cache=rng.random() < 0.4,
        decode_save=rng.random() < 0.5,
        max_batch=rng.choice([3, 8, 16, 40]),
        max_drafts=rng.choice([0, 0, 1, 3]),
        max_requests=rng.choice([2, 4, 8]),
        num_salts=rng.choice([1, 1, 1, 2]),
        staged=rng.choice([0, 255, rng.getrandbits(8), 0b01010101, 0b10101010]),
        delays=tuple(rng.choice([0, 1, 2, 5, 9]) for _ in range(4)),
        report_delays=tuple(rng.choice([0, 0, 1, 2, 4]) for _ in range(4)),
        growth=rng.choice([1000, 1000, 1, 3]),
        breaker_failures=rng.choice([5, 5, 2, 1, 0]),
        breaker_retry_s=rng.choice([5.0, 1.0]),
    )


def _draw_saving(rng: random.Random) -> dict[str, Any]:
    """The save mode: most runs save on compute, half of them on other events as well, a few only on others."""
    others = rng.choice([("eviction",), ("preemption",), ("eviction", "preemption")])
    events = rng.choice([("compute",)] * 3 + [("compute", *others)] * 3 + [others])
    return {"save_on": ",".join(events), "save_after_sightings": rng.choice([1] * 7 + [2])}


def _draw_loading(rng: random.Random) -> dict[str, Any]:
    return {"max_load_blocks": rng.choice([0, 0, 3, 8]), "load_wait_s": rng.choice([5.0, 5.0, 0.5, 0.0])}


def _with_groups(setup: Setup, rng: random.Random) -> Setup:
    """Half of the runs have other layer groups beside the one with full attention, and then memory for them."""
    num_windows, has_states = rng.choice([(0, False)] * 8 + [(1, False), (2, False)] * 2 + [(0, True), (1, True)] * 2)
    if not num_windows and not has_states:
        return setup
    windows = tuple(rng.choice([1, 2, 3, 4, 5, 6, 7, 9, 9, 13, 17, 50]) for _ in range(num_windows))
    states: dict[str, Any] = {}
    if has_states:
        states["max_drafts"], states["num_rows"] = 0, rng.choice([4, 8, 24])
        states |= _draw_segments(rng) if setup.num_slots else {}
    events = [event for event in setup.save_on.split(",") if event != "eviction"]
    others: dict[str, Any] = {
        "windows": windows,
        "save_on": ",".join(events) or rng.choice(["compute", "preemption"]),
        "num_blocks": setup.num_blocks * (1 + len(windows)),
        "num_slots": setup.num_slots * rng.choice([1, 2, 2]),
        "num_staging_blocks": setup.num_staging_blocks * rng.choice([1, 2]),
    }
    return dataclasses.replace(setup, **(others | states))


def _draw_segments(rng: random.Random) -> dict[str, Any]:
    """Memory of the host tier for chunks and states."""
    segment_slots = rng.choice([1, 1, 1, 2, 3])
    num_segments = rng.choice([2, 4, 9, 20, 40]) if segment_slots == 1 else rng.choice([16, 20])
    return {
        "segment_slots": segment_slots,
        "num_slots": segment_slots * (num_segments - 1),
        "state_share": rng.choice([0.5, 0.2, 0.8]),
        "missing_segments": tuple(rng.choice([0, 0, 0, 1, 4]) for _ in range(4)),
    }


def _with_added(
    actions: list[Action], per_10_000: Mapping[str, int], factors: Sequence[int], rng: random.Random
) -> list[Action]:
    """Adds actions of other kinds before steps; drawn separately, so that other runs stay as they are."""
    rates = {kind: rate * rng.choice(factors) / 10_000 for kind, rate in per_10_000.items()}
    added: list[Action] = []
    for action in actions:
        if action[0] == "step":
            added += [
                (kind, rng.getrandbits(30), rng.getrandbits(30)) for kind, rate in rates.items() if rng.random() < rate
            ]
        added.append(action)
    return added


def _draw_actions(rng: random.Random, num_steps: int, focused: dict[str, int]) -> list[Action]:
    # Each run has only some kinds of faults, because frequent ones would hide the effects of rare ones.
    calm = rng.random() < 0.15
    rates = {
        kind: rate * rng.choice([1, 1, 3]) / 10_000
        for kind, rate in (RATES | focused).items()
        if kind in _EVERYDAY or (not calm and rng.random() < 0.45)
    }
    arrivals = rng.choice([0.1, 0.25, 0.5])
    prompts = rng.choice([2, 3, 5])
    actions: list[Action] = []
    for _ in range(num_steps):
        if rng.random() < arrivals:
            actions.append(("arrive", rng.getrandbits(prompts), rng.getrandbits(30)))
        for kind, rate in rates.items():
            if rng.random() < rate:
                actions.append((kind, rng.getrandbits(30), rng.getrandbits(30)))
        actions.append(("step", rng.getrandbits(30), 0))
    return actions


def save(path: Path, setup: Setup, actions: list[Action]) -> None:
    """Writes a run to a file."""
    text = ",\n  ".join(json.dumps(action) for action in actions)
    path.write_text(f'{{"setup": {json.dumps(dataclasses.asdict(setup))},\n "actions": [\n  {text}\n]}}\n')


def load(path: Path) -> tuple[Setup, list[Action]]:
    """Reads what `save` wrote.

    Raises:
      ValueError: it is not a trace.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["setup"].items()}
        return Setup(**fields), [_action(entry) for entry in data["actions"]]
    except KeyError as e:
        raise ValueError(f"{path} is not a trace of the simulation: it has no {e}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"{path} is not a trace of the simulation: {e}") from e


def _action(entry: Any) -> Action:
    """Parses an action from JSON.

    Raises:
      ValueError, TypeError: it is not an action.
    """
    kind, *numbers = entry
    if kind not in KINDS:
        raise ValueError(f"{kind!r:.60} is not an action; expected one of {', '.join(KINDS)}")
    if len(numbers) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"the action {kind} has the numbers {numbers!r:.60}; expected two from 0 to 2**63 - 1")
    return kind, numbers[0], numbers[1]
