"""Chooses between swap and recompute by measured rates."""

import statistics
from collections import deque
from typing import final

from tpu_offload.config import SwapMode
from tpu_offload.types import Direction

_NUM_MEASUREMENTS = 9  # the latest of each rate count
_PROBE_EVERY = 16  # one in 16 decisions against swap is reversed, to measure the rates again


class _Rate:
    """Units per second: the median of the last measurements, so one with a compile or a stall in it has no effect."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_NUM_MEASUREMENTS)

    def add(self, amount: float, seconds: float) -> None:
        self._rates.append(amount / seconds)

    @property
    def per_s(self) -> float:
        """0 before the first measurement."""
        return statistics.median(self._rates) if self._rates else 0.0


@final
class SwapCosts:
    """Compares the time to copy a request's blocks out and back with the time to recompute them.

    Until all three rates are measured it prefers swap, which measures two of them.

    Args:
      mode: AUTO compares; the others force one choice.
    """

    def __init__(self, mode: SwapMode) -> None:
        self._mode = mode
        self._copies = {direction: _Rate() for direction in Direction}
        self._prefill = _Rate()
        self._num_against = 0

    def observe_copy(self, direction: Direction, nbytes: int, seconds: float) -> None:
        """Records a copy out (SAVE) or back (LOAD); 0 seconds means not measured."""
        if seconds > 0 and nbytes > 0:
            self._copies[direction].add(nbytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records how long the engine took to compute prompt tokens."""
        if num_tokens > 0 and seconds > 0:
            self._prefill.add(num_tokens, seconds)

    def nbytes_per_s(self, direction: Direction) -> float:
        """The measured copy rate; 0 if there is none."""
        return self._copies[direction].per_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """The measured prefill rate; 0 if there is none."""
        return self._prefill.per_s

    def prefers_swap(self, *, nbytes_out: int, nbytes_in: int, num_recompute_tokens: int) -> bool:
        """Whether to swap a request out.

        Args:
          nbytes_out: bytes to copy out.
          nbytes_in: bytes to copy back.
          num_recompute_tokens: tokens to compute again otherwise.
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
        return self._num_against % _PROBE_EVERY == 0
