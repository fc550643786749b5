"""Block hashes: equal exactly when the prefixes, the layout and the salt are equal."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.given import TABLE_FORMS, Unprintable
from tpu_offload.errors import RequestError
from tpu_offload.hashing import BlockHasher, chunk_keys, key_namespace
from tpu_offload.types import BlockHash

FINGERPRINT = bytes(range(16))
GOLDEN = ["d8344d56ba358e2171d8fa9def1fecbd", "112e8716dc18707f9f5f76c8e22bdcc1"]
TOKENS = st.lists(st.integers(0, 2**63 - 1), max_size=40)


def hashes_of(tokens, *, block_size=4, fingerprint=FINGERPRINT, cache_salt=""):
    hashes: list[BlockHash] = []
    BlockHasher(fingerprint, block_size=block_size).extend(hashes, tokens, cache_salt=cache_salt)
    return hashes


def test_golden():
    """Golden values, and their derivation byte by byte."""
    hashes = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9], cache_salt="tenant")
    assert [h.hex() for h in hashes] == GOLDEN

    def blake(data):
        return hashlib.blake2b(data, digest_size=16).digest()

    root = blake(FINGERPRINT + bytes([6, 0, 0, 0, 0, 0, 0, 0]) + b"tenant")
    first = blake(root + b"".join(bytes([token, 0, 0, 0, 0, 0, 0, 0]) for token in (1, 2, 3, 4)))
    second = blake(first + b"".join(bytes([token, 0, 0, 0, 0, 0, 0, 0]) for token in (5, 6, 7, 8)))
    assert hashes == [first, second]


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_only_full_blocks_are_hashed(num_tokens, num_hashes):
    assert len(hashes_of(range(num_tokens))) == num_hashes


@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 40), max_size=5))
def test_extending_piece_by_piece_gives_the_same_hashes(tokens, cuts):
    hasher = BlockHasher(FINGERPRINT, block_size=4)
    hashes: list[BlockHash] = []
    for cut in [*sorted(cuts), len(tokens)]:
        hasher.extend(hashes, tokens[:cut], cache_salt="s")
        assert len(hashes) == min(cut, len(tokens)) // 4
    assert hashes == hashes_of(tokens, cache_salt="s")


@given(tokens=TOKENS.filter(lambda tokens: len(tokens) >= 4), data=st.data())
def test_a_changed_token_changes_its_block_and_all_after_it(tokens, data):
    where = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[where] = data.draw(st.integers(0, 2**63 - 1).filter(lambda token: token != tokens[where]))
    for i, (old, new) in enumerate(zip(hashes_of(tokens), hashes_of(changed), strict=True)):
        assert (old == new) == (i < where // 4)


def test_hashes_are_chained():
    """The same tokens after another prefix are another block."""
    first, second = hashes_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_salt_fingerprint_and_block_size_change_the_hashes():
    tokens = list(range(16))
    variants = [
        hashes_of(tokens),
        hashes_of(tokens, cache_salt="a"),
        hashes_of(tokens, cache_salt="ab"),
        hashes_of(tokens, fingerprint=bytes(16)),
        hashes_of(tokens, block_size=8),
    ]
    every = [h for hashes in variants for h in hashes]
    assert len(set(every)) == len(every)


def test_a_salt_cannot_imitate_a_fingerprint():
    """The root covers the salt's length, so bytes cannot shift from one part to the other."""
    hasher = BlockHasher(FINGERPRINT, block_size=4)
    other = BlockHasher(FINGERPRINT + b"\1\0\0\0\0\0\0\0a", block_size=4)
    assert hasher.root("a") != other.root("")


@pytest.mark.parametrize(
    ("num_blocks", "blocks_per_chunk", "first_chunk", "last_blocks"),
    [
        (5, 1, 0, [0, 1, 2, 3, 4]),
        (5, 2, 0, [1, 3]),
        (6, 2, 1, [3, 5]),
        (6, 3, 0, [2, 5]),
        (5, 3, 1, []),
        (2, 3, 0, []),
        (0, 1, 0, []),
    ],
)
def test_chunk_keys_come_from_the_last_block_of_each_full_chunk(num_blocks, blocks_per_chunk, first_chunk, last_blocks):
    hashes = hashes_of(range(4 * num_blocks))
    keys = list(chunk_keys(hashes, blocks_per_chunk=blocks_per_chunk, namespace=b"n", first_chunk=first_chunk))
    assert keys == [hashes[i] + b"n" for i in last_blocks]


def test_layout_chunk_size_group_and_epoch_change_the_keys():
    hashes = hashes_of(range(16))
    namespaces = {
        key_namespace(fingerprint, blocks_per_chunk=size, group_id=group, epoch=epoch)
        for fingerprint in (b"a", b"b")
        for size in (1, 2)
        for group in (0, 1)
        for epoch in (0, 1)
    }
    assert len(namespaces) == 16
    keys = [key for n in namespaces for key in chunk_keys(hashes, blocks_per_chunk=1, namespace=n)]
    assert len(set(keys)) == 16 * 4
    assert len({len(key) for key in keys}) == 1  # equal lengths, so that no key is a prefix of another


@pytest.mark.parametrize("form", TABLE_FORMS)
def test_tokens_of_all_forms_have_the_same_hashes(form):
    hasher = BlockHasher(b"f", block_size=np.int64(4))  # type: ignore[arg-type]
    expected: list[BlockHash] = []
    hashes: list[BlockHash] = []
    BlockHasher(b"f", block_size=4).extend(expected, list(range(13)))
    hasher.extend(hashes, TABLE_FORMS[form](range(6)))
    hasher.extend(hashes, TABLE_FORMS[form](range(13)))
    assert hashes == expected


@pytest.mark.parametrize(
    "tokens", [None, 5, "abcdefgh", b"abcdefgh", iter(range(8)), {*range(8)}, np.zeros((8, 2), int), Unprintable()]
)
def test_invalid_tokens_are_refused_with_one_line(tokens):
    hashes: list[BlockHash] = []
    with pytest.raises(RequestError) as e:
        BlockHasher(b"f", block_size=4).extend(hashes, tokens)
    assert len(str(e.value).splitlines()) == 1
    assert hashes == []


@pytest.mark.parametrize("hashes", [(), None, "a", [5], [bytearray(b"x")], np.zeros(0)])
def test_hashes_so_far_that_cannot_grow_are_refused(hashes):
    with pytest.raises(RequestError, match=r"the hashes so far are .*; expected a list of bytes to extend"):
        BlockHasher(b"f", block_size=4).extend(hashes, list(range(8)))


@pytest.mark.parametrize(("fingerprint", "block_size"), [("f", 4), (None, 4), (b"f", 0), (b"f", 4.0), (b"f", True)])
def test_invalid_hasher_arguments(fingerprint, block_size):
    with pytest.raises(RequestError, match="expected bytes and a positive integer"):
        BlockHasher(fingerprint, block_size=block_size)
