"""Finds how much of each prefix a server has, in few round trips and without asking for every key of what it lacks.

The first round trip asks, for all prefixes together, for the first key, the second, the fourth, the eighth and so on,
and for the last. The first of these that is missing bounds the answer: of a prefix that the server does not know at all
nothing else is sent. The rest is exact, because a server evicts single keys: what is left of each prefix is divided
into 16 ranges, one request counts the keys of each, and the first range that is incomplete is divided again. A prefix
of n keys takes at most 2 + log16(n) round trips, two if all of it is there, and one if it has one or two keys.
"""

from collections.abc import Callable, Sequence

_NUM_RANGES = 16

type Span = tuple[int, int]
"""A range of positions in a prefix: first and end."""


def count_leading(
    prefixes: Sequence[Sequence[bytes]], count: Callable[[Sequence[Sequence[bytes]]], Sequence[int]]
) -> list[int]:
    """Counts, for each prefix, its leading keys that are stored.

    Args:
      prefixes: keys, in order.
      count: for each of several groups of keys, how many are stored; one round trip. What it raises is raised.
    """
    found = [0] * len(prefixes)
    probes = [_probes(len(prefix)) for prefix in prefixes]
    groups = [(prefix[i],) for prefix, places in zip(prefixes, probes, strict=True) for i in places]
    if not groups:
        return found
    answers = iter(count(groups))
    spans: dict[int, Span] = {}  # by prefix, where its first missing key is, if any; all before it is stored
    for number, places in enumerate(probes):
        missing = [i for i, n in [(i, next(answers)) for i in places] if not n]
        end = missing[0] if missing else len(prefixes[number])
        if end <= 2:  # both were asked for
            found[number] = end
        else:
            spans[number] = (0, end)
    while spans:
        ranges = {number: _divide(span) for number, span in spans.items()}
        answers = iter(count([prefixes[i][first:end] for i, parts in ranges.items() for first, end in parts]))
        spans = {}
        for number, parts in ranges.items():
            incomplete = [(first, end) for first, end, n in [(*p, next(answers)) for p in parts] if n < end - first]
            first, end = incomplete[0] if incomplete else (parts[-1][1],) * 2
            if end - first > 1:
                spans[number] = (first, end)
            else:
                found[number] = first
    return found


def _probes(num_keys: int) -> list[int]:
    """Positions 0, 1, 3, 7, ... and the last one."""
    places = [2**i - 1 for i in range(num_keys.bit_length())]
    return places if not num_keys or places[-1] == num_keys - 1 else [*places, num_keys - 1]


def _divide(span: Span) -> list[Span]:
    """At most 16 ranges of about equal length."""
    first, end = span
    size = -(-(end - first) // _NUM_RANGES)
    return [(start, min(start + size, end)) for start in range(first, end, size)]
