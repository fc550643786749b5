"""Workloads for replay: generated requests, files of chat messages, and request traces.

Each becomes a list of conversations. A conversation is served turn by turn; the prompt of a turn is the history plus
the turn's own tokens. Tokens are bytes, with a few special ids for the roles, so that no tokenizer is needed.
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

_TRACE_BLOCK_TOKENS = 512  # tokens per hash id in the Mooncake format


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
      tokens: tokens that the prompt adds to the history.
      max_tokens: length of the generated answer.
      answer: tokens that the history continues with; None for the generated answer.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    answer: tuple[int, ...] | None = None

    @property
    def answer_len(self) -> int:
        """Number of tokens that the answer adds to the history."""
        return self.max_tokens if self.answer is None else len(self.answer)


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """Turns with a common, growing history."""

    name: str
    turns: tuple[Turn, ...]

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Length of each turn's prompt, including the history."""
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
        """Number of turns of all conversations."""
        return sum(len(conversation.turns) for conversation in self.conversations)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with its generated answer."""
        return max(conversation.longest_request for conversation in self.conversations)

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """Length of each request's prompt."""
        return tuple(num for conversation in self.conversations for num in conversation.prompt_lens)

    def num_unique_blocks(self, block_size: int) -> int:
        """Number of blocks that an unlimited cache would hold; generated tokens count as unshared."""
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
    """Generates conversations of `turns` turns each, with a few long shared system prompts.

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
        # If the turns do not divide evenly, the last conversations have one turn less.
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
    """Generates questions with long answers, like those of reasoning models: single turns that share nothing.

    Every size is drawn from `seed`: prompts of 20 to 30 tokens, answers of eight to ten times the prompt. That is about
    a thirtieth of the sizes in a real service; scale the blocks likewise.
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
    """Reads conversations, one per line: a list of `{"role", "content"}`, or `{"messages": [...]}`.

    Every user message is a request whose prompt is the conversation so far. If the next message is an assistant
    message, the history continues with it, otherwise with the generated answer. Messages after the last user message
    are ignored.

    Args:
      path: the file.
      num_requests: maximum number of requests.
      max_tokens: tokens to generate per request.
      limit_tokens: most tokens of a conversation; checked before tokenization, which takes much memory.
    Raises:
      InputError: the file cannot be read, or a line (named in the message) is invalid or too long.
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

    One object per line: `timestamp`, `input_length`, `output_length`, `hash_ids`. Each id becomes `tokens_per_block`
    pseudo-random tokens that depend only on `seed` and the id, so prompts share the same prefixes as in the trace. The
    last block is truncated according to `input_length`. The timestamps are checked but not used: requests are served in
    order. No request may have more than `limit_tokens`.

    Raises:
      InputError: the file cannot be read, or a line (named in the message) is invalid or too long.
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
        raise InputError(f"{path} is empty; expected one JSON value per line")
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
    pending: list[int] = []  # rendered, not yet part of a prompt
    for i, message in enumerate(messages):
        content = tuple(message["content"].encode(errors="surrogatepass"))
        after_user = i > 0 and messages[i - 1]["role"] == "user"
        if message["role"] == "assistant" and after_user:  # the previous prompt ends with the role
            turns[-1] = dataclasses.replace(turns[-1], answer=(*content, _END))
            pending = []
            continue
        pending += _message(message["role"], content)
        if message["role"] == "user":
            turns.append(Turn((*pending, _ROLES["assistant"]), max_tokens))
            pending = [_END]  # closes the generated answer
    if not turns:
        raise ValueError("no message with the role user, so there is no request to serve")
    return tuple(turns)


def _num_bytes(text: str) -> int:
    """Number of tokens of a text, without creating them."""
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _check_length(what: str, num_tokens: int, limit_tokens: int) -> None:
    """Raises ValueError if there are more tokens than can be served."""
    if num_tokens > limit_tokens:
        raise ValueError(
            f"{what} of {num_tokens} tokens, the answer included; expected at most {limit_tokens}, the capacity of HBM"
        )


def _parse_trace_request(value: Any, *, tokens_per_block: int, limit_tokens: int) -> tuple[int, int, Sequence[int]]:
    """Scaled lengths of prompt and answer, and the ids of the prompt's blocks."""
    line = parse_line(value)
    if not line.input_length:
        raise wrong(value, "input_length", f"a number of tokens, from 1 to {MAX_LENGTH}")
    if line.output_length is None:
        raise wrong(value, "output_length", f"a number of tokens, from 0 to {MAX_LENGTH}")
    hash_ids = [hash_id for hash_id in line.hash_ids if isinstance(hash_id, int)]
    if len(hash_ids) < len(line.hash_ids):
        raise wrong(value, "hash_ids", "a list of numbers of at least 0, one per block")
    expected = -(-line.input_length // _TRACE_BLOCK_TOKENS)
    if len(hash_ids) != expected:
        raise ValueError(
            f"{len(hash_ids)} hash_ids for input_length={line.input_length}; expected {expected}, one for each "
            f"{_TRACE_BLOCK_TOKENS} tokens"
        )
    num_prompt, num_answer = (_scaled(num, tokens_per_block) for num in (line.input_length, line.output_length))
    _check_length("a request", num_prompt + num_answer, limit_tokens)
    return num_prompt, num_answer, hash_ids
