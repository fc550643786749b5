"""The storage tiers of the settings: reachable, truthful, and how fast."""

import contextlib
import mmap
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tpu_offload.config import OffloadConfig
from tpu_offload.config.storage_tiers import StorageTierConfig
from tpu_offload.doctor.findings import Finding, Findings, error, ok, warning
from tpu_offload.errors import ConfigError, OffloadError
from tpu_offload.storage import StorageSpec, StorageTier, make_tier

_RECORD_NBYTES = 4 << 20
_NUM_RECORDS = 8
# No engine has so many workers: what is written is in a place of its own, beside a running engine or another check.
_WORKER_IDS = range(60_000, 65_536)
_SLOW_NBYTES_PER_S = 0.1e9
_TIMEOUT_S = 30.0
_MAX_TEXT = 200


def check_tiers(
    config: OffloadConfig | None,
    *,
    make: Callable[[str, StorageSpec], StorageTier] = make_tier,
    timeout_s: float = _TIMEOUT_S,
) -> Findings:
    """Writes, reads back and deletes a few records in each storage tier of the settings.

    Args:
      config: the settings; None checks nothing.
      make: makes a tier of a name.
      timeout_s: how long one may take. It runs in a thread that is left behind if it takes longer.
    """
    for tier in config.storage_tiers if config is not None else ():
        check, found = f"storage tier {tier.label}", queue.SimpleQueue[Finding]()
        worker_id = secrets.choice(_WORKER_IDS)
        with _folder_removed(tier, worker_id):
            arguments = check, tier, make, worker_id, found
            threading.Thread(target=_put_finding, args=arguments, daemon=True).start()
            try:
                finding = found.get(timeout=timeout_s)
            except queue.Empty:
                why = f"no answer within {timeout_s:g} s"
                finding = error(check, why, "see that the server or disk is not frozen")
            yield finding  # before the folder is removed, which waits for a disk that is frozen


def _put_finding(
    check: str,
    tier: StorageTierConfig,
    make: Callable[[str, StorageSpec], StorageTier],
    worker_id: int,
    found: "queue.SimpleQueue[Finding]",
) -> None:
    found.put(_finding(check, tier, make, worker_id))


def _finding(
    check: str, tier: StorageTierConfig, make: Callable[[str, StorageSpec], StorageTier], worker_id: int
) -> Finding:
    try:
        return _check_tier(check, tier, make, worker_id)
    except OffloadError as e:
        return error(check, str(e), "fix it, or take the tier out of TPU_OFFLOAD_STORAGE_TIER")
    except Exception as e:  # a tier of the user may raise anything
        why = " ".join(str(e.strerror or e if isinstance(e, OSError) else e).split())[:_MAX_TEXT]
        return error(
            check,
            f"it fails: {type(e).__name__}: {why}",
            "engines would suspend its copies: see that the server or disk is there and may be written",
        )


def _check_tier(
    check: str, tier: StorageTierConfig, make: Callable[[str, StorageSpec], StorageTier], worker_id: int
) -> Finding:
    spec = StorageSpec(
        record_nbytes=_RECORD_NBYTES,
        num_chunks=_NUM_RECORDS,
        worker_id=worker_id,
        fingerprint=secrets.token_hex(16),
        options=tier.options,
    )
    if tier.name == "file":
        _check_user(tier.options)
        _check_space(tier)
    keys = [secrets.token_bytes(32) for _ in range(_NUM_RECORDS)]
    with contextlib.closing(make(tier.name, spec)) as made:
        try:
            written, read, wrong = _write_and_read(made, keys)
        finally:
            made.delete(keys)
    if wrong:
        return error(
            check,
            f"{wrong} of {_NUM_RECORDS} records came back with other bytes",
            "do not use it: every read would be refused by its checksum, so nothing would ever hit",
        )
    figures = {"write_nbytes_per_s": written, "read_nbytes_per_s": read}
    said = f"writes {written / 1e9:.2f} and reads {read / 1e9:.2f} GB/s, in one thread"
    if read < _SLOW_NBYTES_PER_S:
        return warning(check, said, "see docs/tiers.md from which bandwidth on a tier pays", **figures)
    return ok(check, said, **figures)


def _check_user(options: str) -> None:
    """Finds what engines of another user have left in a file tier's directory, beside the folder that is tried here.

    Raises:
      ConfigError: some worker of an engine of this user could not start there.
    """
    from tpu_offload.storage.file import FileOptions
    from tpu_offload.storage.file_inspection import worker_directories, worker_id_of

    try:
        workers = worker_directories(Path(FileOptions.parse(options).directory))
        found = ((worker, path) for worker in workers if (path := _refused(worker)) is not None)
        worker, path = next(found, (None, None))
        if worker is None or path is None:
            return
        owner, worker_id = path.stat().st_uid, worker_id_of(worker)
    except OSError:  # there is no directory, or it may not be read: the tier will say so
        return
    raise ConfigError(
        f"{path} belongs to user {owner}, and user {os.geteuid()} may not read and write it, so worker {worker_id} of "
        "an engine does not start there; run it as that user, give the files to this one, or take another directory"
    )


def _check_space(tier: StorageTierConfig) -> None:
    """Finds that the disk has no room for the tier: of the workers that are there already, or of one.

    Raises:
      ConfigError: an engine could not start there.
    """
    from tpu_offload.storage.file import FileOptions
    from tpu_offload.storage.file_inspection import worker_directories

    if tier.size_gb is None:
        return
    options = FileOptions.parse(tier.options)
    directory = Path(options.directory)
    try:
        workers = worker_directories(directory) if directory.is_dir() else []
        taken = [sum(file.lstat().st_blocks * 512 for file in worker.iterdir()) / 2**30 for worker in workers]
        disk = os.statvfs(next(path for path in (directory, *directory.parents) if os.path.exists(path)))
    except OSError:  # the tier will say so
        return
    size = 0.98 * tier.size_gb - 1 / 16  # a tier has whole chunks
    needed, free = sum(max(0.0, size - own) for own in taken or [0.0]), disk.f_bavail * disk.f_frsize / 2**30
    if needed > 0 and needed + options.min_free_gb > free:
        raise ConfigError(
            f"{options.directory}: {tier.size_gb:g} GB need {needed:.2f} GB or more, and {options.min_free_gb:g} GB "
            f"have to stay free; {free:.2f} GB are free: an engine does not start there; reduce "
            "TPU_OFFLOAD_STORAGE_GB or free some space"
        )


def _refused(worker: Path) -> Path | None:
    """What this user may not read and write of a worker's directory: the directory, or a file of the tier in it."""
    from tpu_offload.storage.directory_lock import LOCK_NAME
    from tpu_offload.storage.file import DIRECTORY_NAME, SEGMENT_NAME
    from tpu_offload.storage.file_inspection import worker_id_of

    if worker_id_of(worker) in _WORKER_IDS:  # of another check
        return None
    if not os.access(worker, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return worker
    for path in sorted(worker.iterdir()):
        is_ours = path.name in (DIRECTORY_NAME, LOCK_NAME) or SEGMENT_NAME.fullmatch(path.name)
        if is_ours and not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
            return path
    return None


def _write_and_read(tier: StorageTier, keys: list[bytes]) -> tuple[float, float, int]:
    """Bytes per second of writes and of reads, and how many records came back wrong."""
    total = _RECORD_NBYTES * len(keys)
    # Not closed: the traceback of an error may have views, and closing would replace it with another error.
    given, found = mmap.mmap(-1, total), mmap.mmap(-1, total)
    given[:] = os.urandom(total)
    source, target = memoryview(given).toreadonly(), memoryview(found)
    places = [slice(i * _RECORD_NBYTES, (i + 1) * _RECORD_NBYTES) for i in range(len(keys))]
    start_s = time.perf_counter()
    for key, place in zip(keys, places, strict=True):
        tier.write(key, source[place])
    middle_s = time.perf_counter()
    for key, place in zip(keys, places, strict=True):
        tier.read(key, target[place])
    end_s = time.perf_counter()
    wrong = sum(source[place] != target[place] for place in places)
    return total / (middle_s - start_s), total / (end_s - middle_s), wrong


@contextlib.contextmanager
def _folder_removed(tier: StorageTierConfig, worker_id: int) -> Iterator[None]:
    """Removes what a file tier leaves behind: the folder of its worker, and directories that are new."""
    if tier.name != "file":
        yield
        return
    from tpu_offload.storage.file import FileOptions

    try:
        directory = Path(FileOptions.parse(tier.options).directory)
    except ConfigError:  # the tier will say so
        yield
        return
    # Unlike `Path.exists`, this never raises.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        shutil.rmtree(directory / f"worker-{worker_id}", ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
