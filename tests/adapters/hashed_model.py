"""A fake model whose KV is a hash of the tokens, so that the contents of a block can be identified."""

import functools
import hashlib

import numpy as np

BLOCK_SIZE = 8
NUM_LAYERS = 2  # in each KV cache group
PAGE_SHAPE = (BLOCK_SIZE, 2, 8)
HEAD_SIZES = (8, 16)  # of the layers in turn, if they differ
NUM_STATES = 2  # layers with a state, if the model has any
STATE_SHAPES = ((2, 8), (2, 3, 8))
VOCABULARY = 97


class Prefix:
    """A sequence with a digest of each of its prefixes."""

    def __init__(self, tokens) -> None:
        self.tokens: list[int] = []
        self.digests: list[bytes] = []
        self._chain = b""
        self.extend(tokens)

    def extend(self, tokens) -> None:
        for token in tokens:
            self._chain = hashlib.blake2b(self._chain + token.to_bytes(4, "little"), digest_size=16).digest()
            self.tokens.append(token)
            self.digests.append(self._chain)

    def next_token(self) -> int:
        return next_token(self.digests[-1])


def next_token(digest: bytes) -> int:
    return 3 + int.from_bytes(digest[:4], "little") % VOCABULARY


@functools.lru_cache(maxsize=2**17)
def kv_of(digest: bytes, rank: int, layer: int, shape: tuple[int, ...]) -> np.ndarray:
    """What a worker has of a position, or of a state, in one layer; no two layers or KV cache groups have the same."""
    size = int(np.prod(shape))
    raw = hashlib.blake2b(digest + bytes([rank, layer, size]), digest_size=size).digest()
    return np.frombuffer(raw, np.int8).reshape(shape)


@functools.lru_cache(maxsize=2**12)
def continued(prompt: tuple[int, ...], num_tokens: int) -> Prefix:
    """A prompt and the tokens that the model generates, `num_tokens` in all."""
    prefix = Prefix(prompt)
    while len(prefix.tokens) < num_tokens:
        prefix.extend([prefix.next_token()])
    return prefix
