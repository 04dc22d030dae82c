"""Trace files: every format in a few lines, its options, and invalid files."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.offline.workload.arrivals import Workload, WorkloadError
from cluster.offline.workload.load import load_workload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
2023-11-16 18:15:51.2224670,879,55\r
"""
MOONCAKE = "".join(
    json.dumps({"timestamp": at, "input_length": prompt, "output_length": 5, "hash_ids": ids}) + "\n"
    for at, prompt, ids in [
        (0, 600, [0, 1]),
        (0, 1500, [0, 2, 3]),
        (3000, 600, [0, 1]),
        (3000, 100, [9]),
        (3000, 9, []),
    ]
)


@pytest.fixture(name="load")
def _load(tmp_path: Path):
    """Loads a file of this content, with these options."""

    def load(content: str | bytes, options: str = "", name: str = "trace", **given) -> Workload:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_workload(f"{path}{options and ':'}{options}", **given)

    return load


def lengths(workload: Workload) -> list[tuple[int, int]]:
    return [(each.prompt_tokens, each.output_tokens) for each in workload.arrivals]


def times(workload: Workload) -> list[float]:
    return [each.at_s for each in workload.arrivals]


# ---- formats -----------------------------------------------------------------------------------------------------


def test_azure_2023(load) -> None:
    found = load(AZURE, name="anything.txt")
    assert lengths(found) == [(374, 44), (396, 109), (879, 55)]
    assert times(found) == pytest.approx([0.0, 4.314579, 4.541877], abs=1e-5)
    assert (found.name, found.notes) == ("anything", ())


def test_azure_2024_has_offsets_and_whole_seconds(load) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 00:00:01+00:00,3,4\n2024-05-10 02:00:02+02:00,5,6\n"
    assert times(load("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)) == pytest.approx([0.0, 0.99007, 1.99007])


def test_gzip_and_a_byte_order_mark_are_found_by_content(load) -> None:
    assert load(gzip.compress(AZURE.encode()), name="plain.csv") == load(AZURE, name="plain.csv")
    assert load("\ufeff" + AZURE, name="plain.csv") == load(AZURE, name="plain.csv")


def test_splitwise_and_vidur(load) -> None:
    head = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    splitwise = load(head + "0,2,0,1,1,4096,32\n1,2,0,3.5,1,2048,8\n")
    vidur = load("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,4096,32\n\n2.5,2048.0,8\n")
    assert lengths(splitwise) == lengths(vidur) == [(4096, 32), (2048, 8)]
    assert times(splitwise) == times(vidur) == [0.0, 2.5]


def test_lengths_without_times_need_a_rate(load) -> None:
    content = "num_prefill_tokens,num_decode_tokens,pd_ratio\n" + "100,7,14.2\n" * 400
    with pytest.raises(WorkloadError, match="rate=4"):
        load(content)
    assert load(content, "rate=2").rate == pytest.approx(2.0, rel=0.2)


def test_burstgpt_leaves_failures_out_and_says_so(load) -> None:
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    rows = "5,7,1.5,ChatGPT,472,18,490,Conversation log\n9,,0,GPT-4,300,0,300,API log\n45,7,2,GPT-4,1,2,3,API log\n"
    found = load(head + rows)
    assert lengths(found) == [(472, 18), (1, 2)]
    assert [each.session for each in found.arrivals] == ["7", "7"]
    assert found.notes == ("1 requests of 0 tokens left out",)


def test_mooncake_keeps_prefixes_and_leaves_its_ticks(load) -> None:
    raw, spread = load(MOONCAKE, "jitter=off"), load(MOONCAKE, seed=3)
    assert times(raw) == [0.0, 0.0, 3.0, 3.0, 3.0]
    assert [each.prefix for each in raw.arrivals] == [(0, 1), (0, 2, 3), (0, 1), (9,), ()]
    assert raw.block_tokens == 512
    assert raw.notes == ("arrivals left on their ticks of 3 s",)
    assert lengths(spread) == lengths(raw)
    assert all(0.0 < late - tick < 3.0 for late, tick in zip(times(spread), times(raw), strict=True))
    assert spread.notes == ("spread evenly inside ticks of 3 s (seed 3)",)
    assert load(MOONCAKE, seed=3) == spread != load(MOONCAKE, seed=4)
    assert max(times(load(MOONCAKE, "jitter=0.5"))) < 3.5


def test_qwen_bailian_has_seconds_small_blocks_and_chats(load) -> None:
    rows = [
        {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 20, "output_length": 13, "turn": 1},
        {"chat_id": 160, "parent_chat_id": 159, "timestamp": 62.5, "input_length": 40, "output_length": 8, "turn": 2},
        {"chat_id": 161, "parent_chat_id": 160, "timestamp": 63.5, "input_length": 60, "output_length": 8, "turn": 3},
    ]
    found = load("\n".join(json.dumps(each | {"type": "text", "hash_ids": [2**63, 5]}) for each in rows))
    assert (times(found), found.block_tokens) == ([0.0, 1.0, 2.0], 16)
    assert {each.session for each in found.arrivals} == {"159"}
    assert found.arrivals[1].prefix == (2**63, 5)


def test_sharegpt_is_counted_and_needs_a_rate(load) -> None:
    talks = [
        {"id": "a", "conversations": [{"from": "human", "value": "12345678"}, {"from": "gpt", "value": "a b c"}]},
        {"id": "b", "conversations": [{"from": "human", "value": "never answered"}]},
        {"id": "c", "conversations": [{"from": "human", "value": "x" * 3_000_000}, {"from": "gpt", "value": "y"}]},
    ]
    for content in (json.dumps(talks, indent=1), "\n".join(map(json.dumps, talks))):
        found = load(content, "rate=1")
        assert lengths(found) == [(2, 2), (750_000, 1)]
        assert "a token counted for every 4 characters" in found.notes[0]
        assert found.notes[1] == "1 requests of 0 tokens left out"
        with pytest.raises(WorkloadError, match="rate=4"):
            load(content)


# ---- options -----------------------------------------------------------------------------------------------------


def minutes(count: int) -> str:
    return "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{60 * n},{n + 1},9\n" for n in range(count))


def test_a_part_of_a_trace(load) -> None:
    assert lengths(load(minutes(10), "first=2")) == [(1, 9), (2, 9)]
    part = load(minutes(10), "from=120,until=300,first=2")
    assert (times(part), lengths(part)) == ([0.0, 60.0], [(3, 9), (4, 9)])
    assert part.notes == ("from 120 s to 300 s", "the first 2 requests")


def test_unneeded_lines_are_not_read(load) -> None:
    broken = minutes(10) + "what is this\n"
    assert len(load(broken, "first=3").arrivals) == 3
    assert len(load(broken, "until=500").arrivals) == 9
    assert len(load("num_prefill_tokens,num_decode_tokens\n1,1\n2,2\n3,3\nwhat\n", "first=2,rate=1").arrivals) == 2
    with pytest.raises(WorkloadError, match="line 12: 1 columns"):
        load(broken)


def test_the_first_requests_are_the_same_however_much_is_read(load) -> None:
    rows = [{"timestamp": 3000 * (n // 10), "input_length": n + 1, "output_length": 1} for n in range(100)]
    content = "\n".join(map(json.dumps, rows))
    for count in (1, 25, 100):
        assert load(content, f"first={count}").arrivals == load(content).arrivals[:count]


def test_another_rate_stretches_times(load) -> None:
    assert load(minutes(10), "rate=2").rate == pytest.approx(2.0)
    assert times(load(minutes(10), "speed=60")) == [float(n) for n in range(10)]


def test_requests_are_cut_to_a_context(load) -> None:
    cut = load(MOONCAKE, "clip=600,jitter=off")
    assert lengths(cut) == [(595, 5), (595, 5), (595, 5), (100, 5), (9, 5)]
    assert cut.arrivals[1].prefix == (0, 2)
    assert cut.notes[-1] == "3 of 5 requests clipped to 600 tokens"


# ---- bad input ---------------------------------------------------------------------------------------------------

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
BAD = {
    "empty": ("", "is empty"),
    "only a first line": (VIDUR, "has no requests"),
    "binary": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary"),
    "utf-16": (AZURE.encode("utf-16"), "binary"),
    "latin-1": ("arrived_at,num_prefill_tokens,num_decode_tokens,é\n0,1,1,é\n".encode("latin-1"), "not UTF-8"),
    "cut gzip": (gzip.compress(AZURE.encode())[:-20], "damaged gzip"),
    "foreign columns": ("a,b\n1,2\n", "line 1: no .* among the columns a, b. Known are Azure: TIMESTAMP"),
    "a missing column": ("TIMESTAMP,ContextTokens\n", "line 1: no GeneratedTokens among the columns TIMESTAMP, Cont"),
    "no time": ("ContextTokens,GeneratedTokens\n1,2\n", "line 1: no TIMESTAMP among"),
    "a short row": (VIDUR + "0,1,1\n1,1\n", "line 3: 2 columns where the first line has 3"),
    "no number": (VIDUR + "0,1,1\n1,many,1\n", "line 3: num_prefill_tokens is 'many', which is not a number"),
    "a broken number": (VIDUR + "0,1.5,1\n", "line 2: num_prefill_tokens is '1.5'"),
    "no time of day": (AZURE + "yesterday,1,1\n", "line 5: TIMESTAMP is 'yesterday', which is not a time"),
    "back in time": (VIDUR + "5,1,1\n4,1,1\n", "line 3: time goes back by 1 s; sort the file"),
    "not finite": (VIDUR + "nan,1,1\n", "line 2: the time is nan"),
    "negative": (VIDUR + "0,1,-3\n", "line 2: the answer has -3 tokens"),
    "zero": (VIDUR + "0,0,3\n", "line 2: the prompt has 0 tokens; it must have 1 to"),
    "absurd": (VIDUR + "0,10000001,3\n", "line 2: the prompt has 10000001 tokens; it must have 1 to 10,000,000"),
    "very absurd": (VIDUR + f"0,{'9' * 4000},3\n", "line 2: the prompt has 9"),
    "an endless cell": (VIDUR + '0,"' + "1\n" * 100_000, "field larger than field limit"),
    "half a line": (MOONCAKE[:150], "line 2: not one JSON object a line"),
    "a pretty object": (json.dumps({"timestamp": 1}, indent=2), "line 1: not one JSON object a line"),
    "a number a line": ("{}\n3\n", "no input_length and output_length"),
    "foreign keys": ('{"a": 1}\n', "line 1: no input_length and output_length .* among the keys a"),
    "a list": (MOONCAKE + "[1]\n", "line 6: a list where an object"),
    "a text for a number": (MOONCAKE.replace("1500", '"1500"'), r"line 2: Expected `int`, got `str` - at `\$.input_le"),
    "too many blocks": (MOONCAKE.replace("[9]", "[9, 10]"), "line 4: 2 blocks of 512 tokens are more than .* 100"),
    "a negative block": (MOONCAKE.replace("[9]", "[-9]"), "line 4: a prefix block's id must be 0"),
    "half of the times": ('{"timestamp":1,"input_length":1,"output_length":1}\n{"input_length":1,"output_length":1}',
                          "line 2: some requests have a time and some have none"),
    "an empty array": ("[]", "is empty"),
    "half an array": ('[{"conversations": []}, {"conv', "record 2: not JSON, or cut off"),
    "an array of numbers": ("[1, 2]", "record 1: a int where an object"),
    "deep": ("[" * 100_000, "record 1: not JSON"),
    "deep lines": ('{"a":' * 100_000, "line 1: not one JSON object"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_one_clear_error(load, tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as raised:
        load(content)
    assert str(raised.value).startswith(str(tmp_path / "trace"))
    assert "\n" not in str(raised.value)


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="Is a directory"):
        load_workload(str(tmp_path))
    with pytest.raises(WorkloadError, match=r"nowhere\.csv' is neither a trace file nor a process of arrivals"):
        load_workload("nowhere.csv")


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """With up to 6 bytes changed."""
    edits = st.dictionaries(st.integers(0, len(content) - 1), st.integers(0, 255), max_size=6)
    return edits.map(lambda changed: bytes(changed.get(place, byte) for place, byte in enumerate(content)))


KEYS = ["input_length", "output_length", "timestamp", "hash_ids", "conversations", "value", "chat_id"]
NESTED = st.recursive(
    st.none() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.sampled_from(KEYS), each, max_size=5),
    max_leaves=20,
)
GARBAGE = st.one_of(
    st.binary(max_size=300),
    st.text(max_size=300).map(str.encode),
    st.lists(st.sampled_from([*'0123456789,.\n-"', "e9", "nan"]), max_size=60).map(
        lambda cells: VIDUR + "".join(cells)
    ),
    damaged(MOONCAKE.encode()),
    damaged(AZURE.encode()),
    damaged(gzip.compress(AZURE.encode(), mtime=0)),
    NESTED.map(lambda found: json.dumps([found])),
    NESTED.map(json.dumps),
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=GARBAGE, options=st.sampled_from(["", "rate=2", "first=3", "jitter=on"]))
def test_no_file_brings_a_traceback(load, content: bytes | str, options: str) -> None:
    try:
        found = load(content, options)
    except WorkloadError as error:
        assert "\n" not in str(error)
        return
    assert all(sooner.at_s <= later.at_s for sooner, later in pairwise(found.arrivals))
