"""Reading trace files, and the errors for invalid ones."""

import bz2
import gzip
import json
import lzma
import random
import sys

import pytest

from tests.sim.traces import chats, make_trace, write_trace
from tpu_offload.errors import InputError
from tpu_offload.sim import read_traces


def read(tmp_path, *lines, name="t.jsonl", **kwargs):
    path = tmp_path / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return read_traces([path], **kwargs)


def request(ids, time_ms=0, **fields):
    return {"timestamp": time_ms, "input_length": 512 * len(ids), "output_length": 9, "hash_ids": ids} | fields


def test_blocks_are_numbered_by_first_appearance(tmp_path):
    trace = read(tmp_path, request([70, 5]), "", request([70, 5, 8], 1500), request([9], 2000, input_length=100))
    assert [r.blocks for r in trace.requests] == [(0, 1), (0, 1, 2), (3,)]
    assert [r.time_s for r in trace.requests] == [0, 1.5, 2]
    assert trace.parents == (-1, 0, 1, -1)
    assert (trace.num_blocks, trace.num_unique_blocks, trace.duration_s) == (6, 4, 2)
    assert trace.notes == ()
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests] == [(1024, 9), (1536, 9), (100, 9)]


def test_keys_look_like_those_of_the_real_scheduler(tmp_path):
    """Policies and sketches expect digests: equal lengths, unrelated values."""
    trace = make_trace(tmp_path, chats(random.Random(1), num_requests=50))
    assert {len(key) for key in trace.keys} == {24}
    assert len({key[:8] for key in trace.keys}) == len(trace.keys) == trace.num_unique_blocks


def test_strings_and_numbers_are_different_ids(tmp_path):
    trace = read(tmp_path, request(["a", "b"]), request([1]), request(["1"]))
    assert trace.num_unique_blocks == 4
    assert trace.notes == ()


def test_lines_with_little_in_them(tmp_path):
    trace = read(tmp_path, request([]), {"timestamp": 7, "hash_ids": [1, 2]}, request([], output_length=None))
    assert [r.blocks for r in trace.requests] == [(), (), (0, 1)]
    assert trace.requests[2].num_prompt_tokens == 1024
    assert trace.requests[2].num_output_tokens == 0


def test_times_are_sorted_and_start_at_zero(tmp_path):
    trace = read(tmp_path, request([1], 9000), request([2], 4000), request([3], 4000))
    assert [(r.time_s, r.blocks) for r in trace.requests] == [(0, (1,)), (0, (2,)), (5, (0,))]
    assert trace.notes == (f"{tmp_path / 't.jsonl'}: requests are not in order of time; they were sorted",)


def test_ids_that_are_not_chained_are_chained(tmp_path):
    trace = read(tmp_path, request([1, 2]), request([3, 2]), request([3, 2, 2]), request([1, 2]))
    assert [r.blocks for r in trace.requests] == [(0, 1), (2, 3), (2, 3, 4), (0, 1)]
    assert len(set(trace.keys)) == 5
    (note,) = trace.notes
    assert "t.jsonl line 2: hash_ids are not prefix-chained; id 2 follows another block than before" in note


def test_chained_by_us_or_by_the_file_is_the_same(tmp_path):
    """Ids of blocks alone give the same tree as ids of whole prefixes."""
    prompts = chats(random.Random(2), num_requests=60)
    plain = [[block.split("-")[-1] for block in prompt] for prompt in prompts]
    chained = [["/".join(prompt[: i + 1]) for i in range(len(prompt))] for prompt in plain]
    one = read_traces([write_trace(tmp_path / "plain", plain)])
    other = read_traces([write_trace(tmp_path / "chained", chained)])
    assert one.notes
    assert not other.notes
    assert [r.blocks for r in one.requests] == [r.blocks for r in other.requests]
    assert one.parents == other.parents


def test_several_files_share_no_block_and_are_merged_by_time(tmp_path):
    one = write_trace(tmp_path / "a", [[1], [1, 2]], times_ms=[5000, 8000])
    other = write_trace(tmp_path / "b", [[1], [1, 2]], times_ms=[0, 1000])
    trace = read_traces([one, other])
    assert [(r.time_s, r.blocks) for r in trace.requests] == [(0, (0,)), (0, (2,)), (1, (2, 3)), (3, (0, 1))]
    assert len(set(trace.keys)) == 4
    assert trace.notes == ()


def test_time_range(tmp_path):
    trace = make_trace(tmp_path, [[1], [2], [2], [3]])
    part = trace.between(1, 3)
    assert [r.blocks for r in part.requests] == [(1,), (1,)]
    assert part.num_unique_blocks == 1
    assert trace.num_before(2) == 2
    with pytest.raises(InputError, match=r"no request from 9 s to 12 s; the trace goes from 0 to 3 s"):
        trace.between(9, 12)


def test_lengths_that_do_not_fit_are_noted_once(tmp_path):
    lines = [request([1, 2], input_length=600), request([1], input_length=16), request([3], input_length=9000)]
    trace = read(tmp_path, *lines, request([4], input_length=9000))
    (note,) = trace.notes
    assert "line 3: input_length 9000 with 1 hash_ids of 512 tokens; set --trace-block-tokens" in note
    assert read(tmp_path, request([1, 2], input_length=40), block_tokens=16).notes == ()  # a partial block needs no id


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"timestamp": 1,', "not JSON"),
        ('{"timestamp": 5, "hash_ids": [1,2', "(Expecting ',' delimiter at column 34)"),
        ("[1, 2]", "expected an object with"),
        ("[" * 100_000, "line 2: too many arrays or objects in one another; got"),
        (f'{{"timestamp": 1{"0" * 5000}}}', "line 2: a number of more than 4300 digits; got"),
        ({"hash_ids": [1]}, '"timestamp" is missing; expected a number of milliseconds, from 0 to 1.8e+308'),
        (request([1], None), '"timestamp" is None; expected a number of milliseconds'),
        (request([1], int("9" * 400)), "99...99"),
        (request([1], -1), '"timestamp" is -1; expected a number of milliseconds'),
        ('{"timestamp": 1e400, "hash_ids": []}', '"timestamp"'),
        (request([1], True), '"timestamp"'),
        ('{"timestamp": NaN, "hash_ids": []}', '"timestamp"'),
        ({"timestamp": 1}, '"hash_ids" is missing; expected a list of numbers of at least 0 or strings, one per block'),
        (request([], hash_ids=None), '"hash_ids" is None; expected a list'),
        (request([1.5]), '"hash_ids" is [1.5]; expected a list'),
        (request([True]), '"hash_ids" is [True]; expected a list'),
        (request([-1]), '"hash_ids" is [-1]; expected a list'),
        (request([1], input_length=-1), '"input_length" is -1; expected a number of tokens, from 0 to 2147483647'),
        (request([1], input_length=2**31), '"input_length" is 2147483648; expected a number of tokens'),
        (request([1], output_length="many"), "\"output_length\" is 'many'; expected a number of tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    with pytest.raises(InputError, match=r"t\.jsonl line 2: ") as error:
        read(tmp_path, request([1]), line, request([2]))
    assert says in str(error.value)
    assert "; got '" in str(error.value)


def test_the_largest_times(tmp_path):
    trace = read(tmp_path, request([1]), request([2], int(sys.float_info.max)))
    assert trace.duration_s == pytest.approx(sys.float_info.max / 1e3)


@pytest.mark.parametrize(
    ("compress", "name"), [(gzip.compress, "gzip"), (bz2.compress, "bzip2"), (lzma.compress, "xz")]
)
def test_a_compressed_file_is_called_so(tmp_path, compress, name):
    path = tmp_path / "t.jsonl"
    path.write_bytes(compress(json.dumps(request([1])).encode()))
    with pytest.raises(InputError) as error:
        read_traces([path])
    assert str(error.value) == f"{path} is compressed ({name}); expected JSON lines: unpack it first"


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(InputError, match="has no request"):
        read(tmp_path, "", "  ")
    with pytest.raises(InputError, match="cannot read"):
        read_traces([tmp_path / "none"])
    with pytest.raises(InputError, match="cannot read"):
        read_traces([tmp_path])
