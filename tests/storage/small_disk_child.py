"""Storage on a disk that is full or read-only: `unshare --user --map-root-user --mount python -m` this, with DIR WHAT.

The disk is a tmpfs, which only this process and its children see.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.storage import killed_server
from tests.storage.conformance import NUM_CHUNKS, SPEC, is_missing, key_of, payload, read, write
from tpu_offload.errors import ConfigError
from tpu_offload.storage import StorageTier, make_tier
from tpu_offload.storage.object import ObjectTier

RECORDS_NBYTES = NUM_CHUNKS * SPEC.record_nbytes


def mount(directory: str, nbytes: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", directory], check=True)


def tier_in(directory: str, name: str) -> StorageTier:
    options = f"file://{directory}/kv" if name == "object" else f"{directory},min_free_gb=0"
    tier = make_tier(name, dataclasses.replace(SPEC, options=options))
    tier.stored_keys()
    return tier


def expect_refused(directory: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tier_in(directory, name)
    assert "\n" not in str(caught.value)
    print(f"refused: {caught.value}")


def fill(directory: str) -> None:
    """Takes all that is left of the disk."""
    with contextlib.suppress(OSError), open(f"{directory}/filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def expect_kept(tier: StorageTier, numbers: range) -> None:
    for i in numbers:
        assert read(tier, key_of(i)) == payload(i), i


def too_small_for_files(directory: str) -> None:
    """The disk has room for half of the tier."""
    mount(directory, RECORDS_NBYTES // 2)
    expect_refused(directory, "file")


def full_below_files(directory: str) -> None:
    """Others fill the disk once the tier has its space: it never notices."""
    mount(directory, RECORDS_NBYTES + 2**18)
    tier = tier_in(directory, "file")
    fill(directory)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    expect_kept(tier, range(NUM_CHUNKS))
    tier.clear()
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    tier.close()
    tier = tier_in(directory, "file")
    expect_kept(tier, range(NUM_CHUNKS))
    tier.close()
    print("kept")


def full_below_objects(directory: str) -> None:
    """Writes fail, what was there is kept, and there is room again after a deletion."""
    mount(directory, RECORDS_NBYTES)
    tier = tier_in(directory, "object")
    write(tier, key_of(0), 0)
    fill(directory)
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            write(tier, key_of(1), 1)
    expect_kept(tier, range(1))
    files = [path for path in Path(directory, "kv").rglob("*") if path.is_file()]
    assert len(files) == 2, f"a failed write leaves no file: {files}"
    os.unlink(f"{directory}/filler")
    write(tier, key_of(1), 1)
    expect_kept(tier, range(2))
    tier.close()
    print("kept")


def full_below_a_server(directory: str) -> None:
    """The same below an S3 server, whose answer says only that it has failed."""
    mount(directory, RECORDS_NBYTES)
    os.environ |= killed_server.CREDENTIALS
    with killed_server.store(Path(directory)) as server:
        tier = ObjectTier(dataclasses.replace(SPEC, options=killed_server.url(server.port)))
        write(tier, key_of(0), 0)
        fill(directory)
        for _ in range(3):
            with pytest.raises(OSError, match="InternalError"):
                write(tier, key_of(1), 1)
        expect_kept(tier, range(1))
        assert is_missing(tier, key_of(1))
        os.unlink(f"{directory}/filler")
        write(tier, key_of(1), 1)
        expect_kept(tier, range(2))
        assert len(killed_server.objects_in(Path(directory))) == 3
        tier.close()
    print("kept")


def read_only(directory: str, name: str) -> None:
    """What an earlier run left there does not help."""
    mount(directory, RECORDS_NBYTES + 2**20)
    tier = tier_in(directory, name)
    write(tier, key_of(0), 0)
    tier.close()
    subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
    expect_refused(directory, name)


SCENARIOS: dict[str, Callable[[str], None]] = {
    "too small for files": too_small_for_files,
    "full below files": full_below_files,
    "full below objects": full_below_objects,
    "full below a server": full_below_a_server,
    "read-only below files": lambda directory: read_only(directory, "file"),
    "read-only below objects": lambda directory: read_only(directory, "object"),
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[2]](sys.argv[1])
