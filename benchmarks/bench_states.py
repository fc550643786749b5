"""How fast does a state of linear attention move between HBM and host memory, compared with the hardware's limit?

A row of Qwen3-Next's states, with fewer layers: in each the last inputs of a convolution, bf16[3, channels], and a
recurrent state, f32[heads, 128, 128]. The direct path saves and loads rows, the two kinds of arrays one after the
other, as two page groups do. In each round every method runs once, in another order each time; a ratio is taken within
a round. The limit is memcpy on a CPU, and one contiguous copy over the bus elsewhere.

  python benchmarks/bench_states.py
  python benchmarks/bench_states.py --num-layers 36 --num-rows 5 --json states.json
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import Stopwatch, count, in_turn, make_parser, print_table, write_json
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_offload.kernels import BlockMoves, Copier, DirectCopier, TransferSpec, direct_spec
from tpu_offload.measure.baselines import BusCopies, Memcpy, Method
from tpu_offload.memory import pinned_zeros
from tpu_offload.types import Direction


class Segments:
    """One segment of pinned host memory."""

    def __init__(self, spec: TransferSpec) -> None:
        self._segment = [pinned_zeros(struct) for struct in spec.segment_structs()]

    def segment(self, segment_id: int) -> list[jax.Array]:
        """See `ArenaView`."""
        return self._segment

    def replace(self, segment_id: int, segment: list[jax.Array]) -> None:
        """See `ArenaView`."""
        self._segment = segment


@dataclasses.dataclass
class Group:
    """The arrays of one kind, all layers."""

    states: list[jax.Array]
    copier: Copier


class States:
    """Both groups of arrays, and the limit."""

    def __init__(self, args: argparse.Namespace) -> None:
        mesh = Mesh(np.array(jax.devices()[: args.devices]).reshape(1, -1), ("data", "model"))
        convolution = (jnp.bfloat16, (3, args.channels), PartitionSpec("data", None, "model"))
        recurrent = (jnp.float32, (args.heads, 128, 128), PartitionSpec("data", "model", None, None))
        self.groups, self.row_nbytes, self._next, self._num_rows = [], 0, 0, args.num_rows
        for dtype, page, axes in (convolution, recurrent):
            make = jax.jit(_zeros(args.num_rows, page, dtype), out_shardings=NamedSharding(mesh, axes))
            states = [make() for _ in range(args.num_layers)]
            spec = direct_spec(TransferSpec.from_caches(states, segment_blocks=args.num_rows, capacity=1))
            copier = DirectCopier(spec, Segments(spec))
            copier.compile()
            self.groups.append(Group(states, copier))
            self.row_nbytes += spec.block_nbytes_per_device * args.devices
        self.limit: Method = Memcpy(nbytes=args.num_rows * self.row_nbytes, job_nbytes=self.row_nbytes)
        if jax.default_backend() != "cpu":
            per_device = self.row_nbytes // args.devices
            self.limit = BusCopies(self.groups[0].states, block_nbytes_per_device=per_device)

    def copy(self, direction: Direction, num_rows: int) -> None:
        """Copies rows and waits; the next call copies others, so that they are not in the CPU's caches."""
        rows = np.arange(self._next, self._next + num_rows, dtype=np.int32) % self._num_rows
        self._next = int(rows[-1]) + 1
        moves = BlockMoves(np.zeros(num_rows, np.int64), rows, rows[::-1].copy())
        flights = []
        for group in self.groups:
            if direction is Direction.SAVE:
                flights.append(group.copier.save(0, moves, group.states))
            else:
                flight, group.states = group.copier.load(0, moves, group.states)
                flights.append(flight)
        assert [int(flight.waiting_on) for flight in flights] == [num_rows] * len(flights)

    def copy_as_fast_as_possible(self, direction: Direction, num_rows: int) -> None:
        """The limit: as many bytes, in one piece."""
        states = self.groups[0].states
        self.limit.finish(self.limit.dispatch(direction, states, list(range(num_rows))))


def _zeros(num_rows: int, page: tuple[int, ...], dtype: Any) -> Any:
    return lambda: jnp.zeros((num_rows, *page), dtype)


def measure(states: States, num_rows: int, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of jobs of so many rows."""
    times = Stopwatch(time.perf_counter)
    methods = [
        (f"{name} {direction.value}", call, direction)
        for direction in Direction
        for name, call in (("our", states.copy), ("limit", states.copy_as_fast_as_possible))
    ]
    for number in range(args.rounds + 2):
        for name, call, direction in in_turn(methods, number):
            times(name, call, direction, num_rows)
        if number == 1:  # first touch of the memory
            times.seconds.clear()
    nbytes = num_rows * states.row_nbytes
    figures: dict[str, Any] = {"num_rows": num_rows, "job_nbytes": nbytes}
    for way in [direction.value for direction in Direction]:
        median_s = times.spreads(scale=1)[f"our {way}"].median
        of_limit = times.ratio(f"limit {way}", f"our {way}")
        figures[way] = {"gb_per_s": nbytes / median_s / 1e9, "of_limit": of_limit}
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-layers", type=count, default=9, help="state layers; Qwen3-Next has 36")
    parser.add_argument("--channels", type=count, default=8192)
    parser.add_argument("--heads", type=count, default=32)
    parser.add_argument("--num-rows", type=count, default=16, help="rows in HBM, and in host memory")
    parser.add_argument("--job-rows", type=count, nargs="+", default=[1, 4], help="rows in a job")
    parser.add_argument("--devices", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=30)
    args = parser.parse_args(argv)
    if max(args.job_rows) > args.num_rows:
        parser.error("--job-rows exceeds --num-rows")
    if args.devices > len(jax.devices()):
        parser.error(f"--devices {args.devices}: {len(jax.devices())} found")
    states = States(args)
    results = [measure(states, num_rows, args) for num_rows in args.job_rows]
    table = [
        [str(r["num_rows"]), f"{r['job_nbytes'] / 2**20:.1f}"]
        + [cell for d in ("save", "load") for cell in (f"{r[d]['gb_per_s']:.2f}", r[d]["of_limit"].text())]
        for r in results
    ]
    columns = ("rows", "MiB", "save GB/s", "of the limit", "load GB/s", "of the limit")
    print_table(f"States of {args.num_layers} layers, median (p10-p90) of {args.rounds} rounds", columns, table)
    write_json(args, question="speed of state copies", row_nbytes=states.row_nbytes, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
