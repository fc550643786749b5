"""What tests look at inside storage tiers on servers, and their connections."""

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time the tests of the scheduler need no jax
    import socket

    from glide_sync import GlideClient

    from tpu_offload.storage.resp_connection import Connection
    from tpu_offload.storage.valkey import ValkeyTier
    from tpu_offload.storage.valkey_records import RecordConnections


def asker(tier: "ValkeyTier") -> "GlideClient":
    """The client with which a tier asks the server for keys."""
    return tier._askers  # type: ignore[return-value]  # no cluster


def server_key(tier: "ValkeyTier", key: bytes) -> bytes:
    """What a record is called on the server."""
    return tier._prefix() + key


def generation(tier: "ValkeyTier") -> str:
    """The generation of records that a tier reads and writes."""
    return tier._generation


def record_connections(tier: "ValkeyTier") -> Any:
    """What carries records to the server and back."""
    return tier._records


def idle(connections: "RecordConnections") -> "list[Connection]":
    """Connections that nobody uses; the last one was used last."""
    return connections._idle


def in_use(connections: "RecordConnections") -> "Collection[Connection]":
    """Connections on which a value is read or written."""
    return connections._in_use


def set_timeout(connections: "RecordConnections", timeout_s: float) -> None:
    """The timeout from now on. What has to succeed gets a generous one, however busy the machine is."""
    connections._server = dataclasses.replace(connections._server, timeout_s=timeout_s)


def socket_of(connection: "Connection") -> "socket.socket":
    """The socket of a connection."""
    return connection._socket
