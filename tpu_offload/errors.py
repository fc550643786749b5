"""The exceptions of the library. Every message says what, got, expected and what to do, in one line."""


class OffloadError(Exception):
    """Base of every error that the library raises on purpose."""


class ConfigError(OffloadError, ValueError):
    """A setting does not parse, is out of range, is unknown or contradicts another."""


class LayoutError(OffloadError, ValueError):
    """The KV cache arrays cannot be described, or are not the ones described before."""


class StagingError(OffloadError):
    """A staging reservation or release breaks the accounts; they stay as they were."""


class RequestError(OffloadError, ValueError):
    """An engine event does not fit the state of its request; nothing was changed."""


class InputError(OffloadError, ValueError):
    """A file, a flag or a line of input that a person gave cannot be used."""


class TransferError(OffloadError):
    """A copy between device and host failed; it becomes a failed job, not a crash."""


class CompileError(OffloadError):
    """The compiler refused a copy program, or the program takes more HBM than copies may."""


class CachesLostError(TransferError):
    """A load failed and took the KV caches with it; the engine makes new ones and computes what they held again."""
