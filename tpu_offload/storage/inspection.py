"""Looks into storage from outside: what tiers have left there, of any model, without an engine.

`StoreInspector` is the interface, for people's tools; each tier has an implementation beside it. It only lists and
reads, except for `clear`. Nothing that is damaged stops a listing: it is reported as an entry.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, final


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one worker of one model has stored between two resets.

    Attributes:
      fingerprint: of the model, in hexadecimal.
      worker_id: the worker.
      name: the generation, in hexadecimal.
      is_current: engines use it. Others are what a reset or a crash has left, and never used again.
      last_write_s: when the tier wrote last, if it knows that and no times of records, in seconds since the epoch.
    """

    fingerprint: str
    worker_id: int
    name: str
    is_current: bool
    last_write_s: float | None = dataclasses.field(default=None, compare=False)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """A record, as the tier's index or names have it; its bytes may say otherwise.

    Attributes:
      generation: whose it is.
      key: the chunk's key, or its beginning if the tier's index has no more of it and the record cannot be read.
      key_nbytes: length of the key.
      nbytes: length of the record.
      place: where it is, for messages and for `StoreInspector.read`.
      header_generation: what its header has to have as generation.
      written_s: when it was written, in seconds since the epoch; None if the tier does not know.
    """

    generation: Generation
    key: bytes
    key_nbytes: int
    nbytes: int
    place: str
    header_generation: int = 0
    written_s: float | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """Something that no tier has written; `clear` leaves it.

    Attributes:
      nbytes: its size.
    """

    nbytes: int


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Damage to what holds records; an engine that finds it starts empty there.

    Attributes:
      place: where it is.
      what: what is wrong, in a few words.
    """

    place: str
    what: str


type Entry = Generation | StoredRecord | Foreign | Damage
type Fact = int | float | str | None


class StoreInspector(abc.ABC):
    """Lists, reads and clears a store. Any thread may call `read`, also concurrently; one calls the rest.

    Attributes:
      where: the store, for messages; without credentials.
      is_shared: several engines may use it at a time, so that `clear` empties the tier of all of them.
      num_records: how many records `scan` will list, if that is known before.
    """

    is_shared: ClassVar[bool] = False
    where: str
    num_records: int | None = None

    @abc.abstractmethod
    def scan(self) -> Iterator[Entry]:
        """Lists all there is, in any order. A generation may come several times, also one without records.

        Raises:
          OSError: it cannot be listed.
        """

    @abc.abstractmethod
    def read(self, record: StoredRecord, nbytes: int) -> bytes:
        """The first bytes of a record; fewer if it is shorter.

        Raises:
          KeyError: it is no longer there.
          OSError: it cannot be read.
        """

    @abc.abstractmethod
    def facts(self) -> tuple[str, Sequence[Mapping[str, Fact]]]:
        """What `scan` does not say, for people: the name of a list, and its items.

        Raises:
          OSError: the store does not answer.
        """

    def check_unused(self) -> None:
        """Raises ConfigError if an engine uses the store, as far as it can be seen; then `clear` would refuse."""
        return

    @abc.abstractmethod
    def clear(self, on_deleted: Callable[[int], None]) -> None:
        """Empties the tier of every model and worker, durably, as `StorageTier.clear` does, and frees the space.

        If it is interrupted, what was stored may be found again or not, in parts; call it again.

        Args:
          on_deleted: told how many more records were deleted.
        Raises:
          ConfigError: an engine uses the store, and nothing was deleted.
          OSError: something may still be stored.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases its resources."""


@dataclasses.dataclass(slots=True)
class Holding:
    """The records of a generation, counted.

    Attributes:
      num_records: how many.
      nbytes: of all, headers included.
      oldest_s, newest_s: times of writing, in seconds since the epoch; None if the tier does not know.
    """

    num_records: int = 0
    nbytes: int = 0
    oldest_s: float | None = None
    newest_s: float | None = None


@final
class Survey:
    """Counts the entries of a scan, in memory that grows with the number of generations only."""

    def __init__(self) -> None:
        self.holdings: dict[Generation, Holding] = {}
        self.num_foreign = 0
        self.foreign_nbytes = 0
        self.damages: list[Damage] = []

    def records(self, entries: Iterable[Entry]) -> Iterator[StoredRecord]:
        """Counts all entries, and passes on the records."""
        for entry in entries:
            match entry:
                case StoredRecord():
                    self._count(entry)
                    yield entry
                case Generation():
                    self.holdings.setdefault(entry, Holding())
                case Foreign():
                    self.num_foreign += 1
                    self.foreign_nbytes += entry.nbytes
                case Damage():
                    self.damages.append(entry)

    def count(self, entries: Iterable[Entry]) -> None:
        """Counts all entries."""
        for _ in self.records(entries):
            pass

    @property
    def num_records(self) -> int:
        """Of all generations."""
        return sum(holding.num_records for holding in self.holdings.values())

    @property
    def nbytes(self) -> int:
        """Of all generations."""
        return sum(holding.nbytes for holding in self.holdings.values())

    def _count(self, record: StoredRecord) -> None:
        holding = self.holdings.setdefault(record.generation, Holding())
        holding.num_records += 1
        holding.nbytes += record.nbytes
        if (at_s := record.written_s) is not None:
            holding.oldest_s = at_s if holding.oldest_s is None else min(holding.oldest_s, at_s)
            holding.newest_s = at_s if holding.newest_s is None else max(holding.newest_s, at_s)
