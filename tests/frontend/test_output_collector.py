"""The buffer between a request and its server."""

import asyncio

from cluster.frontend.output_collector import RequestOutputCollector
from cluster.frontend.text import TextDelta, TextEnd
from workers.request import FinishReason


def delta(position: int) -> TextDelta:
    return TextDelta(str(position), (position,), position)


class Connection:
    """Takes deltas at once while `is_ready`."""

    def __init__(self) -> None:
        self.is_ready = True
        self.sent: list[TextDelta] = []

    def send(self, delta: TextDelta) -> bool:
        if self.is_ready:
            self.sent.append(delta)
        return self.is_ready


async def test_deltas_are_sent_at_once_while_the_reader_waits() -> None:
    connection = Connection()
    output = RequestOutputCollector(connection.send)
    reading = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    output.put(delta(0))
    output.put(delta(1))
    await asyncio.sleep(0)
    assert connection.sent == [delta(0), delta(1)] and not reading.done()
    output.put(TextEnd(FinishReason.LENGTH))
    assert await reading == TextEnd(FinishReason.LENGTH)


async def test_no_delta_overtakes_an_event_that_the_reader_has_not_finished() -> None:
    connection = Connection()
    output = RequestOutputCollector(connection.send)
    output.put(delta(0))  # the reader does not wait yet
    assert await output.take() == delta(0)
    output.put(delta(1))  # it is still busy with the first one
    assert await output.take() == delta(1)
    reading = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    output.put(TextEnd(FinishReason.STOP))
    output.put(delta(2))  # it has been woken, and has not run
    assert await reading == TextEnd(FinishReason.STOP)
    assert await output.take() == delta(2)
    assert connection.sent == []


async def test_deltas_that_cannot_be_sent_now_wake_the_reader_and_are_joined() -> None:
    connection = Connection()
    output = RequestOutputCollector(connection.send)
    reading = asyncio.create_task(output.take())
    await asyncio.sleep(0)
    connection.is_ready = False
    output.put(delta(0))
    connection.is_ready = True
    output.put(delta(1))
    assert await reading == TextDelta("01", (0, 1), 0)
    assert connection.sent == []
