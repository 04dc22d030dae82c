"""Log probabilities tell the bytes of each token, and where its text begins in the answer."""

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients

SHELL = "\U0001f41a"


async def test_parts_of_a_character_have_their_own_bytes(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: SHELL.encode()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}
    received = (await there.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
    parts = [each["bytes"] for each in received["logprobs"]["content"]]
    assert parts == [[byte] for byte in SHELL.encode()] and received["message"]["content"] == SHELL


async def test_offsets_are_positions_in_the_text(there: Clients, dispatcher: FakeDispatcher) -> None:
    dispatcher.script = lambda request: f"{SHELL}ab".encode()
    body = {"prompt": "hi", "max_tokens": 6, "logprobs": 0}
    received = (await there.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert received["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 2]
    assert received["text"][1] == "a"
