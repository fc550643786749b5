"""How a tier is found by its name, and the conformance suite: the tier of the tests passes, broken ones do not."""

from collections.abc import Sequence

import pytest

from tests.storage.conformance import CHECKS, NUM_CHUNKS, SPEC
from tests.storage.memory_tier import FAULTY, NAME, FaultyTier, MemoryTier
from tpu_offload.errors import ConfigError
from tpu_offload.storage import STORAGE_TIERS, StorageSpec, StorageTier, make_tier


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("tier", [MemoryTier, FaultyTier])
def test_conformance(tier, check):
    check(tier)


class Aliasing(MemoryTier):
    def write(self, key: bytes, record: memoryview) -> None:
        self.values[key] = record  # type: ignore[assignment]


class ShortKeys(MemoryTier):
    def write(self, key: bytes, record: memoryview) -> None:
        super().write(key[:-1], record)

    def read(self, key: bytes, record: memoryview) -> None:
        super().read(key[:-1], record)


class Stubborn(MemoryTier):
    def write(self, key: bytes, record: memoryview) -> None:
        if key not in self.values:
            super().write(key, record)


class Silent(MemoryTier):
    def read(self, key: bytes, record: memoryview) -> None:
        if key in self.values:
            super().read(key, record)


class Strict(MemoryTier):
    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.values[key]


class Leaking(MemoryTier):
    """Has room for so many, and gets none back."""

    num_written = 0

    def write(self, key: bytes, record: memoryview) -> None:
        self.num_written += key not in self.values
        if self.num_written > 2 * NUM_CHUNKS:
            raise OSError("no room")
        super().write(key, record)


class Uncleared(MemoryTier):
    def clear(self) -> None:
        pass


class Persistent(MemoryTier):
    """Keeps its values, as the spec's worker left them; a fresh store for each check."""

    store: dict[bytes, bytes]

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.values = self.store

    def stored_keys(self) -> Sequence[bytes]:
        return list(self.values)

    def close(self) -> None:
        pass


class OfOtherModels(Persistent):
    """Lists what was written under any fingerprint, and does not move a key that is written again to the end."""


class ClearedForNow(Persistent):
    """Reads what is left of an earlier run once more after a restart."""

    def clear(self) -> None:
        self.values = {}


@pytest.mark.parametrize(
    "tier", [Aliasing, ShortKeys, Stubborn, Silent, Strict, Leaking, Uncleared, OfOtherModels, ClearedForNow]
)
def test_the_suite_finds_what_is_wrong(tier):
    failed = []
    for check in CHECKS:
        if issubclass(tier, Persistent):
            tier.store = {}
        try:
            check(tier)
        except BaseException as e:  # pytest's failures are no Exceptions
            failed.append((check.__name__, e))
    assert failed


def test_a_registered_name_and_a_class_of_ones_own(monkeypatch):
    assert type(make_tier(NAME, SPEC)) is MemoryTier
    assert make_tier(FAULTY, SPEC).spec == SPEC
    monkeypatch.setitem(STORAGE_TIERS, "memory", NAME)
    assert type(make_tier("memory", SPEC)) is MemoryTier


class Refusing(MemoryTier):
    def __init__(self, spec: StorageSpec) -> None:
        raise ConfigError("TPU_OFFLOAD_STORAGE_OPTIONS is empty; expected a directory")


class Broken(MemoryTier):
    def __init__(self, spec: StorageSpec) -> None:
        raise OSError("disk is full")


class Unfinished(StorageTier):
    """Implements nothing."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory", "TPU_OFFLOAD_STORAGE_TIER=memory: there is no storage tier of this name; expected one of file"),
        ("no_such_module:Tier", "no_such_module cannot be imported .ModuleNotFoundError"),
        (f"{__name__}:Missing", "Missing in .* is None; expected a class derived from"),
        (f"{__name__}:CHECKS", r"CHECKS in .* is \[.*; expected a class derived from"),
        (f"{__name__}:Broken", "cannot be made .OSError: disk is full"),
        (f"{__name__}:Unfinished", "cannot be made .TypeError: Can't instantiate abstract class"),
        (f"{__name__}:Refusing", "^TPU_OFFLOAD_STORAGE_OPTIONS is empty; expected a directory$"),
        (":", "cannot be imported"),
    ],
)
def test_a_bad_name_is_one_clear_line(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_tier(name, SPEC)
    assert "\n" not in str(caught.value)


def test_the_error_lists_the_registered_names(monkeypatch):
    monkeypatch.setitem(STORAGE_TIERS, "memory", NAME)
    with pytest.raises(ConfigError, match="expected one of file, object, valkey, memory, or module:Class"):
        make_tier("memroy", SPEC)
