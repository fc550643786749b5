"""Request traces: prompts as lists of block numbers, in order of time.

A trace file has one JSON object per line, in the format of the Mooncake traces: `timestamp`, `input_length`,
`output_length`, and `hash_ids` with one id per block of the prompt. An id should identify a block after one specific
prefix. In some files ids stand for the tokens of a block alone, so blocks are always numbered by their place in the
tree of all prompts: the same id after a different prefix is a different block.

Several files are services that run side by side: each starts at its own time 0, and they share no blocks, even
if their ids are the same.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tpu_offload.errors import InputError
from tpu_offload.sim.json_lines import parse_lines
from tpu_offload.sim.mooncake import parse_line
from tpu_offload.types import ChunkKey

_DIGEST_NBYTES = 16
_NAMESPACE = b"simulate"  # as long as the namespace in the real scheduler's keys


@dataclasses.dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt.

    Attributes:
      time_s: seconds since the first request of its file.
      blocks: numbers of its blocks, head first.
      num_prompt_tokens: from the file.
      num_output_tokens: from the file.
    """

    time_s: float
    blocks: tuple[int, ...]
    num_prompt_tokens: int
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of time.

    Attributes:
      requests: the requests.
      keys: chunk keys, by block number.
      parents: by block number, the number of the preceding block; -1 for first blocks.
      notes: remarks about the files for the user, one line each.
    """

    requests: tuple[TraceRequest, ...]
    keys: tuple[ChunkKey, ...]
    parents: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Total number of blocks in all prompts."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def num_unique_blocks(self) -> int:
        """Number of different blocks. O(blocks)."""
        return len({block for request in self.requests for block in request.blocks})

    @property
    def duration_s(self) -> float:
        """The time of the last request."""
        return self.requests[-1].time_s if self.requests else 0.0

    def between(self, start_s: float, end_s: float) -> Self:
        """The requests in [start_s, end_s).

        Raises:
          InputError: there are none.
        """
        requests = tuple(request for request in self.requests if start_s <= request.time_s < end_s)
        if not requests:
            raise InputError(
                f"no request from {start_s:g} s to {end_s:g} s; the trace goes from 0 to {self.duration_s:g} s"
            )
        return dataclasses.replace(self, requests=requests)

    def num_before(self, time_s: float) -> int:
        """The number of requests before a time."""
        return sum(request.time_s < time_s for request in self.requests)


def read_traces(paths: Sequence[Path], *, block_tokens: int = 512) -> Trace:
    """Reads trace files and merges them by time.

    Args:
      paths: at least one file.
      block_tokens: tokens per block, to check `input_length`.
    Raises:
      InputError: a file cannot be read or has no requests, or a line (named in the message) is invalid.
    """
    builder = _Builder(block_tokens=block_tokens)
    for number, path in enumerate(paths):
        builder.add(path, number)
    return builder.build()


class _Builder:
    """Merges files and numbers their blocks by their place in the tree of prompts."""

    def __init__(self, *, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._requests: list[TraceRequest] = []
        self._keys: list[ChunkKey] = []
        self._parents: list[int] = []
        self._notes: list[str] = []

    def add(self, path: Path, number: int) -> None:
        requests: list[TraceRequest] = []
        root = hashlib.blake2b(f"trace {number}".encode(), digest_size=_DIGEST_NBYTES).digest()
        tree = _Tree(self._keys, self._parents, root)
        not_chained = wrong_length = ""
        for line, request in parse_lines(path, parse_line):
            num_prompt_tokens, ids = request.input_length, request.hash_ids
            num_others = tree.num_others
            blocks = tree.number(ids)
            if tree.num_others > num_others and not not_chained:
                not_chained = f"{path} line {line}: hash_ids are not prefix-chained; {tree.example}; {_CHAINED}"
            if not wrong_length and num_prompt_tokens is not None:
                wrong_length = self._check_length(path, line, num_prompt_tokens, len(ids))
            num_tokens = len(ids) * self._block_tokens if num_prompt_tokens is None else num_prompt_tokens
            requests.append(TraceRequest(request.time_s, blocks, num_tokens, request.output_length or 0))
        if not requests:
            raise InputError(f"{path} has no request; expected one JSON object per line")
        if any(b.time_s < a.time_s for a, b in itertools.pairwise(requests)):
            self._notes.append(f"{path}: requests are not in order of time; they were sorted")
        self._notes += [note for note in (not_chained, wrong_length) if note]
        first_s = min(request.time_s for request in requests)
        self._requests += [dataclasses.replace(request, time_s=request.time_s - first_s) for request in requests]

    def _check_length(self, path: Path, line: int, num_tokens: int, num_ids: int) -> str:
        """A note if the length does not fit the number of ids, with or without an id for a partial last block."""
        if num_tokens // self._block_tokens <= num_ids <= -(-num_tokens // self._block_tokens):
            return ""
        return (
            f"{path} line {line}: input_length {num_tokens} with {num_ids} hash_ids of {self._block_tokens} tokens; "
            "set --trace-block-tokens to the tokens per id"
        )

    def build(self) -> Trace:
        requests = sorted(self._requests, key=lambda request: request.time_s)  # stable: the order of the files
        return Trace(tuple(requests), tuple(self._keys), tuple(self._parents), tuple(self._notes))


_CHAINED = "an id counts as a different block after each prefix"


class _Tree:
    """The tree of one file's prompts. Its blocks are appended to lists shared by all files."""

    def __init__(self, keys: list[ChunkKey], parents: list[int], root: bytes) -> None:
        self._keys = keys
        self._parents = parents
        self._root = root
        # With prefix-chained ids there is one block per id.
        self._first: dict[int | str, int] = {}
        self._others: dict[tuple[int, int | str], int] = {}
        self.example = ""

    @property
    def num_others(self) -> int:
        """Number of blocks whose id another block has too."""
        return len(self._others)

    def number(self, ids: Sequence[int | str]) -> tuple[int, ...]:
        """The numbers of a prompt's blocks."""
        blocks = []
        parent = -1
        for hash_id in ids:
            block = self._first.get(hash_id)
            if block is None:
                block = self._first[hash_id] = self._add(parent, hash_id)
            elif self._parents[block] != parent:
                block = self._other(parent, hash_id)
            blocks.append(block)
            parent = block
        return tuple(blocks)

    def _other(self, parent: int, hash_id: int | str) -> int:
        block = self._others.get((parent, hash_id))
        if block is None:
            self.example = self.example or f"id {hash_id!r:.40} follows another block than before"
            block = self._others[parent, hash_id] = self._add(parent, hash_id)
        return block

    def _add(self, parent: int, hash_id: int | str) -> int:
        before = self._root if parent < 0 else self._keys[parent][:_DIGEST_NBYTES]
        digest = hashlib.blake2b(before + repr(hash_id).encode(), digest_size=_DIGEST_NBYTES).digest()
        self._keys.append(ChunkKey(digest + _NAMESPACE))
        self._parents.append(parent)
        return len(self._parents) - 1
