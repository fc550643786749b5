"""Bytes that change below the tiers on servers and in buckets, and real disks that are full or read-only.

tests/storage/test_file.py has the same damage for the file tier.
"""

import contextlib
import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path

import obstore
import pytest

from tests.inside.servers import asker, server_key
from tests.storage import servers, small_disk_child
from tests.storage.conformance import FORMAT, SPEC, key_of, new_record, payload, read, sealed, write
from tests.storage.objects import object_of, store_of
from tests.storage.test_object import credentials, s3_url  # noqa: F401
from tpu_offload.errors import TransferError
from tpu_offload.storage import RecordError
from tpu_offload.storage.object import ObjectTier
from tpu_offload.storage.valkey import ValkeyTier

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def objects(url):
    tier = ObjectTier(dataclasses.replace(SPEC, options=url))
    with contextlib.closing(tier):
        yield tier, lambda key, data: obstore.put(store_of(tier), object_of(tier, key), bytes(data))


@contextlib.contextmanager
def directory(tmp_path):
    with objects(f"file://{tmp_path}") as found:
        yield found


@contextlib.contextmanager
def bucket(tmp_path):
    with servers.running(servers.moto) as server:
        servers.make_bucket(server.port, "bucket")
        with objects(s3_url(server, "bucket").replace("timeout_s=2", "timeout_s=60")) as found:
            yield found


@contextlib.contextmanager
def valkey(tmp_path):
    with servers.running(servers.valkey()) as server:
        options = f"valkey://127.0.0.1:{server.port}?timeout_s=60"
        tier = ValkeyTier(dataclasses.replace(SPEC, options=options))
        with contextlib.closing(tier):
            yield tier, lambda key, data: asker(tier).set(server_key(tier, key), bytes(data))


@pytest.fixture(params=[directory, bucket, valkey], ids=lambda kind: kind.__name__)
def below(request, tmp_path):
    """A tier, and a function that replaces what is stored for a key."""
    with request.param(tmp_path) as found:
        yield found


def expect_damaged(tier, key):
    record = new_record()
    tier.read(key, record)
    with pytest.raises(TransferError):
        FORMAT.verify(record, key, generation=tier.generation)


def test_every_flipped_bit_is_found(below, request):
    """1,000 places of header and payload; fewer through the slow server."""
    tier, replace = below
    rng = random.Random(5)
    record = bytearray(sealed(tier, key_of(1), 1))
    tier.write(key_of(1), memoryview(record).toreadonly())
    for _ in range(60 if "bucket" in request.node.name else 1000):
        place, bit = rng.randrange(4096 + FORMAT.payload_nbytes), rng.randrange(8)
        if rng.random() < 0.3:
            place %= 4096
        record[place] ^= 1 << bit
        replace(key_of(1), record)
        expect_damaged(tier, key_of(1))
        record[place] ^= 1 << bit
    replace(key_of(1), record)
    assert read(tier, key_of(1)) == payload(1)


def test_what_was_truncated_swapped_or_of_another_model_is_a_miss(below):
    tier, replace = below
    write(tier, key_of(1), 1)
    record = bytes(sealed(tier, key_of(1), 1))
    for nbytes in (0, 1, 4095, 4096, len(record) - 4096, len(record) - 1):
        replace(key_of(1), record[:nbytes])
        with pytest.raises((KeyError, OSError, RecordError)):
            tier.read(key_of(1), new_record())
    replace(key_of(1), record)
    replace(key_of(2), record)
    expect_damaged(tier, key_of(2))
    other = new_record()
    form = dataclasses.replace(FORMAT, fingerprint=b"g" * 16)
    form.payload_of(other)[:] = payload(1)
    form.seal(other, key_of(3), generation=tier.generation)
    replace(key_of(3), other)
    expect_damaged(tier, key_of(3))
    assert read(tier, key_of(1)) == payload(1)


# --- disks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("too small for files", "refused: .*GB are free: reduce the tier"),
        ("full below files", "kept"),
        ("full below objects", "kept"),
        ("full below a server", "kept"),
        ("read-only below files", "refused: .*Read-only file system"),
        ("read-only below objects", "refused: .*Read-only file system"),
    ],
)
def test_a_disk(tmp_path, what, said):
    assert what in small_disk_child.SCENARIOS
    if what == "full below a server" and servers.rclone_binary() is None:
        pytest.skip(servers.NEEDS_RCLONE)
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        probe = subprocess.run([*alone, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if probe.returncode:
        pytest.skip(f"needs a namespace of mounts: {probe.stderr.decode().strip()}")
    child = subprocess.run(
        [*alone, sys.executable, "-m", small_disk_child.__name__, tmp_path, what],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert re.search(said, child.stdout), child.stdout
