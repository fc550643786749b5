"""What vLLM's requests offer to save: those that complete a block in a step, in the library's terms.

A block may be saved when it has a hash and the step computes all of it; for the latter every draft counts as accepted.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tpu_offload import ScheduledRequest
from tpu_offload.adapters.vllm.block_tables import NULL_BLOCK
from tpu_offload.adapters.vllm.event_sources import BlockSources
from tpu_offload.adapters.vllm.lora_hashes import LoRAHashes
from tpu_offload.adapters.vllm.messages import KnownTokens

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclasses.dataclass(slots=True)
class ActiveRequest:
    """A request that holds blocks.

    Attributes:
      request: vLLM's request.
      next_offer_tokens: with this many computed tokens there is a new block to save.
      num_sent_tokens: leading tokens that the workers need not compare any more: the prompt, and those sent to them.
    """

    request: "Request"
    next_offer_tokens: int = 0
    num_sent_tokens: int = 0


@final
class Offers:
    """The active requests that may have something new to save. Most requests only decode, and cost nothing per step.

    Args:
      block_size: tokens in a block.
      decode_save: whether blocks of generated tokens are offered.
      group_order: vLLM's KV cache groups in the library's order, of those with states only one, the last.
      state_groups: all that have states.
      retains_all_states: vLLM keeps each state that it computes at a block boundary.
      event_sources: is told of each request that offers, for KV events.
      hashes: the hashes of a request's blocks.
    """

    def __init__(
        self,
        *,
        block_size: int,
        decode_save: bool,
        group_order: Sequence[int],
        state_groups: Sequence[int],
        retains_all_states: bool,
        event_sources: BlockSources | None,
        hashes: LoRAHashes,
    ) -> None:
        self._block_size = block_size
        self._decode_save = decode_save
        self._group_order = tuple(group_order)
        self._is_reordered = self._group_order != (0,)
        self._state_groups = state_groups
        self._retains_all_states = retains_all_states
        self._event_sources = event_sources
        self._hashes = hashes
        self._offering: dict[str, ActiveRequest] = {}
        self._known_tokens: list[KnownTokens] = []  # for the next message

    def add(self, entry: ActiveRequest) -> None:
        """A request offers its blocks from now on."""
        self._offering[entry.request.request_id] = entry

    def remove(self, request_id: str) -> None:
        """It offers nothing any more."""
        self._offering.pop(request_id, None)

    def ordered(self, block_tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """vLLM's block tables in the order of the library's layer groups."""
        return [block_tables[i] for i in self._group_order] if self._is_reordered else block_tables

    def of_step(self, output: "SchedulerOutput") -> list[ScheduledRequest]:
        """The requests that complete a block in this step, for `plan_step`."""
        changed = []
        num_scheduled, tables = output.num_scheduled_tokens, output.kv_connector_block_state
        states = tables.boundary_state_offloads if self._state_groups and tables is not None else {}
        for request_id, entry in list(self._offering.items()):
            num_scheduled_tokens = num_scheduled.get(request_id)
            if num_scheduled_tokens is None:
                continue
            num_computed_tokens = entry.request.num_computed_tokens + num_scheduled_tokens
            if num_computed_tokens >= entry.next_offer_tokens or request_id in states:
                assert tables is not None, "a step without block tables"
                block_tables = self.ordered(tables.resolve_block_ids(request_id))
                offered = self._offer(entry, block_tables, num_computed_tokens)
                if self._state_groups:
                    offered = self._with_states(offered, states.get(request_id, ()))
                changed.append(offered)
        return changed

    def take_known_tokens(self) -> tuple[KnownTokens, ...]:
        """Tokens in offered blocks that the workers do not have yet, since the last call."""
        known, self._known_tokens = tuple(self._known_tokens), []
        return known

    def _with_states(self, offered: ScheduledRequest, states: Iterable[tuple[int, int, int]]) -> ScheduledRequest:
        """A request with the rows that have its states after this step: those that vLLM names, and no others.

        A row of vLLM's block table has the state of the tokens computed so far, not that of its place in the table.

        Args:
          offered: as in vLLM's block tables.
          states: KV cache group, row and boundary in tokens.
        """
        table, retained = [NULL_BLOCK] * len(offered.block_tables[0]), []
        for group, row, num_tokens in states:
            is_at_block = num_tokens % self._block_size == 0 and 0 < num_tokens <= len(table) * self._block_size
            if group == self._group_order[-1] and is_at_block:
                table[num_tokens // self._block_size - 1] = row
                retained.append(num_tokens)
        return dataclasses.replace(
            offered,
            block_tables=[*offered.block_tables[:-1], table],
            retained_tokens=() if self._retains_all_states else retained,
        )

    def _offer(
        self, entry: ActiveRequest, block_tables: Sequence[Sequence[int]], num_computed_tokens: int
    ) -> ScheduledRequest:
        request, size = entry.request, self._block_size
        num_offered = min(num_computed_tokens // size, len(request.block_hashes))
        entry.next_offer_tokens = (num_offered + 1) * size
        if not self._decode_save and entry.next_offer_tokens > request.num_prompt_tokens:
            del self._offering[request.request_id]
        if self._event_sources is not None:
            self._event_sources.track(request)
        num_tokens = num_offered * size
        if num_tokens > entry.num_sent_tokens:
            first, entry.num_sent_tokens = entry.num_sent_tokens, num_tokens
            self._known_tokens.append(
                KnownTokens(
                    request_id=request.request_id, first=first, token_ids=tuple(request.all_token_ids[first:num_tokens])
                )
            )
        return ScheduledRequest(
            request_id=request.request_id,
            block_tables=block_tables,
            block_hashes=self._hashes.of(request),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed_tokens,
        )
