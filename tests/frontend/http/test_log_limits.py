"""Log lines that anyone who connects can cause are limited in time, and the next one says how many were left out."""

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from cluster.runtime import logs
from cluster.spec import LogSpec
from kvtransfer.rpc import listener as control
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import opened
from tests.frontend.http.test_connection_bounds import head, raw, rest

GARBAGE = b"\x16\x03\x01\r\n\r\n"
UPGRADE = head(0, "connection: close, upgrade", "upgrade: websocket")
REFUSED = "%s port: a caller from %s was refused: %s"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a process of a cluster logs."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    levels = {name: logging.getLogger(name).level for name in logs.OURS}
    logs.configure_logging(LogSpec(), "gateway-0")
    yield stream
    root = logging.getLogger()
    root.removeHandler(next(each for each in root.handlers if each.get_name() == "diptych"))
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


async def test_garbage_and_upgrades_log_one_line_in_ten_seconds(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(FakeDispatcher()) as (_, servers):
        for last in (False, True):
            if last:
                monkeypatch.setattr(logs, "REPEAT_S", 0.0)
            for sent in (GARBAGE, UPGRADE) * (1 if last else 20):
                async with raw(servers.http_url, sent) as (reader, _):
                    await rest(reader)
    lines = written.getvalue().splitlines()
    garbage = [line for line in lines if "Invalid HTTP request received." in line]
    assert len(garbage) == 2 and garbage[1].endswith("(19 more like it since the last line)")
    assert len(lines) == 6, lines  # an upgrade has two lines


def test_our_lines_are_limited_only_where_they_say_so(written: io.StringIO) -> None:
    logger = logging.getLogger(control.__name__)
    for number in range(5):
        logger.info(REFUSED, "control", "10.0.0.1", number, extra={"repeats": True})
        logger.warning("worker %d died", number)
        logging.getLogger("other").warning("other %d", number)
    lines = written.getvalue().splitlines()
    assert [sum(word in line for line in lines) for word in ("was refused", "died", "other")] == [1, 5, 1]
