"""Block hashes that tell what a LoRA adapter is, not only what it is called.

vLLM's hashes cover the name and the path of an adapter. What is at a path may be trained again, and loaded in place of
what was there, while the engine runs or, with storage, before the next one. So the hashes of requests with an adapter
have a few more bytes: a digest of its files.

The name of an adapter on a hub says nothing of its files. Then these bytes are random: this engine finds what it has
saved, and no other does. Nor do files that change while the engine runs say whether it has loaded them. From then on
each request with that adapter has random bytes of its own and finds nothing, until a reset says that what was saved
before is of no use; then all have the same random bytes.
"""

import dataclasses
import hashlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, final

from tpu_offload import BlockHash, TierEvent
from tpu_offload.adapters.vllm.model_identity import sampled_weights

if TYPE_CHECKING:
    from vllm.v1.request import Request

_NBYTES = 6  # of the digest; with these a key still fits into a hint of the `file` tier
_CONFIG = "adapter_config.json"

_logger = logging.getLogger(__name__)

type _Files = tuple[tuple[str, int, int], ...]


@final
class LoRAHashes:
    """The block hashes of requests for the library. All calls come from the thread of vLLM's scheduler."""

    def __init__(self) -> None:
        self._digests: dict[str, tuple[_Files, bytes | None]] = {}  # by path; None: they have changed
        self._of_requests: dict[str, tuple[bytes, list[BlockHash]]] = {}
        self._hash_nbytes = 0  # of vLLM's hashes, once one was extended

    def of(self, request: "Request") -> list[BlockHash]:
        """The hashes of a request's blocks, which continue those of earlier calls. Not to be changed or kept."""
        known: list[BlockHash] = request.block_hashes
        if request.lora_request is None:
            return known
        entry = self._of_requests.get(request.request_id)
        if entry is None:
            entry = self._of_requests[request.request_id] = self._digest(request.lora_request.lora_path), []
        digest, hashes = entry
        while hashes and (len(hashes) > len(known) or hashes[-1][:-_NBYTES] != known[len(hashes) - 1]):
            hashes.pop()  # the request goes on with other tokens, as a session may
        hashes += [BlockHash(block_hash + digest) for block_hash in known[len(hashes) :]]
        if known:
            self._hash_nbytes = len(known[0])
        return hashes

    def original(self, event: TierEvent) -> TierEvent:
        """An event with vLLM's own hashes."""
        if not self._hash_nbytes:
            return event
        hashes = tuple([BlockHash(block_hash[: self._hash_nbytes]) for block_hash in event.block_hashes])
        return dataclasses.replace(event, block_hashes=hashes)

    def finish(self, request_id: str) -> None:
        """A request ended; its id may be reused."""
        self._of_requests.pop(request_id, None)

    def reset(self) -> None:
        """What was saved is of no use any more: adapters that have changed since are what is loaded now."""
        for path, (files, digest) in self._digests.items():
            if digest is None:
                self._digests[path] = files, secrets.token_bytes(_NBYTES)

    def _digest(self, path: str) -> bytes:
        path = os.path.expanduser(path)
        files = _files(path)
        known = self._digests.get(path)
        if known is None:
            known = self._digests[path] = files, _digest_of(path) if files else secrets.token_bytes(_NBYTES)
        elif known[0] != files:
            if known[1] is not None:
                _logger.warning(
                    "the files of the LoRA adapter in %s have changed: its requests find nothing that others have "
                    "saved until the prefix cache is reset with reset_connector, once the adapter is loaded again",
                    path,
                )
            known = self._digests[path] = files, None
        return known[1] or secrets.token_bytes(_NBYTES)


def _files(path: str) -> _Files:
    """Names, sizes and times of the files of an adapter; none if it is in no local directory."""
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def _digest_of(path: str) -> bytes:
    digest = hashlib.blake2b(repr(list(sampled_weights(path))).encode(), digest_size=_NBYTES)
    try:
        with open(os.path.join(path, _CONFIG), "rb") as file:
            digest.update(file.read())
    except OSError:
        return secrets.token_bytes(_NBYTES)
    return digest.digest()
