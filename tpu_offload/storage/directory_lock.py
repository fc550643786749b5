"""The locks of the `file` tier: one process uses a worker's directory, and one worker of all allocates at a time."""

import contextlib
import fcntl
import itertools
import logging
import os
import time
import weakref
from collections.abc import Iterator

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError
from tpu_offload.storage.descriptor import Descriptor

_logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_LOCK_AGAIN_S = 0.05
_ALLOCATION_WAIT_S = 300.0  # other workers allocate in less, unless the file system writes zeros for it


def lock(path: str) -> Descriptor:
    """Locks a worker's directory until what is returned is closed or garbage-collected, or until the process has ended.

    A process that was forked from this one, as vLLM's schedulers of data-parallel ranks are, does not hold the lock.

    Returns:
      The file, open.
    Raises:
      ConfigError: another process has locked it.
      OSError: the file cannot be written.
    """
    file = Descriptor(os.path.join(path, LOCK_NAME))
    fd = file.fd
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # `tpu-offload tier` takes it for an instant, to see whether it is held
            time.sleep(_LOCK_AGAIN_S)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}".encode(), 0)
    except BlockingIOError:
        user = os.pread(fd, 20, 0).decode(errors="replace").strip()
        is_ours = any(_is_same(fd, other.fd) for other in list(_locks))  # by another path, or of another tier
        file.close()
        by = "this process already" if is_ours else f"another process{f' ({user})' if user else ''}"
        raise ConfigError(
            f"{ENV_PREFIX}STORAGE_OPTIONS: {path} is used by {by}; give each engine and tier a directory of its own"
        ) from None
    except BaseException:
        file.close()
        raise
    _locks.add(file)
    return file


def _is_same(fd: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(fd, other)
    except OSError:  # it has been closed
        return False


@contextlib.contextmanager
def allocating(directory: str) -> Iterator[None]:
    """Waits until no other worker allocates files in a directory, and has the others wait meanwhile.

    The directory itself is locked, so nothing is left there. If that cannot be done, or takes too long, it goes on
    with a warning.
    """
    with contextlib.ExitStack() as held:
        try:  # others may have made the directory, and given it to themselves
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            held.callback(os.close, fd)
            _wait_for(fd)
            held.callback(fcntl.flock, fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open
        except OSError as e:
            _warn_unlocked(directory, e)
        yield


def _wait_for(fd: int) -> None:
    """Locks it.

    Raises:
      OSError: it cannot be locked, or another process still has it after `_ALLOCATION_WAIT_S`.
    """
    until_s = time.monotonic() + _ALLOCATION_WAIT_S
    for i in itertools.count():
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise TimeoutError(f"another worker has been allocating for {_ALLOCATION_WAIT_S:g} s") from None
            if i == 0:
                _logger.info("storage: waiting for another worker of this host, which allocates its files")
        time.sleep(_LOCK_AGAIN_S)


def _warn_unlocked(directory: str, error: OSError) -> None:
    _logger.warning(
        "%s cannot be locked while files are allocated (%s): if other workers start meanwhile, less than min_free_gb "
        "may stay free",
        directory,
        error,
    )


_locks: weakref.WeakSet[Descriptor] = weakref.WeakSet()  # of this process, some of them closed


def _close_locks() -> None:
    """In a process that was just forked: `flock` locks are of all processes that have the file open."""
    for file in list(_locks):
        file.close()


os.register_at_fork(after_in_child=_close_locks)
