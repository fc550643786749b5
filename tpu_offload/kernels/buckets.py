"""How the staged path splits a job into copies of compiled sizes."""

import bisect
from collections.abc import Sequence


def usable_buckets(budget: int, configured: Sequence[int] = ()) -> tuple[int, ...]:
    """Staging array sizes to compile for, ascending, starting at 1.

    Args:
      budget: the staging budget in blocks; larger sizes would never be used.
      configured: ascending sizes that start at 1; empty means powers of two.
    """
    sizes = configured or [1 << i for i in range(max(budget, 1).bit_length())]
    return tuple(size for size in sizes if size <= max(budget, 1))


def split_into_buckets(num_blocks: int, buckets: Sequence[int]) -> list[int]:
    """Splits `num_blocks` into bucket sizes, largest first, that add up exactly.

    There is no padding: a padded staging array would hold HBM that the budget does not count. The smallest bucket is
    1, so every number can be split.
    """
    sizes = []
    while num_blocks > 0:
        size = buckets[bisect.bisect_right(buckets, num_blocks) - 1]
        sizes.append(size)
        num_blocks -= size
    return sizes
