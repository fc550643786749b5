"""The storage tiers that have a name: where their classes are, and what is known of them without importing one."""

from typing import NamedTuple, final


@final
class RegisteredTier(NamedTuple):
    """A tier that has a name.

    Attributes:
      path: `module:Class`; imported on use.
      schemes: of the URLs that its options begin with; none if they begin with a directory.
      package: the optional package that it needs; the extra in setup.cfg that has it is named as the tier.
      read_nbytes_per_s: about how fast one process reads, for `tpu-offload plan`; 0 if it says nothing. The figures
        are those of docs/tiers.md, measured on other machines: a first guess.
      is_one_server: URLs that differ only in these schemes name one server, as with and without TLS.
    """

    path: str
    schemes: tuple[str, ...] = ()
    package: str = ""
    read_nbytes_per_s: float = 0.0
    is_one_server: bool = False


STORAGE_TIERS: dict[str, RegisteredTier] = {
    "file": RegisteredTier("tpu_offload.storage.file:FileTier", read_nbytes_per_s=2.5e9),
    "valkey": RegisteredTier(
        "tpu_offload.storage.valkey:ValkeyTier",
        schemes=("valkey", "valkeys", "redis", "rediss"),
        package="glide_sync",
        read_nbytes_per_s=2.1e9,
        is_one_server=True,
    ),
    "object": RegisteredTier(
        "tpu_offload.storage.object:ObjectTier",
        schemes=("gs", "s3", "file", "memory"),
        package="obstore",
        read_nbytes_per_s=0.4e9,
    ),
}
"""By name."""


def tier_of_scheme(scheme: str) -> str | None:
    """The name of the registered tier that has URLs of this scheme; None if there is none."""
    return next((name for name, tier in STORAGE_TIERS.items() if scheme in tier.schemes), None)
