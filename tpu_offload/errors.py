"""The library's exceptions. A message is one line: what is wrong, the value, what was expected, what to do."""


class OffloadError(Exception):
    """Base of all errors that the library raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting does not parse, is out of range, is unknown or contradicts another."""


class LayoutError(OffloadError, ValueError):
    """The KV cache arrays are not supported, or differ from those described before."""


class StagingError(OffloadError):
    """An invalid staging reservation or release; the budget is unchanged."""


class RequestError(OffloadError, ValueError):
    """An engine call does not fit the state of its request; nothing was changed."""


class InputError(OffloadError, ValueError):
    """A user's file, flag or line of input cannot be used."""


class TransferError(OffloadError):
    """A copy between device and host failed; it becomes a failed job, not a crash."""


class CompileError(OffloadError):
    """The compiler rejected a copy program, or the program exceeds its HBM bound."""


class CachesLostError(TransferError):
    """A failed load destroyed the KV caches; the engine must make new ones and recompute what they held."""


MORE_THREADS = "allow this process more of them (ulimit -u, or pids.max of its cgroup)"
"""What to do about "can't start new thread", for messages."""
