"""Finds deliberate bugs of `tests.simulation.mutations` by random runs under vLLM's real scheduler.

python -m tests.adapters.random_mutations --seeds 40 --steps 40

Imports vLLM and jax once, forks a child for each bug, and prints a line of JSON for each with the mode and the seed
that found it. No device is used before the fork.
"""

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tests.adapters.cpu_environment import set_environment
from tests.adapters.random_campaign import run_seeds, start_process
from tests.simulation.mutations import MUTATIONS, Mutation, in_child, planted

MODES = ("windows", "states", "windows-async", "states-async")


def hunt(mutation: Mutation, modes: Sequence[str], num_seeds: int, num_steps: int) -> dict[str, Any]:
    """Runs seeds until one finds the bug; runs in a child."""
    with planted(mutation):
        start_process()
        for seed in range(num_seeds):
            for mode in modes:
                _, violations = run_seeds(mode, [seed], num_steps)
                if violations:
                    return {"mode": mode, "seed": seed, "violation": violations[seed]}
    return {"violation": ""}


def run_all(
    mutations: Sequence[Mutation], num_seeds: int, num_steps: int, *, modes: Sequence[str] = MODES
) -> Iterator[dict[str, Any]]:
    """Hunts each bug, in a child of its own."""
    set_environment()
    with tempfile.TemporaryDirectory() as programs:
        # What one child has compiled the next ones do not compile.
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": programs,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "-1",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        import tpu_inference.core.hybrid_coordinator  # noqa: F401
        import vllm.v1.core.sched.async_scheduler
        import vllm.v1.worker.kv_connector_model_runner_mixin  # noqa: F401

        for mutation in mutations:
            yield {"name": mutation.name, **in_child(functools.partial(hunt, mutation, modes, num_seeds, num_steps))}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.adapters.random_mutations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=40, help="maximum number of seeds for each, in each mode")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--only", action="append", help="only bugs whose name contains this, or one of these")
    args = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if any(name in mutation.name for name in args.only or [""])]
    for found in run_all(mutations, args.seeds, args.steps, modes=args.modes.split(",")):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
