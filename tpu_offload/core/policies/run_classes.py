"""Classes of runs: what is known about a run that says most about its next use.

- Runs used once, by the power of two of the uses of the run before them (none, 1, 2 to 3, 4 to 7, more).
- Those used less than 16 times, by their uses, two classes for each power of two (2, 3, 4 to 5, 6 to 7, 8 to 11, 12 to
  15).
- All others by the time between their uses, a class for each power of two of it. Their rate of use is known better than
  by their number of uses, which says as much about how long they have been used as about how often.

Classes have parts, which matter only while their rates of use are found to differ:

- Runs used once without a run before them, by their length: 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... chunks, the last 128
  and more.
- Those used more often, by whether they waited long for the last use. So what has paused once, and may be used no more,
  is told from what is in use.
- Runs used once after a run that has been used twice or more, by whether that one waited long for its last use. That is
  this use, but behind HBM mostly the one before it, because chunks are inserted before the use of the others is known.
"""

from typing import Final

MANY_USES: Final = 16  # from so many on the class is that of the interval
NUM_ORIGINS: Final = 5
NUM_INTERVALS: Final = 9
FIRST_INTERVAL: Final = NUM_ORIGINS + 6
NUM_CLASSES: Final = FIRST_INTERVAL + NUM_INTERVALS
NUM_LENGTHS: Final = 14
_FIRST_WAITED: Final = 2  # the first class with parts by the last wait, which all after it have too
_FIRST_WAIT: Final = NUM_CLASSES + NUM_LENGTHS  # its part by a short wait, which that by a long one follows
_LONG: Final = 3  # a long wait: so many powers of two above the shortest interval, two to four times the tier

# For the prior, by class: uses so far; for intervals 16 for the longest to 64 for the shortest.
CLASS_USES = [1.0] * NUM_ORIGINS + [2.0 ** (i // 2 + 1) * (1 + i % 2 / 2) for i in range(FIRST_INTERVAL - NUM_ORIGINS)]
CLASS_USES += [MANY_USES * 2.0 ** ((NUM_INTERVALS - 1 - i) / 4) for i in range(NUM_INTERVALS)]
# Used twice and three times is one class for the ages. That was needed when a save because HBM evicts a block counted
# as a use; with two classes, hit rates differed by up to 0.005.
POOLS = [*range(NUM_ORIGINS + 1), *range(NUM_ORIGINS, NUM_CLASSES - 1)]

# For each part its class. Parts are numbered like classes, after all of these.
PARTS = [0] * NUM_LENGTHS + [class_id for class_id in range(_FIRST_WAITED, NUM_CLASSES) for _ in range(2)]


def origin_of(num_uses: int, class_id: int) -> int:
    """The class or part of a run used once after a run that has been used so often, and is of this class or part."""
    origin = min(num_uses.bit_length(), NUM_ORIGINS - 1)
    if origin < _FIRST_WAITED:
        return origin
    return _FIRST_WAIT + 2 * (origin - _FIRST_WAITED) + (class_id - _FIRST_WAIT) % 2


def part_of_length(num_chunks: int) -> int:
    """The part of class 0 of a run used once with no run before it, which has so many chunks."""
    if num_chunks < 2:
        return NUM_CLASSES
    power = num_chunks.bit_length() - 2
    return NUM_CLASSES + min(1 + 2 * power + (num_chunks >> power & 1), NUM_LENGTHS - 1)


def is_length(class_id: int) -> bool:
    """Whether that is a part by length."""
    return NUM_CLASSES <= class_id < _FIRST_WAIT


def class_of(num_uses: int, interval: float, shortest: int) -> int:
    """The class of a run that was used at least twice.

    Args:
      num_uses: how often it has been used.
      interval: the time between its uses, as a power of two.
      shortest: see `shortest_interval`.
    """
    if num_uses < MANY_USES:
        power = num_uses.bit_length() - 2
        return NUM_ORIGINS + 2 * power + (num_uses >> power & 1)
    return FIRST_INTERVAL + max(0, min(int(interval - shortest + 1), NUM_INTERVALS - 1))


def part_of_interval(class_id: int, last: float, shortest: int) -> int:
    """The part of the class of a run that was used at least twice, whose last interval was this power of two."""
    return _FIRST_WAIT + 2 * (class_id - _FIRST_WAITED) + (last >= shortest + _LONG)


def shortest_interval(num_chunks: int) -> int:
    """Of a tier of this size: below this power of two intervals are not told apart.

    It is a quarter to a half of the chunks in the tier. The longest are 32 to 64 times as many, and more.
    """
    return num_chunks.bit_length() - 2
