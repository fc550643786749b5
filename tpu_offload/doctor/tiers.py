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
from urllib.parse import unquote, urlsplit

from tpu_offload.config import OffloadConfig
from tpu_offload.config.storage_tiers import StorageTierConfig
from tpu_offload.doctor.findings import Finding, Findings, error, ok, warning
from tpu_offload.errors import ConfigError, OffloadError
from tpu_offload.storage import StorageSpec, StorageTier, make_tier

_RECORD_NBYTES = 4 << 20
_NUM_RECORDS = 8
_MAX_STORED = 2  # at a time: a full server evicts as much of what engines have stored
_TTL_S = 60  # of records on a server, if this process is killed
# No engine has so many workers: what is written is in a place of its own, beside a running engine or another check.
_WORKER_IDS = range(60_000, 65_536)
_SLOW_NBYTES_PER_S = 0.1e9
_TIMEOUT_S = 30.0
_END_S = 5.0  # for a check to delete what it has written
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
        check, found, stop = f"storage tier {tier.label}", queue.SimpleQueue[Finding](), threading.Event()
        worker_id = secrets.choice(_WORKER_IDS)
        arguments = check, tier, make, worker_id, found, stop
        thread = threading.Thread(target=_put_finding, args=arguments, daemon=True)
        with _folders_removed(tier, worker_id), _ended(thread, stop, min(timeout_s, _END_S)):
            thread.start()
            try:
                finding = found.get(timeout=timeout_s)
            except queue.Empty:
                why = f"no answer within {timeout_s:g} s"
                finding = error(check, why, "see that the server or disk is not frozen")
            yield finding  # before the folder is removed, which waits for a disk that is frozen


@contextlib.contextmanager
def _ended(thread: threading.Thread, stop: threading.Event, timeout_s: float) -> Iterator[None]:
    """Has the thread of a check delete what it has written, also after an interrupt, and waits for that."""
    try:
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join(timeout_s)


class _StoppedError(OffloadError):
    """Nobody waits for the finding any more."""


def _put_finding(
    check: str,
    tier: StorageTierConfig,
    make: Callable[[str, StorageSpec], StorageTier],
    worker_id: int,
    found: "queue.SimpleQueue[Finding]",
    stop: threading.Event,
) -> None:
    found.put(_finding(check, tier, make, worker_id, stop))


def _finding(
    check: str,
    tier: StorageTierConfig,
    make: Callable[[str, StorageSpec], StorageTier],
    worker_id: int,
    stop: threading.Event,
) -> Finding:
    try:
        return _check_tier(check, tier, make, worker_id, stop)
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
    check: str,
    tier: StorageTierConfig,
    make: Callable[[str, StorageSpec], StorageTier],
    worker_id: int,
    stop: threading.Event,
) -> Finding:
    spec = StorageSpec(
        record_nbytes=_RECORD_NBYTES,
        num_chunks=_MAX_STORED,
        worker_id=worker_id,
        fingerprint=secrets.token_hex(16),
        options=_expiring(tier) if tier.name == "valkey" else tier.options,
    )
    if tier.name == "file":
        _check_user(tier.options)
        _check_space(tier)
    keys = [secrets.token_bytes(32) for _ in range(_NUM_RECORDS)]
    with contextlib.closing(make(tier.name, spec)) as made:
        try:
            written, read, wrong = _write_and_read(made, keys, stop)
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is said
                _remove(made, keys)
            raise
        _remove(made, keys)
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


def _remove(tier: StorageTier, keys: list[bytes]) -> None:
    tier.delete(keys)
    tier.unregister()


def _expiring(tier: StorageTierConfig) -> str:
    """The options with an expiry of records, unless they have one."""
    _, is_url, rest = tier.options.partition("://")
    if not is_url or "ttl_s=" in rest:
        return tier.options
    return f"{tier.options}{'&' if '?' in rest else '?'}ttl_s={_TTL_S}"


def _write_and_read(tier: StorageTier, keys: list[bytes], stop: threading.Event) -> tuple[float, float, int]:
    """Bytes per second of writes and of reads, and how many records came back wrong.

    A record is read and deleted once the next one is written, so that one is told from the other.
    """
    total = _RECORD_NBYTES * len(keys)
    # Not closed: the traceback of an error may have views, and closing would replace it with another error.
    given, found = mmap.mmap(-1, total), mmap.mmap(-1, total)
    given[:] = os.urandom(total)
    source, target = memoryview(given).toreadonly(), memoryview(found)
    places = [slice(i * _RECORD_NBYTES, (i + 1) * _RECORD_NBYTES) for i in range(len(keys))]
    write_s = read_s = 0.0
    wrong = 0
    for i in range(len(keys) + _MAX_STORED - 1):
        if stop.is_set():
            raise _StoppedError
        if i < len(keys):
            start_s = time.perf_counter()
            tier.write(keys[i], source[places[i]])
            write_s += time.perf_counter() - start_s
        if (done := i - _MAX_STORED + 1) >= 0:
            start_s = time.perf_counter()
            _read(tier, keys[done], target[places[done]])
            read_s += time.perf_counter() - start_s
            wrong += source[places[done]] != target[places[done]]
            tier.delete([keys[done]])
    return total / write_s, total / read_s, wrong


def _read(tier: StorageTier, key: bytes, record: memoryview) -> None:
    try:
        tier.read(key, record)
    except KeyError as e:
        raise OffloadError(
            f"a record of {_RECORD_NBYTES >> 20} MiB was written and is missing: it has no room for what engines store "
            "(a server: raise maxmemory), or somebody else deletes it"
        ) from e


@contextlib.contextmanager
def _folders_removed(tier: StorageTierConfig, worker_id: int) -> Iterator[None]:
    """Removes the folder of a file tier's worker, and directories that are new."""
    try:
        directory = _directory_of(tier)
    except (ConfigError, ValueError):  # the tier will say so
        directory = None
    if directory is None:
        yield
        return
    # Unlike `Path.exists`, this never raises.
    missing = [path for path in (directory, *directory.parents) if not os.path.exists(path)]
    try:
        yield
    finally:
        if tier.name == "file":
            shutil.rmtree(directory / f"worker-{worker_id}", ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def _directory_of(tier: StorageTierConfig) -> Path | None:
    """Where a tier has its files; None if it has none."""
    if tier.name == "file":
        from tpu_offload.storage.file import FileOptions

        return Path(FileOptions.parse(tier.options).directory)
    if tier.name == "object" and tier.options.startswith("file:///"):
        return Path(unquote(urlsplit(tier.options).path))
    return None
