"""The storage tiers below the host tier, nearest first, as the settings describe them.

Each setting of a tier is a list with one value for each tier. How a chunk becomes bytes in a tier is known here as far
as sizes need it: a size in GB is converted to chunks with what one worker stores of a chunk.
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, final
from urllib.parse import parse_qsl, urlsplit

from tpu_offload.config.choices import StorageAdmission, StorageEvictionPolicy, StorageWriteEvent
from tpu_offload.config.environment import env_name
from tpu_offload.config.registered_tiers import STORAGE_TIERS, tier_of_scheme
from tpu_offload.errors import ConfigError
from tpu_offload.layout import KVLayout
from tpu_offload.values import one_line

SEPARATOR = ";"
STORAGE_SIZES = ("num_storage_chunks", "storage_gb")
_GB = 2**30
_MAX_CHUNKS = 2**31 - 1
_PAGE_NBYTES = 4096  # of records (`storage.format`): a header, and the payload in whole pages
# What else of a size in GB any tier may take: a little for each record, as for an index, some pages to begin with, and
# a share for what a file system needs to find the records.
_INDEX_NBYTES, _SPARE_NBYTES, _SPARE_SHARE = 64, 4 * _PAGE_NBYTES, 2**-16


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageTierConfig:
    """The settings of one storage tier.

    Attributes:
      tier_id: its place, from 0, the nearest to the host tier.
      name: a registered name, or `module:Class`.
      options: for the tier to interpret.
      num_chunks: its size in records of a chunk, for each data-parallel rank; None if it is given in GB.
      size_gb: its size in GB of 2**30 bytes for each worker, all of its ranks together; None if it is given in records.
      write_on: when chunks are written to it.
      admission: which chunks it takes.
      eviction_policy: which chunks it evicts, where it is private and the model has full attention only.
      max_gb_in_flight: host memory for records on their way to and from it.
    """

    tier_id: int
    name: str
    options: str
    num_chunks: int | None
    size_gb: float | None
    write_on: StorageWriteEvent
    admission: StorageAdmission
    eviction_policy: StorageEvictionPolicy
    max_gb_in_flight: float

    @property
    def label(self) -> str:
        """Its place and its name, for log lines and metrics: `0:file`."""
        return f"{self.tier_id}:{self.name}"

    def size_in_chunks(self, layout: KVLayout, *, blocks_per_chunk: int) -> int:
        """Most records in it, of each data-parallel rank: a chunk takes one, a state `records_per_state`.

        With pipeline stages, as many as fit on the worker that stores most of a chunk.

        Raises:
          ConfigError: not even one chunk fits.
        """
        if self.size_gb is None:
            assert self.num_chunks is not None, "a tier without a size"
            return self.num_chunks
        payload_nbytes = layout.block_nbytes_per_host // layout.num_ranks * blocks_per_chunk
        chunk_nbytes = _PAGE_NBYTES + -(-payload_nbytes // _PAGE_NBYTES) * _PAGE_NBYTES + _INDEX_NBYTES
        nbytes = int(self.size_gb * _GB / layout.num_ranks * (1 - _SPARE_SHARE)) - _SPARE_NBYTES
        if nbytes < chunk_nbytes:
            least = layout.num_ranks * (chunk_nbytes + _SPARE_NBYTES) / _GB * (1 + 2 * _SPARE_SHARE)
            holder = "worker" if layout.num_ranks == 1 else f"of {layout.num_ranks} data-parallel ranks"
            raise ConfigError(
                f"{env_name('storage_gb')}={self.size_gb:g} for {one_line(self.name)} is less than one chunk of "
                f"{chunk_nbytes} bytes on each {holder}; set it to at least {least:.3g}"
            )
        return min(nbytes // chunk_nbytes, _MAX_CHUNKS)

    def max_chunks_in_flight(self, layout: KVLayout, *, blocks_per_chunk: int) -> int:
        """Most records on their way to and from it together, at least those of one chunk or state each way.

        Of each data-parallel rank: `max_gb_in_flight` is for all of them.
        """
        least = 2 * max(1, records_per_state(layout, blocks_per_chunk=blocks_per_chunk))
        return max(least, int(self.max_gb_in_flight * _GB) // (layout.block_nbytes_per_host * blocks_per_chunk))


def records_per_state(layout: KVLayout, *, blocks_per_chunk: int) -> int:
    """Records that a state takes in storage, each as long as that of a chunk; 0 for a layout without states."""
    if layout.state_group is None:
        return 0
    row_nbytes = layout.group_nbytes_per_host(layout.state_group)
    return -(-row_nbytes // (layout.block_nbytes_per_host * blocks_per_chunk))


def split_per_tier(value: Any) -> Any:
    """The values of a setting for each tier: of a text its parts, else the value as the only one."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(SEPARATOR)] if value.strip() else ()
    return value if isinstance(value, (list, tuple)) else (value,)


def make_storage_tiers(
    *,
    names: Sequence[str],
    options: Sequence[str],
    num_chunks: Sequence[int],
    sizes_gb: Sequence[float],
    write_on: Sequence[StorageWriteEvent],
    admission: Sequence[StorageAdmission],
    eviction_policy: Sequence[StorageEvictionPolicy],
    max_gb_in_flight: Sequence[float],
) -> tuple[StorageTierConfig, ...]:
    """The tiers, from the values of their settings; none without names.

    Raises:
      ConfigError: a number of values does not match the number of tiers, a tier has no name or no size or two, or two
        would use one place.
    """
    if not names:
        return ()
    if not all(names):
        raise ConfigError(
            f"{env_name('storage_tier')}={SEPARATOR.join(names)} has an empty name; expected names separated by "
            f"{SEPARATOR!r}, such as file{SEPARATOR}valkey"
        )
    if num_chunks and sizes_gb:
        raise ConfigError(
            f"{env_name('num_storage_chunks')}={_joined(num_chunks)} and {env_name('storage_gb')}={_joined(sizes_gb)} "
            "set the same size; set only one of them"
        )
    if not num_chunks and not sizes_gb:
        raise ConfigError(
            f"{env_name('storage_tier')}={one_line(_joined(names))} needs a size; set {env_name('storage_gb')}, or "
            f"{env_name('num_storage_chunks')} to at least 1"
        )
    num = len(names)
    columns = zip(
        names,
        _for_each("storage_options", options or ("",) * num, num),
        _for_each("num_storage_chunks", num_chunks or (None,) * num, num),
        _for_each("storage_gb", sizes_gb or (None,) * num, num),
        _for_each("storage_write_on", write_on, num, may_be_one=True),
        _for_each("storage_admission", admission, num, may_be_one=True),
        _for_each("storage_eviction_policy", eviction_policy, num, may_be_one=True),
        _for_each("max_storage_gb_in_flight", max_gb_in_flight, num, may_be_one=True),
        strict=True,
    )
    tiers = tuple(
        StorageTierConfig(
            tier_id=tier_id,
            name=name,
            options=text,
            num_chunks=chunks,
            size_gb=size_gb,
            write_on=event,
            admission=admitted,
            eviction_policy=policy,
            max_gb_in_flight=in_flight,
        )
        for tier_id, (name, text, chunks, size_gb, event, admitted, policy, in_flight) in enumerate(columns)
    )
    _check_places(tiers)
    return tiers


def _for_each(field: str, values: Sequence[Any], num: int, *, may_be_one: bool = False) -> Sequence[Any]:
    """One value for each tier."""
    if may_be_one and len(values) == 1:
        return tuple(values) * num
    if len(values) != num:
        expected = f"{'one for all, or ' if may_be_one else ''}{num}, separated by {SEPARATOR!r}"
        raise ConfigError(
            f"{env_name(field)}={one_line(_joined(values))} has {len(values)} value(s), and {env_name('storage_tier')} "
            f"names {num} tier(s); expected {expected}"
        )
    return values


def _joined(values: Sequence[Any]) -> str:
    return SEPARATOR.join(str(getattr(value, "value", value)) for value in values)


def _check_places(tiers: Sequence[StorageTierConfig]) -> None:
    """Raises ConfigError if two tiers of one kind would use the same directory, prefix or database."""
    places: dict[tuple[str, ...], StorageTierConfig] = {}
    for tier in tiers:
        if not tier.options:  # the tier decides what no options mean
            continue
        other = places.setdefault((tier.name, *_place(tier.options)), tier)
        if other is not tier:
            raise ConfigError(
                f"{env_name('storage_tier')}: tiers {other.label} and {tier.label} would use one place; give each its "
                f"own directory, prefix or database in {env_name('storage_options')}"
            )


def _place(options: str) -> tuple[str, ...]:
    """What two tiers must not share: a directory, or of a URL all but the options that do not name a place."""
    if "://" not in options:
        return (os.path.abspath(os.path.expanduser(options.partition(",")[0].strip())),)
    try:
        parts = urlsplit(options)
    except ValueError:  # the tier has the error
        return (options,)
    name = tier_of_scheme(parts.scheme)
    scheme = name if name and STORAGE_TIERS[name].is_one_server else parts.scheme
    endpoint = dict(parse_qsl(parts.query)).get("endpoint", "")
    return scheme, parts.netloc.lower(), parts.path.strip("/"), endpoint.rstrip("/")
