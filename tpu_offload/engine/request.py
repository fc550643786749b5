"""Inputs and outputs of the engine."""

import dataclasses
import enum
import numbers

from tpu_offload import RequestError, RequestLimits

_MAX_FLOAT = 3.4e38  # of float32, in which the device divides by temperatures


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. A token depends on the seed, its position and the logits, on nothing else.

    Attributes:
      max_tokens: tokens to generate at most.
      temperature: 0 for greedy.
      top_k: sample from the k most likely tokens; 0 for all.
      seed: of the request's random draws, 0 to 2**32 - 1.
      stop_token_ids: generation ends with any of these.
      n: number of samples of the prompt. They share its blocks; sample i draws like a separate request with seed + i.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed", "n"):
            if not _is_integer(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)!r:.60}; expected an integer")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens}; expected at least 1")
        if not (_is_number(self.temperature) and 0.0 <= self.temperature <= _MAX_FLOAT):
            raise ValueError(f"temperature={self.temperature!r:.60}; expected 0 (greedy) or a positive float32")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k}; expected 0 (all tokens) or a positive number below {2**31}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}; expected 0 to {2**32 - 1}")
        if not (isinstance(self.stop_token_ids, (tuple, list)) and all(map(_is_integer, self.stop_token_ids))):
            raise ValueError(f"stop_token_ids={self.stop_token_ids!r:.60}; expected a tuple of token ids")
        if self.n < 1:
            raise ValueError(f"n={self.n}; expected at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      request_id: unique among unfinished requests.
      prompt_tokens: token ids.
      sampling: how to continue, and for how long.
      cache_salt: requests share KV only under equal salts.
      limits: what the host tier may do for it. HBM's own prefix cache serves it in any case.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""
    limits: RequestLimits = dataclasses.field(default_factory=RequestLimits)

    def check(self, vocab_size: int) -> None:
        """Checks what a step or a copy would stumble over, at the cost of all other requests.

        Raises:
          RequestError: the id is no text, a token is not in the vocabulary, or the sampling, cache_salt or limits are
            not valid.
        """
        if not isinstance(self.request_id, str):
            raise RequestError(f"the request_id is {self.request_id!r:.60}; expected text")
        what = f"request {self.request_id:.60}"
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError(f"{what} has sampling {self.sampling!r:.60}; expected SamplingParams")
        if not isinstance(self.limits, RequestLimits | None):
            raise RequestError(f"{what} has limits {self.limits!r:.60}; expected RequestLimits")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"{what} has a cache_salt of {self.cache_salt!r:.60}; expected text")
        try:
            self.cache_salt.encode()
        except UnicodeEncodeError as e:
            raise RequestError(f"{what} has a cache_salt that is not valid text: {e}") from e
        try:
            kinds = set(map(type, self.prompt_tokens))
        except TypeError as e:
            raise RequestError(f"{what} has a prompt of {self.prompt_tokens!r:.60}; expected token ids") from e
        if strange := [kind for kind in kinds if not issubclass(kind, numbers.Integral)]:
            raise RequestError(f"{what} has tokens of type {strange[0].__name__}; expected integers")
        if unknown := [token for token in self.prompt_tokens if not 0 <= token < vocab_size]:
            raise RequestError(f"{what} has token {unknown[0]}; expected 0 to {vocab_size - 1}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real)


def _is_integer(value: object) -> bool:
    """Also of numpy."""
    return isinstance(value, numbers.Integral)


class FinishReason(enum.Enum):
    """Why a request ended."""

    LENGTH = "length"  # max_tokens were generated
    STOP = "stop"  # a stop token was generated
    ABORTED = "aborted"  # by `Engine.abort`
    ERROR = "error"  # it could never be served; see RequestOutput.error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Where the KV of prompt tokens came from. A prompt served again after a preemption counts again.

    Attributes:
      computed: by the model.
      hbm: found in the HBM prefix cache.
      host: loaded by the offload library.
    """

    computed: int = 0
    hbm: int = 0
    host: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """Statistics of one request; times are by the engine's clock.

    Attributes:
      arrival_s: time of `add_request`.
      first_token_s: time of its first token; None if it ended without one.
      finish_s: time of its end.
      prompt_tokens: where the KV of its prompt came from.
      num_preemptions: number of preemptions.
      num_swaps: number of preemptions that swapped its KV out instead of recomputing it.
    """

    arrival_s: float
    first_token_s: float | None
    finish_s: float
    prompt_tokens: PromptTokens
    num_preemptions: int
    num_swaps: int = 0

    @property
    def completion_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.finish_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to first token; None if it ended without one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The output of one step for one sample of a request.

    Attributes:
      request_id: the request.
      tokens: all tokens generated so far.
      finish_reason: None while it is unfinished.
      error: why it could not be served, in one line; empty unless `finish_reason` is ERROR.
      stats: present when it ended.
      index: index of the sample, 0 to n - 1.
      logprobs: for each of `tokens` the natural logarithm of its probability, before temperature and top_k.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""
    stats: RequestStats | None = None
    index: int = 0
    logprobs: tuple[float, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether this is the sample's last output."""
        return self.finish_reason is not None
