"""The scheduler's state of one sample of a request: tokens, blocks and progress."""

import dataclasses
import enum
from typing import NamedTuple

from tpu_offload import BlockHash, RequestLimits
from tpu_offload.engine.block_manager import NULL_BLOCK
from tpu_offload.engine.request import FinishReason, PromptTokens, Request, RequestOutput, RequestStats, SamplingParams


class Phase(enum.Enum):
    """The phase of a sequence. LOADING, RETURNING and RUNNING sequences hold blocks, the others do not."""

    FORKED = "forked"  # waits for another sample of its request to compute the prompt
    WAITING = "waiting"  # new, or preempted without swap: nothing is computed
    SWAPPED = "swapped"  # preempted, with its KV in host memory
    LOADING = "loading"  # waits for a load from the host tier
    RETURNING = "returning"  # waits to be swapped in
    RUNNING = "running"
    FINISHED = "finished"

    @property
    def holds_blocks(self) -> bool:
        """Whether it has a block table."""
        return self in (Phase.LOADING, Phase.RETURNING, Phase.RUNNING)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """The sequence that computed a cached block, as far as saves need it.

    Attributes:
      block_hashes: hashes of its full blocks; shared with the sequence, which extends it.
      num_prompt_tokens: length of its prompt.
      limits: limits of its request.
    """

    block_hashes: list[BlockHash]
    num_prompt_tokens: int
    limits: RequestLimits


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One unfinished sample of a request.

    Attributes:
      request: the request.
      arrival_s: its arrival time.
      tokens: prompt and generated tokens. The KV of the last one is computed by the step that samples
        the next.
      index: index of the sample.
      arrival: position in the order of all requests.
      phase: its phase.
      block_tables: per layer group with attention, its blocks by position, and the null block where a window has left
        one behind; empty while it holds no blocks.
      states: in a model with states, rows of the state arrays by position, see `state_rows`; empty while it holds none.
      junctions: numbers of tokens, multiples of the block size, at which its state is to be kept, beside those at the
        ends of its prompt and of what it has computed: where other prompts part from it.
      block_hashes: hashes of its full blocks, in token order.
      num_computed_tokens: leading tokens whose KV is computed by the steps dispatched so far: in its blocks, or
        swapped out.
      num_in_flight: steps in flight that sample one of its tokens: one between steps, two while the next is chosen.
      is_stale: whether some of that KV predates a reset of the cache. The sequence and samples of its prompt may use
        it, later requests may not.
      num_loading_tokens: tokens after the computed ones that are being loaded, while LOADING.
      next_offer_tokens: number of computed tokens at which there is a new block to offer for saving.
      prompt_tokens: where the KV of its prompt came from so far.
      logprobs: log-probabilities of its generated tokens.
      num_preemptions: number of preemptions.
      num_swaps: number of preemptions that swapped its KV out.
      first_token_s: when its first token was sampled; None before.
      leader: the sample that computes its prompt.
      forks: samples that wait for it to do so.
      sampling: how its tokens are chosen.
      origin: recorded with its blocks in the prefix cache.
    """

    request: Request
    arrival_s: float
    tokens: list[int]
    index: int = 0
    arrival: int = 0
    phase: Phase = Phase.WAITING
    block_tables: list[list[int]] = dataclasses.field(default_factory=list)
    states: dict[int, int] = dataclasses.field(default_factory=dict)
    junctions: set[int] = dataclasses.field(default_factory=set)
    block_hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    is_stale: bool = False
    num_loading_tokens: int = 0
    next_offer_tokens: int = 0
    prompt_tokens: PromptTokens = dataclasses.field(default_factory=PromptTokens)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    num_preemptions: int = 0
    num_swaps: int = 0
    first_token_s: float | None = None
    leader: "Sequence | None" = None
    forks: list["Sequence"] = dataclasses.field(default_factory=list)
    sampling: SamplingParams = dataclasses.field(init=False)
    origin: Origin = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.origin = Origin(self.block_hashes, self.num_prompt_tokens, self.request.limits)
        sampling = self.request.sampling
        seed = (sampling.seed + self.index) % 2**32
        self.sampling = dataclasses.replace(sampling, seed=seed) if self.index else sampling

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def sequence_id(self) -> str:
        """A unique id of the sample; the first one has the request's id."""
        return sample_id(self.request_id, self.index)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key, from older to newer sequences."""
        return self.arrival, self.index

    @property
    def state_table(self) -> list[int]:
        """Its rows of the state arrays as a block table: by position, with null blocks where it holds none."""
        table = [NULL_BLOCK] * (max(self.states, default=-1) + 1)
        for position, row in self.states.items():
            table[position] = row
        return table

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that are known or in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.num_prompt_tokens :])

    @property
    def num_next_tokens(self) -> int:
        """Tokens that the next step can compute; 0 if it will end with a token that is in flight."""
        if self.num_in_flight and self.num_tokens - self.num_prompt_tokens >= self.request.sampling.max_tokens:
            return 0
        return self.num_tokens - self.num_computed_tokens

    def advance(self, num_tokens: int, *, source: str) -> None:
        """Counts the next `num_tokens` as computed, and where their KV came from.

        Args:
          num_tokens: how many.
          source: a field of `PromptTokens`.
        """
        before = min(self.num_computed_tokens, self.num_prompt_tokens)
        self.num_computed_tokens += num_tokens
        num_prompt = min(self.num_computed_tokens, self.num_prompt_tokens) - before
        counted = getattr(self.prompt_tokens, source) + num_prompt
        self.prompt_tokens = dataclasses.replace(self.prompt_tokens, **{source: counted})

    def finish_reason(self) -> FinishReason | None:
        """Why it has ended with its last token; None if it has not."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        done = len(self.tokens) - self.num_prompt_tokens >= sampling.max_tokens
        return FinishReason.LENGTH if done else None

    def output(self) -> RequestOutput:
        """The output while it is unfinished."""
        return RequestOutput(
            request_id=self.request_id, tokens=self.output_tokens, index=self.index, logprobs=tuple(self.logprobs)
        )

    def final_output(self, reason: FinishReason, *, now_s: float, error: str = "") -> RequestOutput:
        """The output at its end."""
        stats = RequestStats(
            arrival_s=self.arrival_s,
            first_token_s=self.first_token_s,
            finish_s=now_s,
            prompt_tokens=self.prompt_tokens,
            num_preemptions=self.num_preemptions,
            num_swaps=self.num_swaps,
        )
        return dataclasses.replace(self.output(), finish_reason=reason, error=error, stats=stats)


class ScheduledTokens(NamedTuple):
    """The tokens of one sequence that a step computes.

    Attributes:
      sequence: the sequence.
      start: position of the first token.
      num_tokens: number of tokens.
      samples: whether the step samples the next token, because these are the last known ones.
      state_rows: in a model with states, the rows that the step reads and writes, see `TokenSpan`.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    state_rows: tuple[int, int] = (NULL_BLOCK, NULL_BLOCK)

    @property
    def end(self) -> int:
        """Number of computed tokens after the step."""
        return self.start + self.num_tokens


def sample_id(request_id: str, index: int) -> str:
    """Names one sample of a request."""
    return request_id if index == 0 else f"{request_id}#{index}"
