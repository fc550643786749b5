"""The lock on a worker's directory of the `file` tier: one process uses it at a time."""

import fcntl
import os
import time

from tpu_offload.config import ENV_PREFIX
from tpu_offload.errors import ConfigError

LOCK_NAME = "lock"
_LOCK_AGAIN_S = 0.05


def lock(path: str) -> int:
    """Locks a worker's directory until `unlock`, or until the process has ended.

    A process that was forked from this one, as vLLM's schedulers of data-parallel ranks are, does not hold the lock.

    Returns:
      The descriptor of the file.
    Raises:
      ConfigError: another process has locked it.
      OSError: the file cannot be written.
    """
    fd = os.open(os.path.join(path, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        is_ours = any(os.path.sameopenfile(fd, other) for other in _locks)  # by another path, or of another tier
        os.close(fd)
        by = "this process already" if is_ours else f"another process{f' ({user})' if user else ''}"
        raise ConfigError(
            f"{ENV_PREFIX}STORAGE_OPTIONS: {path} is used by {by}; give each engine and tier a directory of its own"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    _locks.add(fd)
    return fd


def unlock(fd: int) -> None:
    """Releases the lock whose descriptor `lock` has returned; does nothing in a process that does not hold it."""
    if fd in _locks:
        _locks.remove(fd)
        os.close(fd)


_locks: set[int] = set()  # descriptors of the locks of this process


def _close_locks() -> None:
    """In a process that was just forked: `flock` locks are of all processes that have the file open."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_close_locks)
