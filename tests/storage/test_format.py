"""Format v1: it cannot change by accident, and nothing but the very record that was written is used."""

import dataclasses
import struct

import pytest
import xxhash

from tests.interpreter_lock import releases_lock
from tests.storage.conformance import FORMAT, key_of, new_record, payload
from tpu_offload.errors import TransferError
from tpu_offload.storage import RecordFormat
from tpu_offload.storage.format import MAX_KEY_NBYTES, RecordError, read_header

# A record of version 1, as it has to be read for ever. The rest of its 8,192 bytes are zeros.
GOLDEN_FORMAT = RecordFormat(fingerprint=bytes(range(16)), worker_id=3, num_shards=8, payload_nbytes=10)
GOLDEN_KEY, GOLDEN_GENERATION, GOLDEN_PAYLOAD = b"a chunk of 16 tokens", 2**63 + 5, bytes(range(240, 250))
GOLDEN = {
    0: "895450554b560d0a 0100 0010 00000000 0500000000000080 000102030405060708090a0b0c0d0e0f 0300 0800 1400 0000",
    48: "0a00000000000000",
    56: "3ac4d31c1af2fd8d613921e1b5d4cccb",
    72: GOLDEN_KEY.hex(),
    4088: "2e8a3932d077f794",
    4096: GOLDEN_PAYLOAD.hex(),
}


def golden():
    record = bytearray(8192)
    for start, text in GOLDEN.items():
        value = bytes.fromhex(text)
        record[start : start + len(value)] = value
    return memoryview(record)


KEY = key_of(1)


def sealed(key=KEY, *, seed=1, generation=5):
    record = new_record(0xEE)
    FORMAT.payload_of(record)[:] = payload(seed)
    FORMAT.seal(record, key, generation=generation)
    return record


def test_the_golden_record_is_written():
    record = memoryview(bytearray(b"\xee" * 8192))
    GOLDEN_FORMAT.payload_of(record)[:] = GOLDEN_PAYLOAD
    GOLDEN_FORMAT.seal(record, GOLDEN_KEY, generation=GOLDEN_GENERATION)
    assert GOLDEN_FORMAT.record_nbytes == len(record)
    for start, text in GOLDEN.items():
        value = bytes.fromhex(text)
        assert record[start : start + len(value)].hex() == value.hex(), start
    assert record == golden()


def test_the_golden_record_is_read():
    found = GOLDEN_FORMAT.verify(golden(), GOLDEN_KEY, generation=GOLDEN_GENERATION)
    assert bytes(found) == GOLDEN_PAYLOAD
    header = read_header(golden())
    assert (header.generation, header.fingerprint) == (GOLDEN_GENERATION, GOLDEN_FORMAT.fingerprint)
    assert (header.worker_id, header.num_shards, header.key) == (3, 8, GOLDEN_KEY)


def test_seal_and_verify():
    record = sealed()
    assert len(record) == FORMAT.record_nbytes
    assert FORMAT.verify(record, key_of(1), generation=5) == payload(1)
    for key in (b"k", b"k" * MAX_KEY_NBYTES, b"\0"):
        record = sealed(key)
        assert FORMAT.verify(record, key, generation=5) == payload(1)
        assert read_header(record).key == key


@pytest.mark.parametrize("key", [b"", b"k" * (MAX_KEY_NBYTES + 1)])
def test_a_key_that_does_not_fit_is_refused(key):
    with pytest.raises(TransferError, match="a key of"):
        sealed(key)


@pytest.mark.parametrize(
    "other",
    [
        {"fingerprint": b"g" * 16},
        {"worker_id": 0},
        {"num_shards": 1},
        {"payload_nbytes": FORMAT.payload_nbytes - 1},
        {"payload_nbytes": FORMAT.payload_nbytes + 1},
    ],
    ids=str,
)
def test_what_others_wrote_is_a_miss(other):
    (name,) = other
    with pytest.raises(RecordError, match=f"a record with {name}="):
        dataclasses.replace(FORMAT, **other).verify(sealed(), key_of(1), generation=5)


def test_another_key_or_generation_is_a_miss():
    for key in (key_of(2), key_of(1)[:-1], key_of(1) + b"\0"):
        with pytest.raises(RecordError, match="with key="):
            FORMAT.verify(sealed(), key, generation=5)
    with pytest.raises(RecordError, match=r"with generation=5; expected 6"):
        FORMAT.verify(sealed(), key_of(1), generation=6)


def with_header(offset, value):
    """A record whose header was changed by somebody who knows how to compute the checksum."""
    record = sealed()
    record[offset : offset + len(value)] = value
    record[4088:4096] = xxhash.xxh3_64_digest(record[:4088])
    return record


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_an_unknown_version_is_a_miss(version):
    with pytest.raises(RecordError, match=f"of version {version}, flags 0x0; expected 1, 0"):
        FORMAT.verify(with_header(8, struct.pack("<H", version)), key_of(1), generation=5)


def test_unknown_flags_and_other_bytes_are_a_miss():
    with pytest.raises(RecordError, match="flags 0x4"):
        FORMAT.verify(with_header(12, struct.pack("<I", 4)), key_of(1), generation=5)
    with pytest.raises(RecordError, match="not a record"):
        FORMAT.verify(with_header(0, b"\0"), key_of(1), generation=5)
    with pytest.raises(RecordError, match="not a record"):
        FORMAT.verify(new_record(), key_of(1), generation=5)


def test_a_record_that_is_short_or_torn_is_a_miss():
    record = sealed()
    for nbytes in (0, 100, 4095, 4096, 8192, len(record) - 4096):
        with pytest.raises(RecordError):
            FORMAT.verify(record[:nbytes], key_of(1), generation=5)
    for end in range(4096, len(record), 4096):  # the rest is of the record that was there before
        torn = sealed(seed=2)
        torn[:end] = record[:end]
        with pytest.raises(RecordError, match="damaged"):
            FORMAT.verify(torn, key_of(1), generation=5)


def test_every_bit_of_the_header_counts():
    record = sealed()
    for place in range(4096):
        record[place] ^= 1 << place % 8
        with pytest.raises(RecordError):
            FORMAT.verify(record, key_of(1), generation=5)
        record[place] ^= 1 << place % 8
    assert FORMAT.verify(record, key_of(1), generation=5) == payload(1)


def test_every_byte_of_the_payload_counts():
    record = sealed()
    for place in range(4096, 4096 + FORMAT.payload_nbytes, 3):
        record[place] ^= 1 << place % 8
        with pytest.raises(RecordError, match="payload is damaged"):
            FORMAT.verify(record, key_of(1), generation=5)
        record[place] ^= 1 << place % 8


def test_checksums_are_computed_without_the_interpreters_lock():
    """Or a chunk of 16 MiB would stop the thread that dispatches the model for a millisecond or two."""
    large = dataclasses.replace(FORMAT, payload_nbytes=2**24)
    record = memoryview(bytearray(large.record_nbytes))
    assert releases_lock(lambda: large.seal(record, KEY, generation=5))
    assert releases_lock(lambda: large.verify(record, KEY, generation=5))
    assert not releases_lock(lambda: sum(range(1000))), "the check sees a call that holds it"
