"""The file tier: conformance, restarts, damage, and a disk that fails or is full."""

import contextlib
import dataclasses
import errno
import fcntl
import gc
import itertools
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from tests.storage import kill_child
from tests.storage.conformance import (
    CHECKS,
    FORMAT,
    NUM_CHUNKS,
    SPEC,
    is_missing,
    key_of,
    new_record,
    payload,
    read,
    start,
    write,
)
from tpu_offload.errors import ConfigError, TransferError
from tpu_offload.storage import RecordError, directory_lock, make_tier
from tpu_offload.storage import file as file_module
from tpu_offload.storage.file import FileOptions, FileTier
from tpu_offload.storage.slot_files import HINT

ROOT = Path(__file__).parents[2]


def spec_in(directory, *, options="", **changes):
    return dataclasses.replace(SPEC, options=f"{directory},min_free_gb=0{options}", **changes)


def opened(directory, **changes):
    return start(FileTier, spec_in(directory, **changes))


def filled(directory, *, num=NUM_CHUNKS, **changes):
    """A closed tier with some chunks; returns the worker's directory."""
    tier, _ = opened(directory, **changes)
    for i in range(num):
        write(tier, key_of(i), i)
    tier.close()
    return Path(directory) / f"worker-{tier.spec.worker_id}"


@pytest.fixture(params=["auto", "off"])
def direct(request):
    return f",direct={request.param}"


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(tmp_path, check, direct):
    check(lambda spec: FileTier(spec_in(tmp_path, options=direct, fingerprint=spec.fingerprint)))


@pytest.mark.parametrize("check", CHECKS)
def test_conformance_with_several_segments(tmp_path, monkeypatch, check):
    monkeypatch.setattr(file_module, "_SEGMENT_NBYTES", 5 * SPEC.record_nbytes + 1)
    check(lambda spec: FileTier(spec_in(tmp_path, fingerprint=spec.fingerprint)))
    segments = sorted((tmp_path / "worker-1").glob("*.kv"))
    assert [path.stat().st_size // SPEC.record_nbytes for path in segments] == [5, 5, 5, 1]


def test_the_registry_has_it(tmp_path):
    tier = make_tier("file", spec_in(tmp_path))
    assert type(tier) is FileTier
    tier.close()


def test_it_lists_in_the_order_of_writing(tmp_path):
    tier, _ = opened(tmp_path)
    order = random.Random(1).sample(range(NUM_CHUNKS), NUM_CHUNKS)
    for i in order:
        write(tier, key_of(i), i)
    write(tier, key_of(order[0]), 7)
    tier.close()
    for _ in range(2):  # reading changes nothing
        tier, keys = opened(tmp_path)
        assert keys == [key_of(i) for i in (*order[1:], order[0])]
        tier.close()
    tier, keys = opened(tmp_path)
    tier.delete(keys[:3])
    write(tier, key_of(99), 99)
    tier.close()
    tier, keys = opened(tmp_path)
    assert keys == [*(key_of(i) for i in (*order[4:], order[0])), key_of(99)]
    tier.close()


def test_a_full_tier_refuses_and_stays_as_it_is(tmp_path):
    tier, _ = opened(tmp_path)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)
    with pytest.raises(OSError, match="all 16 slots are taken"):
        write(tier, key_of(100), 100)
    assert all(read(tier, key_of(i)) == payload(i) for i in range(NUM_CHUNKS))
    tier.close()


def test_sizes_may_change(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "_SEGMENT_NBYTES", 5 * SPEC.record_nbytes)
    worker = filled(tmp_path)
    tier, keys = opened(tmp_path, num_chunks=7)
    assert keys == [key_of(i) for i in range(7)]
    assert len(list(worker.glob("*.kv"))) == 2
    assert all(read(tier, key_of(i)) == payload(i) for i in range(7))
    tier.close()
    tier, keys = opened(tmp_path, num_chunks=12)
    assert keys == [key_of(i) for i in range(7)]
    for i in range(20, 25):
        write(tier, key_of(i), i)
    assert all(read(tier, key_of(i)) == payload(i) for i in (*range(7), *range(20, 25)))
    tier.close()
    tier, keys = opened(tmp_path, record_nbytes=SPEC.record_nbytes + 4096)
    assert not keys, "records of another size are dropped"
    tier.close()


def size_of(directory):
    return sum(path.stat().st_blocks * 512 for path in Path(directory).rglob("*"))


def test_another_model_takes_the_same_space(tmp_path):
    filled(tmp_path)
    before, names = size_of(tmp_path), sorted(p.name for p in (tmp_path / "worker-1").iterdir())
    for other in ("ab", "cd", "ab"):
        tier, keys = opened(tmp_path, fingerprint=other * 16)
        assert not keys
        tier.close()
    assert (size_of(tmp_path), sorted(p.name for p in (tmp_path / "worker-1").iterdir())) == (before, names)
    tier, keys = opened(tmp_path)
    assert not keys
    assert is_missing(tier, key_of(0))
    tier.close()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_an_index_that_cannot_be_read_is_told(tmp_path, caplog, is_damaged):
    """One that is damaged, and one of the next version of the format, whose checksum is right."""
    path = filled(tmp_path) / "directory.bin"
    data = bytearray(path.read_bytes())
    data[8] += 1  # the version
    if not is_damaged:
        data[4088:4096] = xxhash.xxh3_64_digest(data[:4088])
    path.write_bytes(data)
    caplog.clear()
    tier, keys = opened(tmp_path)
    (warning,) = caplog.messages
    assert "its index is damaged or of another version of the format; the records are discarded" in warning
    assert not keys
    assert is_missing(tier, key_of(0))
    write(tier, key_of(0), 5)
    assert read(tier, key_of(0)) == payload(5)
    tier.close()
    caplog.clear()
    tier, keys = opened(tmp_path)
    assert (keys, caplog.messages) == ([key_of(0)], [])
    tier.close()


def test_workers_have_directories_of_their_own(tmp_path):
    tiers = [opened(tmp_path, worker_id=i)[0] for i in range(3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["worker-0", "worker-1", "worker-2"]
    for tier in tiers:
        tier.close()


def test_a_second_process_is_refused(tmp_path):
    tier, _ = opened(tmp_path)
    code = (
        "import sys; from tests.storage.kill_child import spec_of; from tpu_offload.storage.file import FileTier; "
        "FileTier(spec_of(sys.argv[1]))"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    second = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert second.returncode
    (line,) = [line for line in second.stderr.splitlines() if line.startswith("tpu_offload.errors")]
    assert f"worker-1 is used by another process (pid {os.getpid()}); give each engine and tier" in line
    write(tier, key_of(1), 1)
    assert read(tier, key_of(1)) == payload(1)
    tier.close()
    subprocess.run(run, cwd=ROOT, capture_output=True, timeout=120, check=True)


def test_a_second_tier_of_the_same_process_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    tier, _ = opened(tmp_path / "kv")
    expect_refused(tmp_path / "link", "worker-1 is used by this process already; give each engine and tier a directory")
    tier.close()


def test_a_forked_process_does_not_hold_the_directory(tmp_path):
    """As those of the schedulers of data-parallel ranks, which may outlive the engine's process."""
    run = [sys.executable, "-m", "tests.storage.fork_child", str(tmp_path)]
    output = subprocess.run(run, cwd=ROOT, capture_output=True, timeout=120, check=True, text=True).stdout
    refused, *others = output.splitlines()
    assert "is used by this process already" in refused, "the parent holds it, although the child has closed its tier"
    assert others == ["True", "0"]


def descriptors(folder):
    """Numbers of this process's open descriptors of files in a folder; other tests' may be closed at any time."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(f"{folder}/"):
                found.add(int(name))
    return found


def test_a_second_close_closes_no_other_file(tmp_path):
    """Not those that have the numbers by then: of an application, or of the tier that was made next."""
    tier, _ = opened(tmp_path / "kv")
    of_tier = descriptors(tmp_path)
    assert len(of_tier) == 3
    tier.close()
    assert descriptors(tmp_path) == set()
    files = [(tmp_path / str(i)).open("wb", buffering=0) for i in range(2 * max(of_tier))]
    assert of_tier <= {file.fileno() for file in files}
    tier.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        tier.clear()
    for file in files:
        assert file.write(b"x") == 1
        file.close()
    assert {(tmp_path / str(i)).read_bytes() for i in range(len(files))} == {b"x"}
    second, _ = opened(tmp_path / "kv")
    tier.close()
    write(second, key_of(1), 1)
    assert read(second, key_of(1)) == payload(1)
    expect_refused(tmp_path / "kv", "worker-1 is used by this process already")
    second.close()


def test_a_tier_that_is_dropped_releases_its_directory(tmp_path):
    tier, _ = opened(tmp_path)
    write(tier, key_of(1), 1)
    assert len(descriptors(tmp_path)) == 3
    del tier
    gc.collect()
    assert descriptors(tmp_path) == set()
    tier, keys = opened(tmp_path)
    assert keys == [key_of(1)]
    tier.close()
    files = [(tmp_path / str(i)).open("wb", buffering=0) for i in range(10)]
    del tier
    gc.collect()
    for file in files:  # what was closed is not closed again
        assert file.write(b"x") == 1
        file.close()


# --- the options ----------------------------------------------------------------------------------


def test_options(tmp_path):
    assert FileOptions.parse("/mnt/disk") == FileOptions(directory="/mnt/disk", min_free_gb=1.0, direct=True)
    parsed = FileOptions.parse(" /mnt/a b/ , direct=off,min_free_gb=0.5")
    assert parsed == FileOptions(directory="/mnt/a b", min_free_gb=0.5, direct=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no directory; expected a directory, then"),
        ("~no-such-user/kv,direct=off", "there is no home directory for ~; expected the path from / on"),
        (",direct=off", "names no directory"),
        ("/x,direct=maybe", "has 'direct=maybe'; expected a directory, then name=value"),
        ("/x,min_free_gb=-1", "has 'min_free_gb=-1'"),
        ("/x,min_free_gb=nan", "has 'min_free_gb=nan'"),
        ("/x,min_free_gb", "has 'min_free_gb'"),
        ("/x,size=4", "has 'size=4'"),
        ("/x,direct=off,direct=off", "has 'direct=off'"),
    ],
)
def test_bad_options_are_one_clear_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        FileTier(dataclasses.replace(SPEC, options=text))
    assert str(caught.value).startswith(f"TPU_OFFLOAD_STORAGE_OPTIONS={text}")
    assert "\n" not in str(caught.value)


# --- a disk that is full or fails -------------------------------------------------------------------


def expect_refused(directory, match, **changes):
    with pytest.raises(ConfigError, match=match) as caught:
        opened(directory, **changes)
    assert "\n" not in str(caught.value)


def test_too_little_space_is_an_error_at_the_start(tmp_path):
    expect_refused(tmp_path, r"chunks need .* GB more, and 0 GB have to stay free; .* reduce", num_chunks=2**28)
    with pytest.raises(ConfigError, match=r"1e.12 GB have to stay free"):
        FileTier(dataclasses.replace(SPEC, options=f"{tmp_path},min_free_gb=1e12"))
    worker = filled(tmp_path, num=3)
    tier = FileTier(dataclasses.replace(SPEC, options=f"{tmp_path},min_free_gb=1e12"))  # has its space already
    tier.close()
    assert len(list(worker.glob("*.kv"))) == 1


def test_workers_that_start_together_leave_the_space_that_has_to_stay_free(tmp_path, monkeypatch):
    """There is room for one of two, which would both have seen it."""
    both_have_looked = threading.Barrier(2)

    def statvfs(path):
        free = int(1.5 * NUM_CHUNKS * SPEC.record_nbytes) - size_of(tmp_path)
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait(timeout=1)
        return SimpleNamespace(f_bavail=free, f_frsize=1)

    def start_worker(worker_id):
        try:
            return opened(tmp_path, worker_id=worker_id)[0]
        except ConfigError as e:
            return e

    monkeypatch.setattr(os, "statvfs", statvfs)
    with ThreadPoolExecutor(2) as pool:
        started = list(pool.map(start_worker, range(2)))
    (tier,) = [tier for tier in started if isinstance(tier, FileTier)]
    (error,) = [error for error in started if isinstance(error, ConfigError)]
    assert "have to stay free" in str(error)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"], "and no file of a lock"
    tier.close()


@contextlib.contextmanager
def locked(directory):
    """As by a worker that allocates."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def test_a_start_waits_for_another_that_allocates_but_not_for_ever(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(directory_lock, "_ALLOCATION_WAIT_S", 0.1)
    with locked(tmp_path):
        tier, _ = opened(tmp_path)
    assert "cannot be locked while files are allocated" in caplog.text
    with locked(tmp_path):  # it is free once they are allocated
        write(tier, key_of(1), 1)
    tier.close()
    caplog.clear()
    monkeypatch.setattr(directory_lock, "_ALLOCATION_WAIT_S", 60.0)
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            starting = pool.submit(opened, tmp_path)
            with pytest.raises(TimeoutError):
                starting.result(timeout=0.3)
        tier, keys = starting.result()
    assert keys == [key_of(1)]
    assert not caplog.text
    tier.close()


def open_directories(monkeypatch, opened):
    """From now on `opened` is called with each descriptor of a directory, and returns the one to use."""
    real = os.open

    def wrapped(path, flags, *args):
        fd = real(path, flags, *args)
        return opened(fd) if flags & os.O_DIRECTORY else fd

    monkeypatch.setattr(os, "open", wrapped)


def test_a_process_that_was_forked_while_files_are_allocated_does_not_keep_the_lock(tmp_path, monkeypatch):
    copies = []  # with the same lock, as a forked process has

    def copied(fd):
        copies.append(os.dup(fd))
        return fd

    open_directories(monkeypatch, copied)
    tier, _ = opened(tmp_path)
    monkeypatch.undo()
    assert len(copies) == 1
    with locked(tmp_path):
        pass
    tier.close()
    os.close(copies[0])


def test_a_directory_that_cannot_be_locked_is_used_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(fd):
        os.close(fd)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    open_directories(monkeypatch, refuse)
    tier, _ = opened(tmp_path)
    assert "cannot be locked while files are allocated ([Errno 13] Permission denied)" in caplog.text
    write(tier, key_of(1), 1)
    assert read(tier, key_of(1)) == payload(1)
    tier.close()


@pytest.mark.parametrize("num", range(1, 5))
def test_a_start_that_runs_out_of_space_frees_what_it_took(tmp_path, monkeypatch, num):
    """The directory and three segments; others may have filled the disk meanwhile."""
    monkeypatch.setattr(file_module, "_SEGMENT_NBYTES", 6 * SPEC.record_nbytes)
    real = os.posix_fallocate

    def fail_late(fd, offset, nbytes):
        calls.append(nbytes)
        real(fd, offset, nbytes // 2 if len(calls) == num else nbytes)
        if len(calls) == num:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for filled_before in (0, 8):
        if filled_before:
            filled(tmp_path, num=8, num_chunks=8)
        before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
        with monkeypatch.context() as patch:
            calls: list[int] = []
            patch.setattr(os, "posix_fallocate", fail_late)
            expect_refused(tmp_path, "cannot be used .OSError: .*No space left")
        after = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"}
        assert after == {path: nbytes for path, nbytes in before.items() if path.name != "lock"}
    tier, keys = opened(tmp_path, num_chunks=8)
    assert keys == [key_of(i) for i in range(8)]
    assert all(read(tier, key_of(i)) == payload(i) for i in range(8))
    tier.close()


def test_a_limit_on_file_sizes_is_an_error_at_the_start(tmp_path):
    """As on a disk that is full: the kernel refuses to allocate."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * SPEC.record_nbytes, limits[1]))
    try:
        expect_refused(tmp_path, r"the directory cannot be used \(OSError: .*too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tier, _ = opened(tmp_path)
    tier.close()


@pytest.mark.parametrize("call", ["makedirs", "open", "posix_fallocate", "pread", "pwritev", "preadv", "fsync"])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_at_the_start_is_one_line(tmp_path, monkeypatch, call, code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        if call == "open":
            patch.setattr(os, "makedirs", lambda *args, **kwargs: None)
        expect_refused(tmp_path, rf"^TPU_OFFLOAD_STORAGE_OPTIONS=.*cannot be used \(OSError: .*{os.strerror(code)}")
    tier, _ = opened(tmp_path)  # nothing stays locked
    tier.close()


def test_no_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("x")
    expect_refused(tmp_path / "file", "cannot be used .NotADirectoryError")


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_later_costs_chunks(tmp_path, monkeypatch, call):
    tier, _ = opened(tmp_path)
    for i in range(NUM_CHUNKS):
        write(tier, key_of(i), i)

    def fail(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match="Input/output"):
            write(tier, key_of(0), 0) if call == "pwritev" else read(tier, key_of(0))
        if call == "pwritev":
            with pytest.raises(OSError, match="Input/output"):
                tier.delete([key_of(1), key_of(2)])
            with pytest.raises(OSError, match="Input/output"):
                tier.clear()
            assert is_missing(tier, key_of(3)), "nothing is read until it is cleared"
    tier.clear()
    for i in range(NUM_CHUNKS):
        write(tier, key_of(100 + i), i)
    assert all(read(tier, key_of(100 + i)) == payload(i) for i in range(NUM_CHUNKS)), "no slot is lost"
    tier.close()


def test_without_direct_io_it_uses_the_page_cache(tmp_path, monkeypatch, caplog):
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    tier, _ = opened(tmp_path)
    assert "has no direct I/O; the page cache is used" in caplog.text
    write(tier, key_of(1), 1)
    assert read(tier, key_of(1)) == payload(1)
    tier.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_an_error_and_no_lack_of_direct_io(tmp_path, monkeypatch, code):
    real = os.open

    def refuse(path, flags, *args):
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    expect_refused(tmp_path, rf"cannot be used \(OSError: .*{os.strerror(code)}")


# --- damage -----------------------------------------------------------------------------------------


def expect_old_or_missing(directory, *, num_missing=None, **changes):
    """Every chunk is as it was written, or a miss."""
    tier, _ = opened(directory, **changes)
    missing = 0
    for i in range(NUM_CHUNKS):
        try:
            assert read(tier, key_of(i)) == payload(i)
        except (KeyError, OSError, TransferError):
            missing += 1
    tier.close()
    assert num_missing is None or missing == num_missing
    return missing


def flip(path, place, bit):
    with path.open("r+b") as file:
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ 1 << bit]))


def test_every_flipped_bit_is_found(tmp_path):
    """1,000 places of headers and payloads."""
    segment = filled(tmp_path) / "segment-000.kv"
    tier, _ = opened(tmp_path)
    rng = random.Random(5)
    record = new_record()
    for _ in range(1000):
        slot, place, bit = rng.randrange(NUM_CHUNKS), rng.randrange(4096 + FORMAT.payload_nbytes), rng.randrange(8)
        if rng.random() < 0.3:
            place %= 4096
        flip(segment, slot * SPEC.record_nbytes + place, bit)
        tier.read(key_of(slot), record)
        with pytest.raises(TransferError):
            FORMAT.verify(record, key_of(slot), generation=tier.generation)
        flip(segment, slot * SPEC.record_nbytes + place, bit)
    tier.close()
    expect_old_or_missing(tmp_path, num_missing=0)


def test_flipped_bits_of_the_directory_cost_chunks(tmp_path):
    worker = filled(tmp_path)
    clean = tmp_path / "clean"
    shutil.copytree(worker, clean)
    rng = random.Random(6)
    num_missing = []
    for _ in range(150):
        path = worker / "directory.bin"
        shutil.copy(clean / "directory.bin", path)
        flip(path, rng.choice((rng.randrange(64), 4096 + rng.randrange(64 * NUM_CHUNKS))), rng.randrange(8))
        num_missing.append(expect_old_or_missing(tmp_path))
    assert {0, 1, NUM_CHUNKS} <= set(num_missing)


@pytest.mark.parametrize("order", [2**64 - 1, 2**64 - 2, 2**63, 2**63 - 1])
def test_a_damaged_order_stops_no_writes(tmp_path, order):
    """Also not those of later starts, or a few of them later; and nothing that is written is lost."""
    directory = filled(tmp_path, num=4) / "directory.bin"
    with directory.open("r+b") as file:
        file.seek(4096 + 64 + 8)
        file.write(struct.pack("<Q", order))
    held = set(range(4))
    for life in range(4):
        tier, keys = opened(tmp_path)
        assert sorted(keys) == sorted(map(key_of, held))
        if order > 2**63 - 1:
            assert keys[0] == key_of(1), "it counts as the first"
            assert keys[1:] == [key_of(i) for i in sorted(held - {1})]
        for i in range(10 + 3 * life, 13 + 3 * life):
            write(tier, key_of(i), i)
            held.add(i)
        assert all(read(tier, key_of(i)) == payload(i) for i in held)
        tier.close()


@pytest.mark.parametrize("nbytes", [0, 100, 4096, 4096 + 77])
@pytest.mark.parametrize("name", ["segment-000.kv", "directory.bin"])
def test_what_was_truncated_is_missing(tmp_path, name, nbytes):
    os.truncate(filled(tmp_path) / name, nbytes)
    assert expect_old_or_missing(tmp_path) > 0


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("nbytes", [0, 100, 4096, SPEC.record_nbytes - 1])
def test_what_is_truncated_while_it_is_open_is_damaged(tmp_path, nbytes, direct):
    tier, _ = opened(tmp_path, options=f",direct={direct}")
    write(tier, key_of(0), 0)
    os.truncate(tmp_path / "worker-1" / "segment-000.kv", nbytes)
    with pytest.raises(RecordError, match="shorter than it was made"):
        read(tier, key_of(0))
    write(tier, key_of(0), 1)
    assert read(tier, key_of(0)) == payload(1)
    tier.close()


def test_swapped_segments_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(file_module, "_SEGMENT_NBYTES", 8 * SPEC.record_nbytes)
    worker = filled(tmp_path)
    first, second = worker / "segment-000.kv", worker / "segment-001.kv"
    first.rename(worker / "x")
    second.rename(first)
    (worker / "x").rename(second)
    # The keys of the others are too long for hints, so they are read from the slots.
    expect_old_or_missing(tmp_path, num_missing=NUM_CHUNKS // 2)


def test_another_workers_and_another_models_files_are_missing(tmp_path):
    """Copied over ours, directory and all; of the worker both files, of the model one."""
    worker = filled(tmp_path / "a", worker_id=1)
    other = filled(tmp_path / "b", worker_id=2)
    for name in ("segment-000.kv", "directory.bin"):
        shutil.copy(other / name, worker / name)
    expect_old_or_missing(tmp_path / "a", num_missing=NUM_CHUNKS)
    worker = filled(tmp_path / "c")
    tier, _ = opened(tmp_path / "d", fingerprint="ab" * 16)
    form = dataclasses.replace(FORMAT, fingerprint=b"\xab" * 16)
    for i in range(NUM_CHUNKS):
        record = new_record()
        form.payload_of(record)[:] = payload(i)
        form.seal(record, key_of(i), generation=tier.generation)
        tier.write(key_of(i), record)
    tier.close()
    shutil.copy(tmp_path / "d" / "worker-1" / "segment-000.kv", worker / "segment-000.kv")
    expect_old_or_missing(tmp_path / "c", num_missing=NUM_CHUNKS)


def test_hints_of_before_a_write_are_misses(tmp_path):
    """A crash between a record and its hint: the hint names the chunk that was there."""
    worker = filled(tmp_path)
    hints = (worker / "directory.bin").read_bytes()
    tier, keys = opened(tmp_path)
    tier.delete(keys[:4])
    for i in range(4):
        write(tier, key_of(50 + i), 50 + i)
    tier.close()
    (worker / "directory.bin").write_bytes(hints)
    expect_old_or_missing(tmp_path, num_missing=4)


def test_two_hints_of_one_key_count_once(tmp_path):
    """A deletion whose hint did not reach the disk, and the same chunk in another slot."""
    worker = filled(tmp_path, num=4)
    directory = worker / "directory.bin"
    hint = directory.read_bytes()[4096 : 4096 + 64]
    tier, _ = opened(tmp_path)
    tier.delete([key_of(0), key_of(1)])
    write(tier, key_of(0), 0)  # into the slot of 1, which was freed last
    tier.close()
    with directory.open("r+b") as file:
        file.seek(4096)
        file.write(hint)
    tier, keys = opened(tmp_path)
    assert keys == [key_of(i) for i in (2, 3, 0)], "and the later one"
    for i in range(10, 10 + NUM_CHUNKS - 3):
        write(tier, key_of(i), i)
    assert read(tier, key_of(0)) == payload(0), "its slot was not given away"
    tier.close()


def test_a_generation_never_returns(tmp_path):
    tier, _ = opened(tmp_path)
    seen = {tier.generation}
    for _ in range(20):
        tier.clear()
        assert tier.generation not in seen
        seen.add(tier.generation)
    assert 0 not in seen
    last = tier.generation
    tier.close()
    tier, _ = opened(tmp_path)
    assert tier.generation == last
    tier.close()
    with (tmp_path / "worker-1" / "directory.bin").open("r+b") as file:
        file.write(struct.pack("<Q", 0))
    tier, _ = opened(tmp_path)
    assert tier.generation not in seen
    tier.close()


# --- kill -9 ----------------------------------------------------------------------------------------


def run_until_killed(directory, seed):
    """Kills the process after so many lines; returns them."""
    rng = random.Random(seed)
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.kill_child", str(directory), str(seed)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        lines = list(itertools.islice(child.stdout, rng.randrange(2, 400)))
        child.kill()
        lines += child.stdout
        assert not child.stderr.read()
    return [line.split() for line in lines if line.endswith("\n")]  # it may be killed while it prints


def expect_sound(tier, keys, lines):
    """Nothing of before the last clear is there, what was written is, and no byte is wrong."""
    clears = [i for i, line in enumerate(lines) if line[:2] == ["done", "clear"]]
    since = lines[clears[-1] :] if clears else lines
    written = {int(line[1]) for line in since if line[0] == "write"}
    found = {number for number in range(kill_child.NUM_KEYS) if key_of(number) in keys}
    assert len(found) == len(keys)
    if clears:
        assert found <= written
    held: set[int] = set()
    for line in since:
        if line[:2] == ["done", "write"]:
            held.add(int(line[2]))
        elif line[0] == "delete":
            held.discard(int(line[1]))
        elif line[0] == "clear":
            held.clear()
    torn = {int(lines[-1][1])} if lines[-1][0] == "write" else set()  # the call that was interrupted
    assert held - torn <= found, "what was written is listed"
    for number in range(kill_child.NUM_KEYS):
        try:
            assert read(tier, key_of(number)) == payload(kill_child.seed_of(number))
            assert number in found
        except (KeyError, OSError, TransferError):
            assert number not in held - torn


def kill_often(directory, seeds):
    sizes = set()
    for seed in seeds:
        lines = run_until_killed(directory, seed)
        tier, keys = opened(directory)
        expect_sound(tier, keys, lines)
        tier.close()
        sizes.add(size_of(directory))
        assert sorted(p.name for p in (directory / "worker-1").iterdir()) == ["directory.bin", "lock", "segment-000.kv"]
    assert max(sizes) <= NUM_CHUNKS * SPEC.record_nbytes + 64 * 1024


def test_killed_at_any_moment(tmp_path):
    kill_often(tmp_path, range(4))


@pytest.mark.slow
def test_killed_a_hundred_times(tmp_path):
    kill_often(tmp_path, range(100, 200))


def test_a_start_reads_hints_only(tmp_path):
    """32 MiB of hints are a terabyte of 2 MiB records; here 50,000 slots, of which none is read."""
    record_nbytes, num_chunks = 8192, 50_000
    spec = dataclasses.replace(spec_in(tmp_path), record_nbytes=record_nbytes, num_chunks=num_chunks)
    tier = FileTier(spec)
    hints = np.zeros(num_chunks, HINT)
    hints["generation"], hints["order"], hints["key_nbytes"] = tier.generation, np.arange(num_chunks)[::-1], 8
    hints["key"] = [i.to_bytes(46, "little") for i in range(num_chunks)]
    tier.close()
    with (tmp_path / "worker-1" / "directory.bin").open("r+b") as file:
        file.seek(4096)
        file.write(hints.tobytes())
    tier = FileTier(spec)
    tier._segment = None  # type: ignore[assignment]
    assert tier.stored_keys() == [i.to_bytes(8, "little") for i in reversed(range(num_chunks))]
    tier.close()
