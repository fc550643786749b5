"""An S3 server that keeps its objects as files, is killed at random moments of a tier's calls, and returns with them.

The moment is a random number of calls and up to 5 ms later. rclone renames complete files, so kill -9 alone tears no
object: `damage` does what a server that loses power does, while it is dead.
"""

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from tests.storage import servers
from tests.storage.conformance import NUM_CHUNKS, SPEC, key_of, payload, read, write
from tests.storage.objects import generation_of, root_of
from tpu_offload.errors import TransferError
from tpu_offload.storage.format import PAGE_NBYTES
from tpu_offload.storage.object import ObjectTier
from tpu_offload.storage.object_names import name_of
from tpu_offload.storage.object_store import open_store

LONG_S = 60.0  # a generous end of what should take milliseconds
NUM_THREADS = 3
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kv", "AWS_SECRET_ACCESS_KEY": "SECRET"}
"""What the client needs in its environment; the server takes any."""
_CALLS = ("write", "read", "delete")
_MAX_CALLS, _MAX_DELAY_S = 12, 0.005
_STEPS_WHILE_FROZEN = 20
_TEMPORARY = ".rclone_temp_put"  # of the server's own, for objects that it is writing


def url(port: int) -> str:
    limits = f"timeout_s={LONG_S}&connect_timeout_s={LONG_S}&retries=0"
    return f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=1&{limits}"


@contextlib.contextmanager
def store(directory: Path) -> Iterator[servers.Server]:
    """A server above a directory, with a bucket, until the end of the block."""
    with servers.running(servers.rclone(directory)) as server:
        servers.make_bucket(server.port, "bucket")
        yield server


def generation_below(directory: Path, tier: ObjectTier) -> Path:
    """The directory of a tier's current generation below the server, which may be dead."""
    root = directory / "bucket" / "kv"
    return root / root_of(tier) / generation_of(tier, open_store(f"file://{root}")[0])


def file_of(directory: Path, tier: ObjectTier, key: bytes) -> Path:
    """The file of a key in a tier's current generation."""
    return generation_below(directory, tier) / name_of(key)


def objects_in(directory: Path) -> list[Path]:
    """The files of objects, in the order of their names."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(_TEMPORARY))


def remove_temporary_files(directory: Path) -> int:
    """Removes what the server was writing when it was killed, which it never does itself; returns how many."""
    found = list(directory.rglob(f"{_TEMPORARY}*"))
    for path in found:
        path.unlink()
    return len(found)


def damage(path: Path, rng: random.Random) -> None:
    """Cuts a record short, or loses the bytes of its end, payload included."""
    data = path.read_bytes()
    kept = rng.randrange(max(1, len(data) - PAGE_NBYTES))  # the padding is less than a page, and no checksum covers it
    lost = bytes(len(data) - kept)
    path.write_bytes(data[:kept] + rng.choice([b"", lost if data[kept:] != lost else b"\xff" * len(lost)]))


@final
class Killer:
    """Kills a server at a random moment of the calls of a tier.

    Args:
      server: the server.
      rng: decides the moment.

    Attributes:
      killed: set once the server is dead.
      hung: no step was made for `LONG_S` beside a frozen server.
    """

    def __init__(self, server: servers.Server, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self._lock = threading.Lock()
        self._calls_left: int | None = None  # until the server is killed; None: it is not to be killed
        self._steps = threading.Semaphore(0)
        self._is_frozen = False
        self._freezes_first = False
        self._delay_s = 0.0
        self.killed = threading.Event()
        self.hung = False

    def watch(self, tier: ObjectTier) -> None:
        """Has the calls of a tier counted."""
        for name in _CALLS:
            setattr(tier, name, self._counted(getattr(tier, name)))

    def _counted(self, call: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any) -> None:
            with self._lock:
                starts = self._calls_left == 0
                if self._calls_left is not None:
                    self._calls_left = None if starts else self._calls_left - 1
            if starts:
                threading.Thread(target=self._kill, daemon=True).start()
            call(*args)

        return counted

    def arm(self, *, freezes_first: bool = False) -> None:
        """From now on the server is about to be killed.

        Args:
          freezes_first: it is frozen at that moment, and killed some steps later.
        """
        self.killed.clear()
        self._freezes_first = freezes_first
        self._delay_s = self._rng.random() * _MAX_DELAY_S
        with self._lock:
            self._calls_left = self._rng.randrange(_MAX_CALLS)

    def step(self) -> None:
        """The engine has made a step that gave tokens."""
        if self._is_frozen:
            self._steps.release()

    @property
    def is_frozen(self) -> bool:
        """Whether the server is frozen and not dead yet."""
        return self._is_frozen

    def _kill(self) -> None:
        time.sleep(self._delay_s)
        if self._freezes_first:
            self._server.freeze()
            self._is_frozen = True
            self.hung |= not all(self._steps.acquire(timeout=LONG_S) for _ in range(_STEPS_WHILE_FROZEN))
            self._is_frozen = False
        self._server.kill()
        self.killed.set()


@final
class TierLife:
    """A tier that several threads use until its server is killed, again and again; each has keys of its own.

    What was acknowledged has to be there afterwards, a call that failed may have had its effect, and no read ever gives
    a byte of something else.

    Attributes:
      counts: calls by outcome.
    """

    def __init__(self, directory: Path, server: servers.Server, seed: int) -> None:
        self._directory = directory
        self._server = server
        self._rng = random.Random(seed)
        self._spec = dataclasses.replace(SPEC, options=url(server.port))
        self._killer = Killer(server, self._rng)
        self._known: dict[int, bool | None] = dict.fromkeys(range(3 * NUM_CHUNKS), False)  # None: either
        self._torn: set[int] = set()
        self.counts = dict.fromkeys(("done", "failed", "refused", "torn", "temporary"), 0)
        self._errors: list[BaseException] = []

    def live(self) -> None:
        """Uses the tier until the server is dead, restarts both, and checks what is there."""
        tier = self._open()
        self._killer.watch(tier)
        self._killer.arm()
        seeds = [self._rng.getrandbits(32) for _ in range(NUM_THREADS)]
        threads = [threading.Thread(target=self._use, args=(tier, i, seed)) for i, seed in enumerate(seeds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
            assert not thread.is_alive(), "a call hangs after the server has died"
        assert not self._errors, self._errors
        tier.close()
        self.counts["temporary"] += remove_temporary_files(self._directory)
        self._tear(tier)
        self._server.start()

    def check(self) -> None:
        """What is stored is what was acknowledged."""
        tier = self._open()
        listed = set(tier.stored_keys())
        for number, known in self._known.items():
            found = self._read(tier, number)
            assert known is None or found is known or (known and number in self._torn), (
                f"{number}: {found}, not {known}"
            )
            assert not found or key_of(number) in listed, "what can be read is listed"
            self._known[number] = found
            if number in self._torn or not found:
                tier.delete([key_of(number)])
        self._torn.clear()
        tier.close()
        num_stored = sum(map(bool, self._known.values()))
        assert len(objects_in(self._directory)) == num_stored + 1, "one marker, and nothing else"

    def _open(self) -> ObjectTier:
        tier = ObjectTier(self._spec)
        tier.stored_keys()
        return tier

    def _use(self, tier: ObjectTier, thread: int, seed: int) -> None:
        """One of the threads: random calls until one fails."""
        rng = random.Random(seed)
        mine = range(thread, 3 * NUM_CHUNKS, NUM_THREADS)
        try:
            while self._call(tier, rng.choice(mine), rng.choice(["write", "write", "delete", "read"]), mine):
                pass
        except BaseException as e:
            self._errors.append(e)

    def _call(self, tier: ObjectTier, number: int, call: str, mine: range) -> bool:
        if call == "read":
            known = self._known[number]
            try:
                assert read(tier, key_of(number)) == payload(number), "a wrong byte"
                assert known, "what was deleted is there"
            except KeyError:
                assert not known, "what was written is missing"
            except OSError:
                return self._failed()
            return self._done()
        if call == "write" and sum(self._known[i] is not False for i in mine) >= NUM_CHUNKS // NUM_THREADS:
            call, number = "delete", next(i for i in mine if self._known[i] is not False)
        self._known[number] = None
        try:
            if call == "write":
                write(tier, key_of(number), number)
            else:
                tier.delete([key_of(number)])
        except OSError:
            return self._failed()
        self._known[number] = call == "write"
        return self._done()

    def _done(self) -> bool:
        self.counts["done"] += 1
        return True

    def _failed(self) -> bool:
        """A call has failed, which only a server that is dead or about to die may cause."""
        assert self._killer.killed.wait(LONG_S), "a call failed before the server was killed"
        self.counts["failed"] += 1
        return False

    def _tear(self, tier: ObjectTier) -> None:
        """Damages some of the objects, at times."""
        stored = [i for i in self._known if file_of(self._directory, tier, key_of(i)).is_file()]
        for number in self._rng.sample(stored, min(len(stored), self._rng.choice([0, 0, 1, 3]))):
            damage(file_of(self._directory, tier, key_of(number)), self._rng)
            self._torn.add(number)
            self.counts["torn"] += 1

    def _read(self, tier: ObjectTier, number: int) -> bool:
        try:
            assert read(tier, key_of(number)) == payload(number), "a wrong byte"
        except KeyError:
            return False
        except (OSError, TransferError):
            assert number in self._torn, "only what was damaged is refused"
            self.counts["refused"] += 1
            return False
        assert number not in self._torn, "a damaged record is taken for the right one"
        return True
