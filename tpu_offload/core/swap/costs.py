"""Is a swap faster than recompute? Answered from measured rates."""

import statistics
from collections import deque
from typing import final

from tpu_offload.config import SwapMode
from tpu_offload.types import Direction

_MEMORY = 9  # measurements of a rate that count
_SECOND_LOOK = 16  # of so many decisions against swapping, one is made the other way, to measure it again


class _Rate:
    """Units a second: the median of the last measurements, so that one which met a compile or a stall does no harm."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_MEMORY)

    def add(self, amount: float, seconds: float) -> None:
        self._rates.append(amount / seconds)

    @property
    def per_s(self) -> float:
        """0 before anything was measured."""
        return statistics.median(self._rates) if self._rates else 0.0


@final
class SwapCosts:
    """Compares the time to copy a request's blocks out and back with the time to compute them again.

    Until all three rates are measured, swapping is preferred: it is what measures two of them.

    Args:
      mode: AUTO compares; the others always have the same answer.
    """

    def __init__(self, mode: SwapMode) -> None:
        self._mode = mode
        self._copies = {direction: _Rate() for direction in Direction}
        self._prefill = _Rate()
        self._num_against = 0

    def observe_copy(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """A copy of so many bytes out (SAVE) or back (LOAD) took so long; times that were not measured are 0."""
        if seconds > 0 and nbytes > 0:
            self._copies[direction].add(nbytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts in so long."""
        if num_tokens > 0 and seconds > 0:
            self._prefill.add(num_tokens, seconds)

    def nbytes_per_s(self, direction: Direction) -> float:
        """The measured rate of copies; 0 if there is none."""
        return self._copies[direction].per_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """The measured rate of recompute; 0 if there is none."""
        return self._prefill.per_s

    def prefers_swap(self, *, nbytes_out: int, nbytes_in: int, num_recompute_tokens: int) -> bool:
        """Whether to swap a request out.

        Args:
          nbytes_out: to be copied out.
          nbytes_in: to be copied back.
          num_recompute_tokens: to be computed otherwise.
        """
        if self._mode is not SwapMode.AUTO:
            return self._mode is SwapMode.SWAP
        rates = *(self.nbytes_per_s(direction) for direction in Direction), self.prefill_tokens_per_s
        if min(rates) == 0:
            return True
        out_per_s, in_per_s, tokens_per_s = rates
        if nbytes_out / out_per_s + nbytes_in / in_per_s <= num_recompute_tokens / tokens_per_s:
            return True
        self._num_against += 1
        return self._num_against % _SECOND_LOOK == 0
