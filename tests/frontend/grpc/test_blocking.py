"""The client without an event loop, over a real server."""

import threading
import time
from inspect import signature

import pytest

from cluster.events import Accepted, Completed
from cluster.frontend.text import TextDelta
from diptych.client import AsyncClient, Client
from diptych.errors import DiptychError
from diptych.history import Window
from diptych.shapes import Shape


def test_every_call_of_the_blocking_client_works(endpoint: str) -> None:
    with Client(endpoint) as client:
        client.wait_ready(5.0)
        events = list(client.generate("the sea is salty", max_tokens=5))
        assert isinstance(events[0], Accepted) and isinstance(events[-1], Completed)
        assert "".join(each.text for each in events if isinstance(each, TextDelta)) == "SEA I"
        assert client.complete("the sea is salty", session="s").text == "SEA IS SALTY"
        chat = [each for each in client.chat([("user", "the sea")]) if isinstance(each, TextDelta)]
        assert TextDelta.join(chat).text == "SER>THE SEA\n"
        batch = sorted(client.batch(["sea", ""]), key=lambda each: each[0])
        assert [type(answer) is DiptychError for _, answer in batch] == [False, True]
        assert client.status().gateway == "gateway-0"
        assert "diptych_" in client.metrics()
        assert client.cancel("nobody") is False
        name, window = client.trace(last_s=60.0)
        assert name == "gateway-0" and isinstance(window, Window)
        with pytest.raises(DiptychError, match="an unexpected error"):  # the fake cannot be measured, and was asked
            client.measure("decode-0", Shape(batch=1, context=8))


def test_both_clients_have_the_same_calls() -> None:
    def public(client: type) -> set[str]:
        return {name for name in vars(client) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient) | {"endpoint"}
    for name in ("status", "metrics", "trace", "measure", "flip", "drain", "scale", "cancel", "wait_ready"):
        ours, theirs = (list(signature(getattr(each, name)).parameters) for each in (Client, AsyncClient))
        assert ours == theirs, name


def test_leaving_the_loop_cancels_the_request(endpoint: str) -> None:
    with Client(endpoint) as client:
        for event in client.generate("the sea is salty", request_id="left"):
            assert isinstance(event, Accepted)
            break
        deadline = time.monotonic() + 10.0
        while client.status().active_requests:  # the word to cancel may come after the question
            assert time.monotonic() < deadline


def test_threads_share_a_client(endpoint: str) -> None:
    texts: list[str] = []
    with Client(endpoint) as client:
        threads = [threading.Thread(target=lambda: texts.append(client.complete("the sea").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == ["THE SEA"] * 8


def test_failures_and_a_closed_client_raise_the_client_error(endpoint: str) -> None:
    with Client(endpoint) as client, pytest.raises(DiptychError, match="another"):
        client.complete("the sea", model="another")
    client.close()
    with pytest.raises(DiptychError, match="the client is closed"):
        client.status()
