"""Workloads from flags and files: conversations, or an error that names the invalid line."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpu_offload.errors import InputError
from tpu_offload.replay.workloads import (
    NUM_TOKENS,
    Conversation,
    Turn,
    Workload,
    chat_workload,
    decode_workload,
    prompts_workload,
    trace_workload,
)

SYSTEM, USER, ASSISTANT, TOOL, END = 256, 257, 258, 259, 260
SHARED_TRACE = Path(__file__).parents[3] / "shared/traces/conversation_trace.jsonl"


def line(**change):
    request = {"timestamp": 0, "input_length": 1000, "output_length": 100, "hash_ids": [0, 1]} | change
    return json.dumps({key: value for key, value in request.items() if value is not ...})


def write(tmp_path, *lines):
    path = tmp_path / "input.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def trace(path, *, num_requests=None, tokens_per_block=16, seed=0):
    return trace_workload(path, num_requests=num_requests, tokens_per_block=tokens_per_block, seed=seed)


def prompts(path, *, num_requests=None, max_tokens=16):
    return prompts_workload(path, num_requests=num_requests, max_tokens=max_tokens)


# --- chat ---------------------------------------------------------------------------------------


@given(num_requests=st.integers(1, 60), turns=st.integers(1, 8), seed=st.integers(0, 3))
def test_chat_has_exactly_the_requests_asked_for(num_requests, turns, seed):
    workload = chat_workload(num_requests=num_requests, turns=turns, seed=seed)
    assert workload.num_requests == num_requests
    lengths = [len(conversation.turns) for conversation in workload.conversations]
    assert max(lengths) <= turns
    assert max(lengths) - min(lengths) <= 1


def test_chat_depends_on_the_seed_alone():
    one, same, other = (chat_workload(num_requests=20, turns=4, seed=seed) for seed in (1, 1, 2))
    assert one == same != other


def test_chat_sizes_are_as_documented_and_system_prompts_are_shared():
    workload = chat_workload(num_requests=120, turns=5, seed=0)
    assert len(workload.conversations) == 24
    openings = set()
    for conversation in workload.conversations:
        first = conversation.turns[0].tokens
        opening = first[: first.index(USER)]
        assert opening[0] == SYSTEM
        assert opening[-1] == END
        assert 192 <= len(opening) - 2 <= 320
        openings.add(opening)
        for turn in conversation.turns:
            assert 8 <= turn.max_tokens <= 24
            assert turn.answer is None
            assert turn.tokens[-1] == ASSISTANT
            user = turn.tokens[turn.tokens.index(USER) + 1 : -2]
            assert 40 <= len(user) <= 120
            assert max(turn.tokens) < NUM_TOKENS
    assert 2 <= len(openings) <= 3


# --- decode -------------------------------------------------------------------------------------


def test_decode_sizes_are_as_documented_and_nothing_is_shared():
    one, same, other = (decode_workload(num_requests=50, seed=seed) for seed in (1, 1, 2))
    assert one == same != other
    assert one.num_requests == len(one.conversations) == 50
    for conversation in one.conversations:
        (turn,) = conversation.turns
        assert 20 <= len(turn.tokens) <= 30
        assert 8 * len(turn.tokens) <= turn.max_tokens <= 10 * len(turn.tokens)
        assert max(turn.tokens) < NUM_TOKENS
    num_blocks = sum(-(-conversation.longest_request // 16) for conversation in one.conversations)
    assert one.num_unique_blocks(16) == num_blocks


# --- sizes --------------------------------------------------------------------------------------


def test_longest_request_counts_history_and_answer():
    conversation = Conversation("c", (Turn((1,) * 10, 5), Turn((2,) * 3, 100, answer=(7,)), Turn((3,), 2)))
    assert conversation.longest_request == 10 + 5 + 3 + 100
    assert conversation.prompt_lens == (10, 10 + 5 + 3, 10 + 5 + 3 + 1 + 1)
    assert Workload("w", (conversation, Conversation("d", (Turn((1,) * 200, 1),)))).longest_request == 201


def test_num_unique_blocks():
    shared = Conversation("a", (Turn((1,) * 8, 4),))  # 2 full blocks, and 1 for the answer
    again = Conversation("b", (Turn((1,) * 8 + (2,) * 4, 4),))  # 1 more, and 1 for the answer
    assert Workload("w", (shared,)).num_unique_blocks(4) == 3
    assert Workload("w", (shared, again)).num_unique_blocks(4) == 2 + 1 + 1 + 1


# --- prompts ------------------------------------------------------------------------------------


def message(role, content):
    return {"role": role, "content": content}


def test_prompts_follow_the_answers_of_the_file(tmp_path):
    messages = [message("system", "S"), message("user", "a"), message("assistant", "bc"), message("user", "é")]
    (conversation,) = prompts(write(tmp_path, json.dumps(messages)), max_tokens=3).conversations
    assert conversation.name == "line-1"
    assert conversation.turns == (
        Turn((SYSTEM, ord("S"), END, USER, ord("a"), END, ASSISTANT), 3, answer=(ord("b"), ord("c"), END)),
        Turn((USER, 0xC3, 0xA9, END, ASSISTANT), 3),
    )


def test_prompts_without_answers_continue_with_generated_ones(tmp_path):
    messages = [
        message("user", "a"),
        message("user", "b"),
        message("tool", "t"),
        message("assistant", "x"),
        message("user", "c"),
    ]
    (conversation,) = prompts(write(tmp_path, json.dumps({"messages": messages}))).conversations
    assert [turn.tokens for turn in conversation.turns] == [
        (USER, ord("a"), END, ASSISTANT),
        (END, USER, ord("b"), END, ASSISTANT),
        (END, TOOL, ord("t"), END, ASSISTANT, ord("x"), END, USER, ord("c"), END, ASSISTANT),
    ]
    assert all(turn.answer is None for turn in conversation.turns)


def test_prompts_are_bounded_and_name_their_lines(tmp_path):
    two = json.dumps([message("user", "a"), message("assistant", "b"), message("user", "c")])
    workload = prompts(write(tmp_path, two, "", two, "not read"), num_requests=3)
    assert workload.num_requests == 3
    assert [(c.name, len(c.turns)) for c in workload.conversations] == [("line-1", 2), ("line-3", 1)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[{"role": "user", "content": "a"}', "not JSON"),
        ("3", "expected a list of messages"),
        ('{"message": []}', "expected a list of messages"),
        ("[]", "no message with the role user"),
        ('[{"role": "assistant", "content": "a"}]', "no message with the role user"),
        ('["hello"]', "message 0: expected an object"),
        ('[{"role": "user"}]', "message 0: expected an object"),
        ('[{"role": "user", "content": ["a"]}]', "message 0: expected an object"),
        (
            '[{"role": "user", "content": "a"}, {"role": "bot", "content": "a"}]',
            "message 1: role 'bot'; expected one of",
        ),
        ('[{"role": ["user"], "content": "a"}]', "message 0: role"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_bad_prompts_line_is_named(tmp_path, text, expected):
    path = write(tmp_path, json.dumps([message("user", "fine")]), text)
    with pytest.raises(InputError) as caught:
        prompts(path)
    assert str(caught.value).startswith(f"{path} line 2: ")
    assert expected in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


# --- trace --------------------------------------------------------------------------------------


def test_trace_is_scaled_down_and_shares_prefixes(tmp_path):
    path = write(
        tmp_path,
        line(input_length=1024, hash_ids=[5, 6], output_length=512),
        line(input_length=513, hash_ids=[5, 7], output_length=0),
        line(input_length=1, hash_ids=[8], output_length=33),
    )
    turns = [conversation.turns for conversation in trace(path).conversations]
    (one,), (two,), _ = turns
    assert [len(turn.tokens) for (turn,) in turns] == [32, 17, 1]
    assert [turn.max_tokens for (turn,) in turns] == [16, 1, 2]
    assert one.tokens[:16] == two.tokens[:16]
    assert one.tokens[:16] != one.tokens[16:]
    assert len(set(one.tokens)) > 8
    assert max(one.tokens) < 256
    ((longer,), *_) = [conversation.turns for conversation in trace(path, tokens_per_block=64).conversations]
    assert len(longer.tokens) == 128
    ((other,), *_) = [conversation.turns for conversation in trace(path, seed=1).conversations]
    assert other.tokens != one.tokens


def test_trace_is_bounded(tmp_path):
    workload = trace(write(tmp_path, line(), line(), "not read"), num_requests=2)
    assert [conversation.name for conversation in workload.conversations] == ["line-1", "line-2"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line()[:40], "not JSON"),
        ("[]", "expected an object"),
        (line(timestamp=...), '"timestamp" is missing'),
        (line(timestamp=-1), '"timestamp" is -1'),
        (line(timestamp="0"), "\"timestamp\" is '0'"),
        (line(input_length=...), '"input_length" is missing'),
        (line(input_length=0), '"input_length" is 0; expected a number of tokens, from 1 to 2147483647'),
        (line(output_length=10**400), "expected a number of tokens, from 0 to 2147483647"),
        (line(input_length=1000.0), '"input_length" is 1000.0'),
        (line(input_length=True), '"input_length" is True'),
        (line(output_length=-1), '"output_length" is -1'),
        (line(output_length=...), '"output_length" is missing; expected a number of tokens, from 0 to 2147483647'),
        (line(hash_ids=...), '"hash_ids" is missing; expected a list'),
        (line(hash_ids=[0, "1"]), "\"hash_ids\" is [0, '1']; expected a list of numbers of at least 0, one per block"),
        (line(hash_ids=[0, -1]), '"hash_ids" is [0, -1]; expected a list'),
        (line(hash_ids=[0, True]), '"hash_ids" is [0, True]; expected a list'),
        (line(hash_ids=[0]), "1 hash_ids for input_length=1000; expected 2"),
        (line(hash_ids=[0, 1, 2]), "3 hash_ids for input_length=1000; expected 2"),
        (line(input_length=float("nan")), '"input_length" is nan'),
    ],
)
def test_bad_trace_line_is_named(tmp_path, text, expected):
    path = write(tmp_path, line(), line(), text)
    with pytest.raises(InputError) as caught:
        trace(path)
    assert str(caught.value).startswith(f"{path} line 3: ")
    assert expected in str(caught.value)


@pytest.mark.parametrize("read", [trace, prompts])
def test_file_that_cannot_be_read(tmp_path, read):
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        read(tmp_path / "missing")
    with pytest.raises(InputError, match=r"cannot read .*: Is a directory"):
        read(tmp_path)
    with pytest.raises(InputError, match="is empty; expected one JSON value per line"):
        read(write(tmp_path, "", "  "))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(InputError, match="binary line 1: "):
        read(tmp_path / "binary")


@pytest.mark.skipif(not SHARED_TRACE.is_file(), reason="the conversation trace is not next to the checkout")
def test_the_shared_trace():
    workload = trace(SHARED_TRACE, num_requests=300)
    assert workload.num_requests == 300
    # A request of 6758 tokens is 14 ids; 300 requests have 7814 different ones.
    assert len(workload.conversations[0].turns[0].tokens) == -(-6758 * 16 // 512)
    assert 7500 < workload.num_unique_blocks(16) < 8200
