"""Which server a `valkey` tier uses, and how to reach it: the options of its URL."""

import dataclasses
from typing import final

from tpu_offload.errors import ConfigError
from tpu_offload.storage.url_options import SETTING, UrlOptions
from tpu_offload.values import one_line

EXAMPLE = "valkey://host:6379"
SCHEMES = {"valkey": False, "valkeys": True, "redis": False, "rediss": True}
"""Whether a scheme has TLS."""
_PORT = 6379
_MAX_DATABASE_DIGITS = 9  # more are none for valkey-glide


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How to reach a server or cluster.

    Attributes:
      addresses: hosts and ports, at least one: of the nodes of a cluster, or of a server and its replicas.
      use_tls: connections are encrypted.
      is_cluster: the addresses are those of a cluster.
      user: of the ACL; empty for the default user.
      password: empty for none.
      database: 0 in a cluster.
      timeout_s: for one request.
      connect_timeout_s: for one connection.
      certificates: of authorities; the client's own; and its key. Each may be None.
    """

    addresses: tuple[tuple[str, int], ...]
    use_tls: bool = False
    is_cluster: bool = False
    user: str = ""
    password: str = dataclasses.field(default="", repr=False)
    database: int = 0
    timeout_s: float = 2.0
    connect_timeout_s: float = 1.0
    certificates: tuple[bytes | None, bytes | None, bytes | None] = dataclasses.field(
        default=(None, None, None), repr=False
    )


def server_options(options: UrlOptions) -> ServerOptions:
    """Takes what is left of a URL's options.

    Raises:
      ConfigError: the options are wrong.
    """
    use_tls = SCHEMES[options.scheme]
    is_cluster = options.boolean("cluster", False)
    user = options.text("user")
    file = options.file("password_file")
    password = (file or b"").decode(errors="replace").rstrip("\r\n")
    timeout_s = options.number("timeout_s", 2.0, least=0.01, most=3600)
    connect_timeout_s = options.number("connect_timeout_s", 1.0, least=0.01, most=3600)
    certificates = authorities, own, key = options.file("ca_file"), options.file("cert_file"), options.file("key_file")
    options.end()
    if file is not None and not password:
        raise ConfigError(f"{SETTING}: password_file is empty; expected a file with a password")
    if user and not password:
        raise ConfigError(f"{SETTING}: user={one_line(user)} without password_file")
    if any(certificates) and not use_tls:
        raise ConfigError(f"{SETTING}: certificates without TLS; expected {options.scheme}s://")
    if authorities is not None and b"-----BEGIN CERTIFICATE-----" not in authorities:  # valkey-glide trusts nobody then
        raise ConfigError(f"{SETTING}: ca_file has no certificate; expected a file with -----BEGIN CERTIFICATE-----")
    if (own is None) != (key is None):
        raise ConfigError(f"{SETTING}: cert_file and key_file belong together; expected both or neither")
    addresses = tuple(_address(options, text) for text in options.place.split(","))
    path = options.path.strip("/")
    if path and (is_cluster or not path.isdecimal() or len(path) > _MAX_DATABASE_DIGITS):
        raise ConfigError(f"{SETTING}: /{one_line(path)}; expected the number of a database, or none for a cluster")
    return ServerOptions(
        addresses=addresses,
        use_tls=use_tls,
        is_cluster=is_cluster,
        user=user,
        password=password,
        database=int(path or 0),
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
        certificates=certificates,
    )


def _address(options: UrlOptions, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, port = (host, port) if colon else (text, str(_PORT))
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"{SETTING}={options.scheme}://{options.place}; expected such as {EXAMPLE}, with commas between"
        )
    return host.strip("[]"), int(port)
