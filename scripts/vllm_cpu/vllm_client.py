"""A client of `vllm serve` for chats over the OpenAI API: streaming, conversations, disconnects."""

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from scripts.vllm_cpu.vllm_server import MODEL

_LIMIT = aiohttp.ClientTimeout(total=600)


class RequestFailed(Exception):
    """The server answered a request with an error, or ended its stream with one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request.

    Attributes:
      tokens: generated tokens.
      prompt_tokens: length of the prompt.
      cached_tokens: prompt tokens found in HBM or in the host tier.
      first_s: seconds to the first token.
      finish: vLLM's finish reason; "disconnected" if the client closed the connection.
      top_logprobs: of the first token, by token text; empty unless requested.
    """

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    finish: str
    top_logprobs: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load of conversations: each turn sends the whole history and waits for the answer.

    Attributes:
      conversations: number of conversations.
      turns: turns per conversation.
      concurrency: number of requests in flight.
      first: tokens in the first prompt.
      answer: tokens in each answer.
      more: tokens that each later turn adds.
      shared: leading tokens of the first prompt that all conversations share.
    """

    conversations: int = 12
    turns: int = 6
    concurrency: int = 4
    first: int = 120
    answer: int = 16
    more: int = 30
    shared: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    conversation: int
    turn: int
    prompt: list[int]
    answer: Answer


class Client:
    """A connection pool to one server; an async context manager."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(timeout=_LIMIT, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(
        self, prompt: Sequence[int], *, answer: int = 16, disconnect_after: int | None = None, **body: Any
    ) -> Answer:
        """Generates greedily from a prompt of token ids, streaming.

        Args:
          prompt: token ids.
          answer: tokens to generate.
          disconnect_after: closes the connection after this many tokens; 0 closes it when the stream begins.
          body: additional fields of the request.

        Raises:
          RequestFailed: the server reported an error.
        """
        fields = {"model": MODEL, "prompt": list(prompt), "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        fields |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        top: Mapping[str, float] = {}
        start_s, first_s, finish = time.perf_counter(), 0.0, ""
        assert self._session is not None
        async with self._session.post(f"{self._url}/v1/completions", json=fields | body) as response:
            if response.status != 200:
                raise RequestFailed(f"{response.status}: {(await response.text())[:500]}")
            disconnected = disconnect_after == 0
            async for event in _events(response) if not disconnected else _nothing():
                if "error" in event:
                    raise RequestFailed(json.dumps(event)[:500])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    first_s = first_s or time.perf_counter() - start_s
                    tokens += choice.get("token_ids") or ()
                    finish = choice.get("finish_reason") or finish
                    if choice.get("logprobs"):
                        top = top or choice["logprobs"]["top_logprobs"][0]
                if disconnect_after is not None and len(tokens) >= disconnect_after and not finish:
                    disconnected = True
                    break
            if disconnected:
                response.close()
                return Answer(tokens, len(prompt), 0, first_s, "disconnected", top)
        if finish in ("", "error"):
            raise RequestFailed(f"the stream ended with finish reason {finish!r} after {len(tokens)} tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(tokens, usage["prompt_tokens"], cached, first_s, finish, top)

    async def converse(self, load: Load, *, seed: int, **body: Any) -> list[Turn]:
        """Runs all conversations of a load; returns the turns, ordered by conversation and turn."""
        slots = asyncio.Semaphore(load.concurrency)

        async def one(number: int) -> list[Turn]:
            turns: list[Turn] = []
            talk = conversation(load, seed, number)
            said: list[int] = []
            for turn in range(load.turns):
                said = said + next(talk)
                async with slots:
                    answer = await self.complete(said, answer=load.answer, **body)
                turns.append(Turn(number, turn, said, answer))
                said = said + answer.tokens
            return turns

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number)) for number in range(load.conversations)]
        return [turn for task in tasks for turn in task.result()]


def conversation(load: Load, seed: int, number: int) -> Any:
    """Yields one user's messages, turn by turn, without end."""
    common, own = random.Random(seed), random.Random(f"{seed}/{number}")
    said = words(common, load.shared) + words(own, load.first - load.shared)
    while True:
        yield said
        said = words(own, load.more)


def words(source: random.Random, count: int) -> list[int]:
    """`count` random tokens, none of them special."""
    return [source.randrange(3, 1000) for _ in range(count)]


def answers(turns: Sequence[Turn]) -> dict[tuple[int, int], list[int]]:
    """Generated tokens by conversation and turn."""
    return {(turn.conversation, turn.turn): turn.answer.tokens for turn in turns}


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data:") and b"[DONE]" not in line:
            yield json.loads(line[5:])


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    no_events: tuple[dict[str, Any], ...] = ()
    for event in no_events:
        yield event
