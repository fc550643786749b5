"""A request as the scheduler sees it: its tokens, its blocks and how far it is."""

import dataclasses
import enum

from tpu_offload import BlockHash
from tpu_offload.engine.request import FinishReason, PromptTokens, Request, RequestOutput, RequestStats


class Phase(enum.Enum):
    """Where a sequence is. LOADING and RUNNING ones hold blocks, the others do not."""

    WAITING = "waiting"  # new, or preempted
    LOADING = "loading"  # waits for KV from the host while others run
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """One unfinished request.

    Attributes:
      request: what was asked for.
      arrival_s: when.
      tokens: prompt and generated tokens. The KV of the last one is computed by the step that samples
        the next.
      phase: where it is.
      block_ids: its blocks, in token order.
      block_hashes: hashes of its full blocks, in token order.
      num_computed_tokens: leading tokens whose KV is in the blocks.
      num_loading_tokens: tokens after those that are on their way from the host, while LOADING.
      next_offer_tokens: computed tokens from which on there is something new to offer for saving.
      prompt_tokens: where the KV of its prompt came from so far.
      num_preemptions: how often its blocks were taken back.
      first_token_s: when its first token was sampled; None before.
    """

    request: Request
    arrival_s: float
    tokens: list[int]
    phase: Phase = Phase.WAITING
    block_ids: list[int] = dataclasses.field(default_factory=list)
    block_hashes: list[BlockHash] = dataclasses.field(default_factory=list)
    num_computed_tokens: int = 0
    num_loading_tokens: int = 0
    next_offer_tokens: int = 0
    prompt_tokens: PromptTokens = dataclasses.field(default_factory=PromptTokens)
    num_preemptions: int = 0
    first_token_s: float | None = None

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_tokens)

    @property
    def output_tokens(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[self.num_prompt_tokens :])

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
        """Why its last token ended it; None if it goes on."""
        sampling = self.request.sampling
        if self.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        done = len(self.tokens) - self.num_prompt_tokens >= sampling.max_tokens
        return FinishReason.LENGTH if done else None

    def output(self) -> RequestOutput:
        """What to tell while it goes on."""
        return RequestOutput(self.request_id, self.output_tokens)

    def final_output(self, reason: FinishReason, *, now_s: float, error: str = "") -> RequestOutput:
        """What to tell at its end."""
        stats = RequestStats(
            self.arrival_s,
            self.first_token_s,
            now_s,
            prompt_tokens=self.prompt_tokens,
            num_preemptions=self.num_preemptions,
        )
        return RequestOutput(self.request_id, self.output_tokens, reason, error, stats)
