"""How long does a start take the file tier that finds all of its slots taken?

    python benchmarks/bench_storage_start.py --num-chunks 50000 --record-mib 2 --rounds 9

The files are sparse, because a start reads none of the records: it opens every file, with one page of each, and reads
the hints of all slots. `open` ends when the directory is locked and all files are open, `list` when all keys are known.
"""

import os
import sys
import tempfile
import types
from collections.abc import Sequence
from unittest import mock

import numpy as np
from common import Stopwatch, count, make_parser, write_json

from tpu_offload.storage import StorageSpec
from tpu_offload.storage.file import DIRECTORY_NAME, FileTier
from tpu_offload.storage.format import PAGE_NBYTES
from tpu_offload.storage.slot_files import HINT

_MIB = 2**20
_KEY_NBYTES = 16


def fill(directory: str, spec: StorageSpec) -> None:
    """Has a hint of a random key in every slot, as if all records were written."""
    tier = FileTier(spec)
    generation = tier.generation
    tier.close()
    hints = np.zeros(spec.num_chunks, HINT)
    hints["generation"], hints["order"] = generation, np.arange(1, spec.num_chunks + 1)
    hints["key_nbytes"] = _KEY_NBYTES
    keys = np.zeros((spec.num_chunks, HINT["key"].itemsize), np.uint8)
    keys[:, :_KEY_NBYTES] = np.random.default_rng(0).integers(256, size=(spec.num_chunks, _KEY_NBYTES))
    hints["key"] = keys.view(HINT["key"]).ravel()
    with open(os.path.join(directory, "worker-0", DIRECTORY_NAME), "r+b") as file:
        file.seek(PAGE_NBYTES)
        file.write(hints.tobytes())


def start(spec: StorageSpec, times: Stopwatch) -> None:
    """One start of a process, which lists all keys."""
    tier = times("open", FileTier, spec)
    assert len(times("list", tier.stored_keys)) == spec.num_chunks
    tier.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--num-chunks", type=count, default=50_000)
    parser.add_argument("--record-mib", type=count, default=2)
    parser.add_argument("--rounds", type=count, default=9)
    args = parser.parse_args(argv)
    times = Stopwatch()
    huge = types.SimpleNamespace(f_bavail=2**50, f_frsize=1)
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch("os.posix_fallocate", lambda fd, offset, nbytes: os.ftruncate(fd, offset + nbytes)),
        mock.patch("os.statvfs", return_value=huge),
    ):
        spec = StorageSpec(
            record_nbytes=args.record_mib * _MIB,
            num_chunks=args.num_chunks,
            worker_id=0,
            fingerprint=bytes(16).hex(),
            options=directory,
        )
        fill(directory, spec)
        for _ in range(args.rounds):
            start(spec, times)
    gb = args.num_chunks * args.record_mib / 1024
    print(f"{args.num_chunks} slots, {gb:.1f} GB; s, median (p10-p90):")
    spreads = times.spreads(scale=1)
    for name, spread in spreads.items():
        print(f"    {name}: {spread.text(3)}")
    write_json(args, question="start of a file tier that is full", results=[{"gb": gb, "seconds": spreads}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
