"""What does each part of the default eviction policy bring, and what did other ideas give?

Each variant is the policy with one thing changed, and is played over a trace at several sizes. The figures of
docs/policies.md come from here.

  python benchmarks/bench_policy_ideas.py --trace ../shared/traces/conversation_trace.jsonl
"""

import argparse
import contextlib
import json
import multiprocessing
import platform
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np

from tpu_offload.core.policies import DensityPolicy, density, lifetimes, runs
from tpu_offload.sim import TierSetup, read_traces, replay

SIZES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)


def constant(module, name, value):
    return mock.patch.object(module, name, value)


def worth(rule):
    """What chunks are worth by a rule of uses and age, whatever was learnt."""

    def by_rule(self, ages):
        return rule(self._factors.T, np.maximum(np.asarray(ages, np.float64), 1)[:, None])

    return mock.patch.object(lifetimes.Lifetimes, "worth", by_rule)


@contextlib.contextmanager
def classes(class_of):
    """Fewer classes."""
    begin, renew = runs.RunQueues.begin, runs.RunQueues.renew
    with (
        mock.patch.object(runs.RunQueues, "begin", lambda self, run, i: begin(self, run, class_of(i))),
        mock.patch.object(runs.RunQueues, "renew", lambda self, run, i, **used: renew(self, run, class_of(i), **used)),
    ):
        yield


def ended_lives_only():
    learn = lifetimes.Lifetimes.learn
    return mock.patch.object(
        lifetimes.Lifetimes, "learn", lambda self, ages, alive: learn(self, ages, 0 * np.asarray(alive))
    )


VARIANTS = {
    "default": contextlib.nullcontext,
    # Parts of it left out.
    "no look ahead: the chance of a use now": lambda: constant(
        lifetimes, "_best_rates", lambda used, room: used / np.maximum(room, 1e-300)
    ),
    "ages only, one class": lambda: classes(lambda i: 0),
    "what is used once is one class": lambda: classes(lambda i: max(0, i - density._NUM_ORIGINS + 1)),
    "ends of prompts like the rest": lambda: constant(density, "_END_WEIGHT", 0.0),
    "only lives that ended count": ended_lives_only,
    "assumed before: uses do not matter": lambda: mock.patch.object(
        density, "_CLASS_USES", [1.0] * density._NUM_CLASSES
    ),
    # Nothing learnt.
    "uses, then age (LFU)": lambda: worth(lambda uses, age: uses - 1e-9 * age),
    "uses / age (hyperbolic)": lambda: worth(lambda uses, age: uses / age),
    "uses / sqrt(age)": lambda: worth(lambda uses, age: uses / np.sqrt(age)),
    # Numbers that had to be chosen.
    "watches 1x its room": lambda: constant(density, "_WATCHED", 1),
    "watches 16x its room": lambda: constant(density, "_WATCHED", 16),
    "watches no more than 4x when it is small": lambda: constant(density, "_MIN_WATCHED", 0),
    "half-life of 4,096 runs": lambda: constant(runs, "_HALF_LIFE", 2**12),
    "half-life of 131,072 runs": lambda: constant(runs, "_HALF_LIFE", 2**17),
    "assumed counts as 1 run": lambda: constant(lifetimes, "_PRIOR_RUNS", 1.0),
    "assumed counts as 64 runs": lambda: constant(lifetimes, "_PRIOR_RUNS", 64.0),
    "assumed chance 0.01": lambda: constant(lifetimes, "_PRIOR_CHANCE", 0.01),
    "assumed chance 0.2": lambda: constant(lifetimes, "_PRIOR_CHANCE", 0.2),
    "slices of 1/4 of the room": lambda: constant(runs, "_SLICES", 4),
    "slices of 1/64 of the room": lambda: constant(runs, "_SLICES", 64),
    "slices of at least 2,048": lambda: constant(runs, "_MIN_SLICE", 2048),
    "learns every 16,384": lambda: constant(runs, "_LEARN_EVERY", 16384),
}


def play(path, name, sizes):
    """Prefix hit rates of a variant, by size."""
    trace = read_traces([path])
    rates = []
    for size in sizes:
        with VARIANTS[name]():
            policy = DensityPolicy()
            outcome = replay(trace, policy, TierSetup(max(1, int(size * trace.num_unique_blocks))))
        rates.append(sum(outcome.host_hits) / trace.num_blocks)
    return rates


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = {name: pool.submit(play, args.trace, name, args.sizes) for name in args.variants}
        width = max(map(len, args.variants))
        print(" " * width, *[f"{100 * size:6g} %" for size in args.sizes])
        for name, rates in found.items():
            print(f"{name:{width}}", *[f"{rate:8.4f}" for rate in rates.result()], flush=True)
    if args.json:
        results = {name: rates.result() for name, rates in found.items()}
        about = {"python": sys.version, "machine": platform.machine(), "trace": args.trace.name, "sizes": args.sizes}
        args.json.write_text(json.dumps(about | {"prefix_hit_rate": results}, indent=1))


if __name__ == "__main__":
    main()
