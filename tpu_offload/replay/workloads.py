"""Workloads for replay: generated chats, files of chat messages, and request traces.

All become the same thing, a list of conversations. A conversation is served one turn after the other;
the prompt of a turn is everything before it and the turn's own tokens. Tokens are bytes, with a few
special ids above for the roles, so that no tokenizer is needed.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpu_offload.errors import InputError
from tpu_offload.hashing import BlockHasher
from tpu_offload.sim.json_lines import parse_lines
from tpu_offload.sim.mooncake import MAX_LENGTH, parse_line, wrong
from tpu_offload.types import BlockHash

NUM_TOKENS = 261  # 256 byte values, then the special ids
_ROLES = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
_END = 260

_TRACE_BLOCK_TOKENS = 512  # tokens that one hash id of the Mooncake format stands for


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
      tokens: what the prompt adds to the history.
      max_tokens: length of the answer.
      answer: what the history holds in the answer's place; None for the tokens really generated.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    answer: tuple[int, ...] | None = None

    @property
    def answer_len(self) -> int:
        """Tokens that the answer adds to the history."""
        return self.max_tokens if self.answer is None else len(self.answer)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that share one growing history."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Tokens of each turn's prompt, the history included."""
        lens = []
        history = 0
        for turn in self.turns:
            history += len(turn.tokens)
            lens.append(history)
            history += turn.answer_len
        return tuple(lens)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with its generated answer."""
        return max(num + turn.max_tokens for num, turn in zip(self.prompt_lens, self.turns, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Conversations in the order in which they start."""

    name: str
    conversations: tuple[Conversation, ...]

    @property
    def num_requests(self) -> int:
        """Turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with its generated answer."""
        return max(conversation.longest_request for conversation in self.conversations)

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Tokens of each request's prompt."""
        return tuple(num for conversation in self.conversations for num in conversation.prompt_lens)

    def num_unique_blocks(self, block_size: int) -> int:
        """Blocks that a cache needs to keep everything; generated tokens count as shared by nobody."""
        hasher = BlockHasher(b"", block_size=block_size)
        seen: set[BlockHash] = set()
        num_unshared = 0
        for conversation in self.conversations:
            known: list[int] = []
            for turn in conversation.turns:
                known += turn.tokens
                if turn.answer is None:
                    break
                known += turn.answer
            hashes: list[BlockHash] = []
            hasher.extend(hashes, known)
            seen.update(hashes)
            num_unshared += -(-conversation.longest_request // block_size) - len(hashes)
        return len(seen) + num_unshared


def chat_workload(*, num_requests: int, turns: int, seed: int) -> Workload:
    """Generated conversations of `turns` turns each, over a few long system prompts.

    Every size is drawn from `seed`: system prompts of 192 to 320 tokens shared by about eight
    conversations each, user turns of 40 to 120 tokens, answers of 8 to 24.
    """
    rng = np.random.default_rng(seed)
    num_conversations = -(-num_requests // turns)

    def text(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.integers(32, 127, size=rng.integers(low, high + 1)).tolist())

    systems = [_message("system", text(192, 320)) for _ in range(-(-num_conversations // 8))]
    conversations = []
    for i in range(num_conversations):
        # The turns that do not divide evenly are missing from the last conversations, one each.
        num_turns = num_requests // num_conversations + (i < num_requests % num_conversations)
        opening = systems[int(rng.integers(len(systems)))]
        served = []
        for _ in range(num_turns):
            tokens = (*opening, *_message("user", text(40, 120)), _ROLES["assistant"])
            served.append(Turn(tokens, max_tokens=int(rng.integers(8, 25))))
            opening = (_END,)
        conversations.append(Conversation(f"chat-{i}", tuple(served)))
    return Workload("chat", tuple(conversations))


def decode_workload(*, num_requests: int, seed: int) -> Workload:
    """Questions with long answers, as of models that reason aloud: conversations of one turn with nothing in common.

    Every size is drawn from `seed`: prompts of 20 to 30 tokens, answers of eight to ten times the prompt. That is
    about a thirtieth of what a service would see, and so should be the blocks.
    """
    rng = np.random.default_rng(seed)
    conversations = []
    for i in range(num_requests):
        content = tuple(rng.integers(32, 127, size=rng.integers(17, 28)).tolist())
        prompt = (*_message("user", content), _ROLES["assistant"])
        max_tokens = int(len(prompt) * rng.uniform(8, 10))
        conversations.append(Conversation(f"decode-{i}", (Turn(prompt, max_tokens),)))
    return Workload("decode", tuple(conversations))


def prompts_workload(
    path: Path, *, num_requests: int | None, max_tokens: int, limit_tokens: int = MAX_LENGTH
) -> Workload:
    """Reads conversations, one a line: a list of `{"role", "content"}`, or `{"messages": [...]}`.

    Every user message is served as a request, with all before it as its prompt. Where the file has an
    assistant message next, the history goes on with that one; elsewhere with the answer really
    generated. Messages after the last user message are left out.

    Args:
      path: the file.
      num_requests: at most so many are read.
      max_tokens: tokens to generate a request.
      limit_tokens: no conversation may have more; it is counted before any token is made, which takes much memory.
    Raises:
      InputError: the file cannot be read, or a line is no such list or too long; the line is named.
    """
    conversations: list[Conversation] = []
    left = num_requests
    parse = functools.partial(_parse_messages, max_tokens=max_tokens, limit_tokens=limit_tokens)
    for number, turns in parse_lines(path, parse):
        turns = turns[:left]
        conversations.append(Conversation(f"line-{number}", turns))
        if left is not None and (left := left - len(turns)) == 0:
            break
    return _nonempty("prompts", path, conversations)


def trace_workload(
    path: Path, *, num_requests: int | None, tokens_per_block: int, seed: int, limit_tokens: int = MAX_LENGTH
) -> Workload:
    """Reads a trace in the Mooncake format, with 512 tokens scaled down to `tokens_per_block`.

    One object a line: `timestamp`, `input_length`, `output_length`, `hash_ids`. Each id becomes
    `tokens_per_block` pseudo-random tokens that depend on `seed` and the id alone, so prompts share
    prefixes exactly as they did. The last block is cut as `input_length` cuts it. The timestamps are
    checked and not used: requests are served in order. No request may have more than `limit_tokens`.

    Raises:
      InputError: the file cannot be read, or a line is no such object or too long; the line is named.
    """
    blocks: dict[int, tuple[int, ...]] = {}

    def block_tokens(hash_id: int) -> tuple[int, ...]:
        if hash_id not in blocks:
            rng = np.random.default_rng((seed, hash_id))
            blocks[hash_id] = tuple(rng.integers(0, 256, size=tokens_per_block).tolist())
        return blocks[hash_id]

    conversations: list[Conversation] = []
    parse = functools.partial(_parse_trace_request, tokens_per_block=tokens_per_block, limit_tokens=limit_tokens)
    for number, (num_prompt, num_answer, hash_ids) in parse_lines(path, parse):
        tokens = [token for hash_id in hash_ids for token in block_tokens(hash_id)][:num_prompt]
        conversations.append(Conversation(f"line-{number}", (Turn(tuple(tokens), max_tokens=num_answer),)))
        if len(conversations) == num_requests:
            break
    return _nonempty("trace", path, conversations)


def _message(role: str, content: tuple[int, ...]) -> tuple[int, ...]:
    return (_ROLES[role], *content, _END)


def _scaled(num_tokens: int, tokens_per_block: int) -> int:
    return max(1, -(-num_tokens * tokens_per_block // _TRACE_BLOCK_TOKENS))


def _nonempty(name: str, path: Path, conversations: list[Conversation]) -> Workload:
    if not conversations:
        raise InputError(f"{path} is empty; expected one JSON value a line")
    return Workload(name, tuple(conversations))


def _parse_messages(value: Any, *, max_tokens: int, limit_tokens: int) -> tuple[Turn, ...]:
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise ValueError('expected a list of messages, or an object with a list "messages"')
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f'message {i}: expected an object with the strings "role" and "content"')
        if message.get("role") not in list(_ROLES):
            raise ValueError(f"message {i}: role {message.get('role')!r}; expected one of {', '.join(_ROLES)}")
    num_tokens = sum(_num_bytes(message["content"]) for message in messages) + 2 * len(messages) + max_tokens
    _check_length("messages", num_tokens, limit_tokens)
    turns: list[Turn] = []
    pending: list[int] = []  # rendered, and in no prompt yet
    for i, message in enumerate(messages):
        content = tuple(message["content"].encode(errors="surrogatepass"))
        after_user = i > 0 and messages[i - 1]["role"] == "user"
        if message["role"] == "assistant" and after_user:  # the prompt before has the role already
            turns[-1] = dataclasses.replace(turns[-1], answer=(*content, _END))
            pending = []
            continue
        pending += _message(message["role"], content)
        if message["role"] == "user":
            turns.append(Turn((*pending, _ROLES["assistant"]), max_tokens))
            pending = [_END]  # closes the generated answer
    if not turns:
        raise ValueError("no message with the role user, so there is nothing to serve")
    return tuple(turns)


def _num_bytes(text: str) -> int:
    """Tokens of a text, without an object for each."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _check_length(what: str, num_tokens: int, limit_tokens: int) -> None:
    """Raises ValueError if a request has more tokens than can be served."""
    if num_tokens > limit_tokens:
        raise ValueError(
            f"{what} of {num_tokens} tokens, the answer included; expected at most {limit_tokens}, which is what HBM "
            "has room for"
        )


def _parse_trace_request(value: Any, *, tokens_per_block: int, limit_tokens: int) -> tuple[int, int, Sequence[int]]:
    """Tokens of the prompt and of the answer, scaled down, and the ids of the prompt's blocks."""
    line = parse_line(value)
    if not line.input_length:
        raise wrong(value, "input_length", f"a number of tokens, from 1 to {MAX_LENGTH}")
    if line.output_length is None:
        raise wrong(value, "output_length", f"a number of tokens, from 0 to {MAX_LENGTH}")
    hash_ids = [hash_id for hash_id in line.hash_ids if isinstance(hash_id, int)]
    if len(hash_ids) < len(line.hash_ids):
        raise wrong(value, "hash_ids", "a list of numbers of at least 0, one a block")
    expected = -(-line.input_length // _TRACE_BLOCK_TOKENS)
    if len(hash_ids) != expected:
        raise ValueError(
            f"{len(hash_ids)} hash_ids for input_length={line.input_length}; expected {expected}, one for each "
            f"{_TRACE_BLOCK_TOKENS} tokens"
        )
    num_prompt, num_answer = (_scaled(num, tokens_per_block) for num in (line.input_length, line.output_length))
    _check_length("a request", num_prompt + num_answer, limit_tokens)
    return num_prompt, num_answer, hash_ids
