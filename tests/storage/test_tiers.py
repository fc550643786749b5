"""How a tier is found by its name, and the conformance suite: the tier of the tests passes, broken ones do not."""

import dataclasses
import math
import random
from collections.abc import Sequence

import pytest

from tests.storage.conformance import CHECKS, NUM_CHUNKS, SHARED_CHECKS, SPEC
from tests.storage.memory_tier import FAULTY, NAME, FaultyTier, MemoryTier, SharedTier
from tpu_offload.errors import ConfigError
from tpu_offload.storage import STORAGE_TIERS, RegisteredTier, StorageSpec, StorageTier, make_tier
from tpu_offload.storage.prefix_search import count_leading


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("tier", [MemoryTier, FaultyTier])
def test_conformance(tier, check):
    check(tier)


@pytest.mark.parametrize("check", CHECKS + SHARED_CHECKS)
def test_conformance_of_a_shared_tier(check, monkeypatch):
    monkeypatch.setattr(SharedTier, "servers", {})
    check(SharedTier)


class Forgetful(SharedTier):
    """Finds only what it has written itself."""

    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(spec)
        self.own: set[bytes] = set()

    def write(self, key: bytes, record: memoryview) -> None:
        super().write(key, record)
        self.own.add(key)

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        return [next((i for i, k in enumerate(p) if k not in self.own), len(p)) for p in prefixes]


class Jumping(SharedTier):
    """Skips what is missing."""

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        return [sum(key in self.values for key in prefix) for prefix in prefixes]


class Hasty(SharedTier):
    """Bisects, as if all before a stored key were stored."""

    def find(self, prefixes: Sequence[Sequence[bytes]]) -> Sequence[int]:
        return [max((i for i, k in enumerate(p, 1) if k in self.values), default=0) for p in prefixes]


class OfAnyModel(SharedTier):
    def __init__(self, spec: StorageSpec) -> None:
        super().__init__(dataclasses.replace(spec, fingerprint="0f" * 16))


@pytest.mark.parametrize("tier", [Forgetful, Jumping, Hasty, OfAnyModel])
def test_the_suite_finds_what_is_wrong_with_look_ups(tier, monkeypatch):
    failed = []
    for check in SHARED_CHECKS:
        monkeypatch.setattr(SharedTier, "servers", {})
        try:
            check(tier)
        except AssertionError as e:
            failed.append((check.__name__, e))
    assert failed


class WithoutFind(MemoryTier):
    is_shared = True


def test_a_shared_tier_needs_look_ups():
    with pytest.raises(ConfigError, match=r"WithoutFind in .* has is_shared=True and no find\(\); it needs one"):
        make_tier(f"{__name__}:WithoutFind", SPEC)


def random_server(seed):
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, 15, 16, 17, 255, 256, 257, 4000]) for _ in range(rng.randint(1, 5))]
    prefixes = [[b"%d %d" % (number, i) for i in range(length)] for number, length in enumerate(lengths)]
    stored = {key for prefix in prefixes for key in prefix[: rng.randint(0, len(prefix))]}
    holes = [key for key in sorted(stored) if rng.random() < rng.choice([0.0, 0.001, 0.5])]
    return prefixes, stored.difference(holes)


@pytest.mark.parametrize("seed", range(40))
def test_leading_keys_are_counted_in_few_round_trips(seed):
    prefixes, stored = random_server(seed)
    trips = []

    def count(groups):
        trips.append(sum(map(len, groups)))
        return [sum(key in stored for key in group) for group in groups]

    found = count_leading(prefixes, count)
    assert found == [next((i for i, k in enumerate(p) if k not in stored), len(p)) for p in prefixes]
    longest = max(map(len, prefixes))
    assert len(trips) <= 2 + math.log(max(longest, 1), 16)
    assert sum(trips) <= sum(1.2 * len(p) + len(p).bit_length() + 3 for p in prefixes)
    if all(n == len(p) for n, p in zip(found, prefixes, strict=True)):
        assert len(trips) <= 2


def test_of_an_unknown_prefix_a_dozen_keys_are_sent():
    trips = []

    def count(groups):
        trips.append(sum(map(len, groups)))
        return [0] * len(groups)

    assert count_leading([[b"%d" % i for i in range(4000)]], count) == [0]
    assert trips == [13]


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
    monkeypatch.setitem(STORAGE_TIERS, "memory", RegisteredTier(NAME))
    assert type(make_tier("memory", SPEC)) is MemoryTier


class Refusing(MemoryTier):
    def __init__(self, spec: StorageSpec) -> None:
        raise ConfigError("TPU_OFFLOAD_STORAGE_OPTIONS is empty; expected a directory")


class Broken(MemoryTier):
    def __init__(self, spec: StorageSpec) -> None:
        raise OSError("disk is full")


class Exiting(MemoryTier):
    def __init__(self, spec: StorageSpec) -> None:
        raise SystemExit(3)


class Unfinished(StorageTier):
    """Implements nothing."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory", "TPU_OFFLOAD_STORAGE_TIER=memory: there is no storage tier of this name; expected one of file"),
        ("file,valkey", "expected one of file, .*module:Class; several are separated by `;`$"),
        ("no_such_module:Tier", "no_such_module cannot be imported .ModuleNotFoundError"),
        (f"{__name__}:Missing", "Missing in .* is None; expected a class derived from"),
        (f"{__name__}:CHECKS", r"CHECKS in .* is \[.*; expected a class derived from"),
        (f"{__name__}:Broken", "cannot be made .OSError: disk is full"),
        (f"{__name__}:Exiting", "cannot be made .SystemExit: SystemExit.3"),
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
    monkeypatch.setitem(STORAGE_TIERS, "memory", RegisteredTier(NAME))
    assert list(STORAGE_TIERS)[-1] == "memory"
    with pytest.raises(ConfigError, match=f"expected one of {', '.join(STORAGE_TIERS)}, or module:Class"):
        make_tier("memroy", SPEC)
