"""The names of an `object` tier's objects."""

import re
import secrets

MARKER = "generation"
GENERATION = re.compile(r"[0-9a-f]{16}")
_MAX_PART = 200  # characters between slashes: file systems allow 255
_SUFFIX = ".kv"  # so that no object of a long key is below one of a shorter key


def new_generation() -> str:
    """The name of a generation that was never used before."""
    return secrets.token_hex(8)


def new_probe() -> str:
    """The name of an object that a start writes and deletes. The next start deletes what a killed one has left."""
    return f"probe-{secrets.token_hex(8)}"


def name_of(key: bytes) -> str:
    """The name of a key's object, below its generation."""
    digits = key.hex()
    rest = digits[2:] + _SUFFIX
    return "/".join((digits[:2], *(rest[i : i + _MAX_PART] for i in range(0, len(rest), _MAX_PART))))


def key_of(name: str) -> bytes | None:
    """The key of a name; None if it is none of ours."""
    try:
        key = bytes.fromhex(name.replace("/", "").removesuffix(_SUFFIX))
    except ValueError:
        return None
    return key if name_of(key) == name else None
