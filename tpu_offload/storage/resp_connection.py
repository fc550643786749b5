"""One connection to a Valkey or Redis server: values go from the caller's memory to the socket, and from it into place.

It speaks what a tier's records need of RESP, the protocol of these servers. A command is an array of byte strings. An
answer is a line of type and length, such as `$4096`, before a value and an end of line, or a line alone: `$-1` if there
is no such key, `+OK` if a value is stored, `-ERR ...` if the server refuses.

Only three answers leave a connection in a known state: a value of exactly the expected length, no such key, and `+OK`.
After an exception its owner must close it, because what it receives next may belong to an earlier command, and what it
sends may be taken for the rest of one. For the same reason a connection that was idle is used again only if the server
has sent nothing meanwhile.

A server runs a command once it has all of it, so a value is stored as a whole or not at all. It may refuse one earlier,
by its length for example, and end the connection while the value is still sent: the error says why.

Waiting and copying are in calls of the operating system, which release the interpreter's lock.
"""

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any, final

_END = b"\r\n"
# What the kernel holds of a value that is being sent to a server on this host, where it would hold up to 4 MiB: with
# less, more of it is still in the caches when the server takes it (docs/measurements.md, "Valkey beside raw TCP"). Over
# a network it would bound what one connection sends in each round trip, so there the kernel decides.
_SEND_BUFFER_NBYTES = 1 << 20
_MAX_LINE_NBYTES = 512
_MAX_ANSWER_NBYTES = 1 << 20  # of a short one
_NO_SUCH_KEY = b"$-1"
_STORED = b"+OK\r\n"


@final
class RefusedError(OSError):
    """The server has answered with an error.

    Args:
      text: as the server has sent it.
    Attributes:
      code: its first word, such as `NOAUTH`.
    """

    def __init__(self, text: bytes) -> None:
        super().__init__(f"the server refuses: {_printable(text)}")
        self.code = _printable(text.split(b" ")[0])


@final
class Connection:
    """A connection for one thread at a time; it is not connected yet.

    Args:
      end: a stream socket, not connected, which it closes.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except BaseException:
            self._socket.close()
            raise

    def connect(self, address: Any, until_s: float) -> None:
        """Connects.

        Args:
          address: as `socket.getaddrinfo` gives it, of the family of the socket.
          until_s: when it gives up, by `time.monotonic`.
        Raises:
          OSError: it cannot.
        """
        self._socket.settimeout(time_left(until_s))
        self._socket.connect(address)
        if self._socket.getsockname()[0] == self._socket.getpeername()[0]:
            # The kernel doubles it, and takes no more than `net.core.wmem_max`.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_NBYTES // 2)

    def ask(self, words: Sequence[bytes], until_s: float) -> bytes:
        """Sends a command whose answer is short.

        Returns:
          The value, or the line without its type.
        Raises:
          RefusedError: the server refuses.
          OSError: it does not answer in time or as expected.
        """
        self._send([memoryview(_command(words))], until_s)
        line, _ = self._line(b"", until_s)
        if line.startswith(b"+"):
            return line[1:]
        nbytes = _length(line)
        if nbytes is None or nbytes > _MAX_ANSWER_NBYTES:
            raise _unexpected(line)
        value = bytearray(nbytes + len(_END))
        self._fill([memoryview(value)], 0, until_s)
        if not value.endswith(_END):
            raise _unexpected(value[-len(_END) :])
        return bytes(value[: -len(_END)])

    def get(self, name: bytes, value: memoryview, until_s: float) -> bool:
        """Receives a value of a known length.

        Args:
          name: the key.
          value: filled, if the result is true; else what it holds is undefined.
          until_s: when it gives up, by `time.monotonic`.
        Returns:
          Whether there is such a key.
        Raises:
          OSError: the value has another length, the server refuses, or does not answer in time or as expected.
        """
        self._send([memoryview(_command((b"GET", name)))], until_s)
        expected = b"$%d\r\n" % len(value)
        head, end = bytearray(len(expected)), bytearray(len(_END))
        parts = [memoryview(head), value, memoryview(end)]
        num_received = 0
        while num_received < len(head):  # with the first bytes of the value, if they are there
            num_received += self._receive(_after(parts, num_received), until_s)
            if not expected.startswith(head[:num_received]):
                return self._is_other_value(_first(parts, num_received), len(value), until_s)
        self._fill(parts, num_received, until_s)
        if end != _END:
            raise _unexpected(bytes(end))
        return True

    def set(self, name: bytes, value: memoryview, until_s: float, *, ttl_s: int = 0) -> None:
        """Stores a value.

        Args:
          name: the key.
          value: sent from where it is; not read after the call.
          until_s: when it gives up, by `time.monotonic`.
          ttl_s: when the server deletes it; 0 for never.
        Raises:
          RefusedError: the server refuses.
          OSError: it does not take all of the value and confirm it in time, or answers otherwise.
        """
        value = value.cast("B")
        expiry = (b"EX", b"%d" % ttl_s) if ttl_s else ()
        head = b"*%d\r\n%b$%d\r\n" % (3 + len(expiry), _encoded(b"SET", name), len(value))
        try:
            self._send([memoryview(head), value, memoryview(_END + _encoded(*expiry))], until_s)
        except (ConnectionError, TimeoutError) as e:
            if refusal := self._refusal():
                raise refusal from e
            raise
        answer = bytearray(len(_STORED))
        num_received = 0
        while num_received < len(answer):
            num_received += self._receive([memoryview(answer)[num_received:]], until_s)
            if not _STORED.startswith(answer[:num_received]):
                raise _unexpected(self._line(answer[:num_received], until_s)[0])

    def is_quiet(self) -> bool:
        """Whether the server has neither closed the connection nor sent an answer without a request."""
        self._socket.setblocking(False)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def interrupt(self) -> None:
        """Makes the call of another thread fail now; that thread still has to close the connection."""
        with contextlib.suppress(OSError):  # it is not connected, or no longer
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it; again does nothing."""
        self._socket.close()

    # Inside.

    def _is_other_value(self, received: bytes, expected_nbytes: int, until_s: float) -> bool:
        """False for an answer of no such key and nothing after it; raises for others."""
        line, rest = self._line(received, until_s)
        if line == _NO_SUCH_KEY and not rest:
            return False
        nbytes = _length(line)
        if nbytes is not None:
            raise OSError(f"the server has {nbytes} bytes; expected {expected_nbytes}")
        raise _unexpected(line + _END + rest if rest else line)

    def _refusal(self) -> RefusedError | None:
        """The error that the server has sent before it stopped taking a command."""
        self._socket.setblocking(False)
        with contextlib.suppress(OSError):  # it has sent nothing
            line, end, _ = self._socket.recv(_MAX_LINE_NBYTES).partition(_END)
            if end and line.startswith(b"-"):
                return RefusedError(line[1:])
        return None

    def _line(self, received: bytes | bytearray, until_s: float) -> tuple[bytes, bytes]:
        """The first line of an answer whose beginning has been received, and what has been received after it."""
        line = bytearray(received)
        byte = bytearray(1)
        while _END not in line and len(line) < _MAX_LINE_NBYTES:
            self._receive([memoryview(byte)], until_s)
            line += byte
        text, end, rest = bytes(line).partition(_END)
        if not end:
            raise _unexpected(line)
        if text.startswith(b"-"):
            raise RefusedError(text[1:])
        return text, rest

    def _send(self, parts: Sequence[memoryview], until_s: float) -> None:
        while parts:
            self._socket.settimeout(time_left(until_s))
            parts = _after(parts, self._socket.sendmsg(parts))

    def _fill(self, parts: Sequence[memoryview], num_received: int, until_s: float) -> None:
        nbytes = sum(map(len, parts))
        while num_received < nbytes:
            num_received += self._receive(_after(parts, num_received), until_s)

    def _receive(self, parts: Sequence[memoryview], until_s: float) -> int:
        """Receives at least one byte."""
        self._socket.settimeout(time_left(until_s))
        num_received = self._socket.recvmsg_into(parts)[0]
        if not num_received:
            raise ConnectionResetError("the server closed the connection")
        return num_received


def time_left(until_s: float) -> float:
    """Seconds until then, more than none.

    Raises:
      TimeoutError: it has passed.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _encoded(*words: bytes) -> bytes:
    return b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _command(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(words), _encoded(*words))


def _after(parts: Sequence[memoryview], num: int) -> list[memoryview]:
    """All bytes but the first ones."""
    left = []
    for part in parts:
        if num < len(part):
            left.append(part[num:])
        num = max(0, num - len(part))
    return left


def _first(parts: Sequence[memoryview], num: int) -> bytes:
    """The first bytes, as many as are of interest."""
    return b"".join(bytes(part[:_MAX_LINE_NBYTES]) for part in parts[:2])[: min(num, _MAX_LINE_NBYTES)]


def _length(line: bytes) -> int | None:
    """Of the value that follows a line; None if none does."""
    digits = line[1:]
    return int(digits) if line.startswith(b"$") and digits.isdigit() and len(digits) < 20 else None


def _unexpected(answer: bytes | bytearray) -> OSError:
    return OSError(f"the server answers {_printable(answer)}; is it Valkey or Redis?")


def _printable(text: bytes | bytearray) -> str:
    shown = bytes(text[:100]).decode("ascii", "backslashreplace")
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
