"""The load of the benchmark `capacity` counts every token, and its figures follow from the loads. No figure decides."""

import asyncio
import sys
from collections.abc import Iterator

import pytest

from benchmarks.capacity import StreamLoad, figures
from benchmarks.capacity import _gaps as gaps
from benchmarks.frontend import START_TIMEOUT_S
from benchmarks.raw_streams import RawStream, open_grpc, open_http
from cluster.offline.load.processes import Child


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    with Child([sys.executable, "-m", "benchmarks.stub_gateway", "0.005"]) as child:
        _, endpoint, url = child.wait_line("open ", START_TIMEOUT_S).text.split()
        yield {"gRPC": endpoint, "HTTP": url}


@pytest.mark.parametrize("protocol", ["gRPC", "HTTP"])
async def test_a_probe_sees_every_token_of_its_stream(addresses: dict[str, str], protocol: str) -> None:
    start, close = await (open_grpc if protocol == "gRPC" else open_http)(addresses[protocol])
    streams = [RawStream(index, tokens=12) for index in range(9)]
    for stream in streams:
        start(stream)
    async with asyncio.timeout(30.0):
        await asyncio.gather(*(stream.ended for stream in streams))  # raises when a probe has another count
    assert [bool(stream.marks) for stream in streams] == [True, *[False] * 7, True]
    assert {stream.marks[-1][1] for stream in streams if stream.is_probe} == {12}
    close()


def test_tokens_of_one_message_have_no_gap_between_them() -> None:
    assert gaps([(1.0, 1), (1.5, 2), (2.5, 5)]) == [0.5, 1.0, 0.0, 0.0]


def test_a_load_is_carried_while_core_and_gaps_stay_in_their_bounds() -> None:
    fits = StreamLoad(100, 10.0, 9.0, 1.0, 1.0, 20_000, (0.05,) * 99 + (0.1,))
    late = StreamLoad(200, 10.0, 8.0, 1.0, 1.0, 40_000, (0.05,) * 90 + (0.11,) * 10)
    full = StreamLoad(300, 10.0, 9.1, 1.0, 1.0, 60_000, (0.05,) * 100)
    assert [load.is_carried for load in (fits, late, full)] == [True, False, False]
    (most,) = (each for each in figures({"gRPC": [fits, late, full]}) if each.row == "gRPC")
    assert most.spread.median == 100.0
