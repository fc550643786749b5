"""Talks to a `vllm serve` over the OpenAI API, as chats do: streams, conversations, clients that go away."""

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
    """A request that was answered with an error, or whose stream ended with one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
      tokens: what was generated.
      prompt_tokens: length of the prompt.
      cached_tokens: of these, those that were found in HBM or in the host tier.
      first_s: seconds to the first token.
      finish: vLLM's finish reason; "gone" if we hung up.
      top_logprobs: of the first token, by token text; empty unless asked for.
    """

    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    first_s: float
    finish: str
    top_logprobs: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Conversations: each turn sends all that was said, and waits for the answer.

    Attributes:
      conversations: how many there are.
      turns: of each.
      concurrency: requests at a time.
      first: tokens of a first prompt.
      answer: tokens of each answer.
      more: tokens that each later turn adds.
      shared: of the first prompt, those that all conversations begin with.
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
    """A connection pool to one server; an asynchronous context manager."""

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
        self, prompt: Sequence[int], *, answer: int = 16, hang_up_after: int | None = None, **body: Any
    ) -> Answer:
        """Has a prompt of token ids continued greedily, by streaming.

        Args:
          prompt: its tokens.
          answer: tokens to generate.
          hang_up_after: closes the connection after so many tokens; 0 does so when the stream begins.
          body: further fields of the request.

        Raises:
          RequestFailed: the server says so.
        """
        fields = {"model": MODEL, "prompt": list(prompt), "max_tokens": answer, "temperature": 0, "ignore_eos": True}
        fields |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        start_s, first_s, finish, top = time.perf_counter(), 0.0, "", {}
        assert self._session is not None
        async with self._session.post(f"{self._url}/v1/completions", json=fields | body) as response:
            if response.status != 200:
                raise RequestFailed(f"{response.status}: {(await response.text())[:500]}")
            gone = hang_up_after == 0
            async for event in _events(response) if not gone else _nothing():
                if "error" in event:
                    raise RequestFailed(json.dumps(event)[:500])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    first_s = first_s or time.perf_counter() - start_s
                    tokens += choice.get("token_ids") or ()
                    finish = choice.get("finish_reason") or finish
                    if choice.get("logprobs"):
                        top = top or choice["logprobs"]["top_logprobs"][0]
                if hang_up_after is not None and len(tokens) >= hang_up_after and not finish:
                    gone = True
                    break
            if gone:
                response.close()
                return Answer(tokens, len(prompt), 0, first_s, "gone", top)
        if finish in ("", "error"):
            raise RequestFailed(f"the stream ended with finish reason {finish!r} after {len(tokens)} tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(tokens, usage["prompt_tokens"], cached, first_s, finish, top)

    async def converse(self, load: Load, *, seed: int, **body: Any) -> list[Turn]:
        """All conversations of a load; the turns by conversation and turn."""
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
    """What one user says, turn by turn, for ever."""
    common, own = random.Random(seed), random.Random(f"{seed}/{number}")
    said = words(common, load.shared) + words(own, load.first - load.shared)
    while True:
        yield said
        said = words(own, load.more)


def words(source: random.Random, count: int) -> list[int]:
    """So many tokens; none is special."""
    return [source.randrange(3, 1000) for _ in range(count)]


def answers(turns: Sequence[Turn]) -> dict[tuple[int, int], list[int]]:
    """What was generated, by conversation and turn."""
    return {(turn.conversation, turn.turn): turn.answer.tokens for turn in turns}


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if line.startswith(b"data:") and b"[DONE]" not in line:
            yield json.loads(line[5:])


async def _nothing() -> AsyncIterator[dict[str, Any]]:
    for event in ():
        yield event
