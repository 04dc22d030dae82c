"""Stop strings and half characters, over every way of cutting an answer into tokens."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.events import Delta
from cluster.frontend.text import StopStrings, TextDelta, TextStream
from tests.frontend.tokenizers import ByteDetokenizer
from workers.request import SamplingParams

ALPHABET = "abñ🐚\u200d👩"  # of one to four bytes, with what joins emoji
LETTERS = st.text(alphabet=ALPHABET, max_size=40)
STOPS = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=5), min_size=0, max_size=4)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Where the stop string that ends first begins, by looking at every place of the full text."""
    found = [(start + len(stop), start) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
    return min(found)[1] if found else None


def cut_into(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [piece for piece in [*pieces, data] if piece]


def run(stream: TextStream, pieces: list[bytes]) -> list[TextDelta]:
    deltas, position = [], 0
    for piece in pieces:
        delta = stream.push(Delta(tuple(piece), position))
        if delta is not None:
            deltas.append(delta)
        position += len(piece)
    rest = stream.flush()
    return deltas if rest is None else [*deltas, rest]


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_streamed_text_is_the_full_text_cut_at_the_stop(text: str, stops: list[str], sizes: list[int]) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop=tuple(stops)))
    got = "".join(delta.text for delta in run(stream, cut_into(text.encode(), sizes)))
    cut = first_stop(text, stops)
    assert got == (text if cut is None else text[:cut])
    assert stream.stopped == (cut is not None)


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_an_included_stop_string_ends_the_text(text: str, stops: list[str], sizes: list[int]) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop=tuple(stops), include_stop_in_output=True))
    got = "".join(delta.text for delta in run(stream, cut_into(text.encode(), sizes)))
    ends = [start + len(stop) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
    assert got == (text[: min(ends)] if ends else text)
    assert stream.stopped == bool(ends)


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_only_a_possible_stop_string_is_held_back(text: str, stops: list[str], sizes: list[int]) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop=tuple(stops)))
    given, position = "", 0
    for piece in cut_into(text.encode(), sizes):
        delta = stream.push(Delta(tuple(piece), position))
        position += len(piece)
        given += delta.text if delta is not None else ""
        if stream.stopped:
            break
        sure = text.encode()[:position].decode(errors="ignore")
        assert sure.startswith(given)
        held = sure[len(given) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40), st.integers(0, 60))
def test_no_stop_string_counts_before_min_tokens(
    text: str, stops: list[str], sizes: list[int], min_tokens: int
) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop=tuple(stops), min_tokens=min_tokens))
    got = "".join(delta.text for delta in run(stream, cut_into(text.encode(), sizes)))
    ends = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and len(text[: start + len(stop)].encode()) >= min_tokens
    ]
    assert got == (text[: min(ends)[1]] if ends else text)


@given(LETTERS, STOPS, st.lists(st.integers(1, 7), max_size=40))
def test_tokens_end_where_the_stop_string_was_complete(text: str, stops: list[str], sizes: list[int]) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop=tuple(stops)))
    tokens = [token for delta in run(stream, cut_into(text.encode(), sizes)) for token in delta.tokens]
    cut = first_stop(text, stops)
    if cut is None:
        assert bytes(tokens) == text.encode()
        return
    ending = [stop for stop in stops if bytes(tokens).decode().endswith(stop)]
    assert bytes(tokens).decode() == text[: len(bytes(tokens).decode())]
    assert max(map(len, ending)) == len(bytes(tokens).decode()) - cut


@given(LETTERS, st.lists(st.integers(1, 3), max_size=60))
def test_incomplete_characters_are_never_sent(text: str, sizes: list[int]) -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams())
    deltas = run(stream, cut_into(text.encode(), sizes))
    assert all("�" not in delta.text for delta in deltas)
    assert "".join(delta.text for delta in deltas) == text


def test_held_back_text_is_sent_once_it_cannot_become_a_stop_string() -> None:
    stops = StopStrings(["END."])
    assert stops.push("the EN") == ("the ", False)
    assert stops.push("D") == ("", False)
    assert stops.push("!") == ("END!", False)
    assert stops.flush() == ""


def test_text_that_is_held_back_at_the_end_is_sent() -> None:
    stops = StopStrings(["END."])
    assert stops.push("the END") == ("the ", False)
    assert stops.flush() == "END"


def test_a_stop_token_has_no_text() -> None:
    stream = TextStream(ByteDetokenizer(), SamplingParams(stop_token_ids=(ord("!"),)))
    assert [(delta.text, delta.tokens) for delta in run(stream, [b"ok", b"!"])] == [("ok", (111, 107)), ("", (33,))]


def test_an_included_stop_token_has_its_text() -> None:
    sampling = SamplingParams(stop_token_ids=(ord("!"),), include_stop_in_output=True)
    assert "".join(delta.text for delta in run(TextStream(ByteDetokenizer(), sampling), [b"ok", b"!"])) == "ok!"


def test_deltas_are_joined_per_answer() -> None:
    deltas = [TextDelta("a", (1,), 0, index=1), TextDelta("x", (2,), 0), TextDelta("b", (3,), 1, index=1)]
    assert TextDelta.join_each(deltas) == [TextDelta("x", (2,), 0), TextDelta("ab", (1, 3), 0, index=1)]


def test_joined_deltas_are_one_delta() -> None:
    joined = TextDelta.join([TextDelta("a", (1,), 4), TextDelta("", (2,), 5), TextDelta("bc", (), 6)])
    assert joined == TextDelta("abc", (1, 2), 4)
