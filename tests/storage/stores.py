"""Stores with known records, as engines leave them in a directory, a bucket or a server; and what tools find there."""

import dataclasses
from collections.abc import Sequence

from tests.storage.conformance import FORMAT, SPEC, key_of, new_record, payload, read
from tpu_offload.storage import StorageTier, StoreInspector, Survey, Verdict, Verification, make_tier, tier_of

FINGERPRINTS = FORMAT.fingerprint.hex(), "0e" * 16


def short_key(i: int) -> bytes:
    """A key of the length of those of chunks."""
    return key_of(2 * i + 1)[:24]


def open_tier(options: str, *, fingerprint: str = FINGERPRINTS[0], worker_id: int = 1) -> StorageTier:
    """An engine's tier, started."""
    name = tier_of(options)
    options += ",min_free_gb=0" if name == "file" else ""
    spec = dataclasses.replace(SPEC, options=options, fingerprint=fingerprint, worker_id=worker_id)
    tier = make_tier(name, spec)
    tier.stored_keys()
    return tier


def put(tier: StorageTier, key: bytes, seed: int) -> None:
    """Writes a chunk as the tier's own worker does."""
    record = new_record()
    of = dataclasses.replace(FORMAT, fingerprint=bytes.fromhex(tier.spec.fingerprint), worker_id=tier.spec.worker_id)
    of.payload_of(record)[:] = payload(seed)
    of.seal(record, key, generation=tier.generation)
    tier.write(key, record.toreadonly())


def fill(options: str, num: int, *, fingerprint: str = FINGERPRINTS[0], worker_id: int = 1) -> None:
    """An engine stores some chunks and ends."""
    tier = open_tier(options, fingerprint=fingerprint, worker_id=worker_id)
    for i in range(num):
        put(tier, short_key(i), i)
    tier.close()


def finds_nothing(options: str, num: int, **changes: object) -> bool:
    """Whether an engine that starts there neither lists nor reads any of the chunks."""
    tier = open_tier(options, **changes)  # type: ignore[arg-type]
    try:
        return not tier.stored_keys() and not any(_has(tier, short_key(i)) for i in range(num))
    finally:
        tier.close()


def _has(tier: StorageTier, key: bytes) -> bool:
    try:
        read(tier, key)
    except (KeyError, OSError):
        return False
    return True


def survey(inspector: StoreInspector) -> Survey:
    """What a scan finds."""
    found = Survey()
    found.count(inspector.scan())
    return found


def holdings(inspector: StoreInspector) -> Sequence[tuple[str, int, bool, int]]:
    """Fingerprint, worker, whether it is the current one, and number of records, of each generation."""
    return sorted(
        (of.fingerprint, of.worker_id, of.is_current, holding.num_records)
        for of, holding in survey(inspector).holdings.items()
    )


def num_current(inspector: StoreInspector) -> int:
    """The records of current generations: what an engine that starts there may find."""
    return sum(num for _, _, is_current, num in holdings(inspector) if is_current)


def verdicts(inspector: StoreInspector, *, headers_only: bool = False) -> dict[Verdict, int]:
    """The verdicts that there are, and of how many records."""
    verification = Verification(inspector, headers_only=headers_only)
    verification.run(Survey().records(inspector.scan()), on_record=lambda: None, stops=lambda: False)
    return {verdict: num for verdict, num in verification.counts.items() if num}
