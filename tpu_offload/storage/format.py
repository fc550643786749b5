"""Format v1 of a stored chunk: a header page, and the payload padded to whole pages. The same bytes in every tier.

    offset  bytes  field (little-endian)
         0      8  magic
         8      2  version, 1
        10      2  length of the header, 4096
        12      4  flags, 0
        16      8  generation of the tier at the time of writing
        24     16  fingerprint of everything that the bytes depend on
        40      2  worker that wrote it: each has its own shards of the chunk, under the same key
        42      2  number of shards in the payload, one for each of the worker's devices
        44      2  length of the key
        46      2  0
        48      8  length of the payload
        56     16  xxh3_128 of the payload, canonical (big-endian)
        72    256  key, then zeros
       328   3760  0
      4088      8  xxh3_64 of the 4088 bytes before, canonical

A record is used only if every field is the expected one and both checksums are right. So bytes of another version,
model, key, worker or generation are a miss, and so are torn, short and damaged ones. The checksums find damage, not
forgery: who can write to a tier is trusted.

References:
  xxHash, https://github.com/Cyan4973/xxHash
"""

import dataclasses
import struct
from typing import final

import xxhash

from tpu_offload.errors import TransferError

PAGE_NBYTES = 4096
"""Alignment of records, in memory and on disk, and length of the header."""
MAX_KEY_NBYTES = 256
FINGERPRINT_NBYTES = 16
VERSION = 1
MAGIC = b"\x89TPUKV\r\n"

_FIELDS = struct.Struct(f"<8sHHIQ{FINGERPRINT_NBYTES}sHHHHQ16s{MAX_KEY_NBYTES}s")
_CHECKED_NBYTES = PAGE_NBYTES - 8


class RecordError(TransferError):
    """A record that was read cannot be used."""


class UnknownVersionError(RecordError):
    """A record of another version of the format."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a record, as read and found undamaged.

    Attributes:
      generation: of the tier at the time of writing.
      fingerprint: 16 bytes.
      worker_id: the worker that wrote it.
      num_shards: shards in the payload.
      key: the chunk's key.
      payload_nbytes: length of the payload.
      checksum: xxh3_128 of the payload.
    """

    generation: int
    fingerprint: bytes
    worker_id: int
    num_shards: int
    key: bytes
    payload_nbytes: int
    checksum: bytes


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """Seals and verifies the records of one worker.

    Attributes:
      fingerprint: 16 bytes; of everything that the bytes depend on.
      worker_id: the worker.
      num_shards: shards in every payload.
      payload_nbytes: length of every payload.
    """

    fingerprint: bytes
    worker_id: int
    num_shards: int
    payload_nbytes: int

    @property
    def record_nbytes(self) -> int:
        """Header and payload, in whole pages."""
        return _record_nbytes(self.payload_nbytes)

    def payload_of(self, record: memoryview) -> memoryview:
        """The payload's place in a record of `record_nbytes` bytes."""
        return record[PAGE_NBYTES : PAGE_NBYTES + self.payload_nbytes]

    def seal(self, record: memoryview, key: bytes, *, generation: int) -> None:
        """Writes header and padding around the payload.

        Args:
          record: `record_nbytes` bytes, with the payload at `payload_of`.
          key: 1 to `MAX_KEY_NBYTES` bytes.
          generation: the tier's.
        Raises:
          TransferError: the key is too long.
        """
        if not 0 < len(key) <= MAX_KEY_NBYTES:
            raise TransferError(f"a key of {len(key)} bytes; expected 1 to {MAX_KEY_NBYTES}")
        payload = self.payload_of(record)
        record[:PAGE_NBYTES] = bytes(PAGE_NBYTES)
        _FIELDS.pack_into(
            record, 0, MAGIC, VERSION, PAGE_NBYTES, 0, generation, self.fingerprint, self.worker_id, self.num_shards,
            len(key), 0, self.payload_nbytes, checksum_of(payload), key,
        )  # fmt: skip
        record[_CHECKED_NBYTES:PAGE_NBYTES] = xxhash.xxh3_64_digest(record[:_CHECKED_NBYTES])
        end = PAGE_NBYTES + self.payload_nbytes
        record[end:] = bytes(len(record) - end)

    def verify(self, record: memoryview, key: bytes, *, generation: int) -> memoryview:
        """Checks a record that was read.

        Args:
          record: `record_nbytes` bytes.
          key: the key that it was read for.
          generation: the tier's.
        Returns:
          Its payload, in place.
        Raises:
          RecordError: the record was not written by this format, model, worker and generation for this key, or is
            damaged.
        """
        header = read_header(record)
        expected = {
            "fingerprint": self.fingerprint,
            "worker_id": self.worker_id,
            "num_shards": self.num_shards,
            "key": key,
            "payload_nbytes": self.payload_nbytes,
            "generation": generation,
        }
        for name, value in expected.items():
            if (found := getattr(header, name)) != value:
                raise RecordError(f"storage returned a record with {name}={_text(found)}; expected {_text(value)}")
        payload = self.payload_of(record)
        if len(payload) != self.payload_nbytes or checksum_of(payload) != header.checksum:
            raise RecordError("storage returned a record whose payload is damaged or incomplete")
        return payload


def _record_nbytes(payload_nbytes: int) -> int:
    return PAGE_NBYTES + -(-payload_nbytes // PAGE_NBYTES) * PAGE_NBYTES


def checksum_of(payload: memoryview) -> bytes:
    """xxh3_128 of a payload, computed without the interpreter's lock, which the one-shot functions of xxhash 3 hold."""
    state = xxhash.xxh3_128()
    state.update(payload)
    return state.digest()


def read_header(record: memoryview) -> Header:
    """Reads the header at the beginning of a record.

    Raises:
      RecordError: it is no header of a version that is known, or it is damaged.
    """
    if len(record) < PAGE_NBYTES:
        raise RecordError(f"storage returned {len(record)} bytes; expected a header of {PAGE_NBYTES}")
    (
        magic, version, header_nbytes, flags, generation, fingerprint, worker_id, num_shards, key_nbytes, _,
        payload_nbytes, checksum, key,
    ) = _FIELDS.unpack_from(record)  # fmt: skip
    if magic != MAGIC:
        raise RecordError("storage returned bytes that are not a record")
    if (version, header_nbytes, flags) != (VERSION, PAGE_NBYTES, 0):
        raise UnknownVersionError(
            f"storage returned a record of version {version}, flags {flags:#x}; expected {VERSION}, 0"
        )
    if xxhash.xxh3_64_digest(record[:_CHECKED_NBYTES]) != bytes(record[_CHECKED_NBYTES:PAGE_NBYTES]):
        raise RecordError("storage returned a record whose header is damaged")
    return Header(
        generation=generation,
        fingerprint=fingerprint,
        worker_id=worker_id,
        num_shards=num_shards,
        key=key[:key_nbytes],
        payload_nbytes=payload_nbytes,
        checksum=checksum,
    )


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def check_record(record: memoryview) -> Header:
    """Reads a record of any model and key, and checks all of it: what can be said without knowing what was asked for.

    Args:
      record: all of its bytes, and no more.
    Raises:
      UnknownVersionError: it is of another version.
      RecordError: header or payload is damaged, or the length is not the record's.
    """
    header = read_header(record)
    expected_nbytes = _record_nbytes(header.payload_nbytes)
    if len(record) != expected_nbytes:
        raise RecordError(f"storage returned {len(record)} bytes; expected a record of {expected_nbytes}")
    if checksum_of(record[PAGE_NBYTES : PAGE_NBYTES + header.payload_nbytes]) != header.checksum:
        raise RecordError("storage returned a record whose payload is damaged or incomplete")
    return header
