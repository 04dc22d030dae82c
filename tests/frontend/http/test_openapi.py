"""The schema at /openapi.json tells what the paths do, and what a client must know of the tokenizer is there."""

from typing import Any

import pytest

from tests.frontend.http.opened import Clients

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize", "/v1/embeddings")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture
async def schema(there: Clients) -> dict[str, Any]:
    received: dict[str, Any] = (await there.http.get("/openapi.json")).json()
    return received


def test_openapi_describes_errors(schema: dict[str, Any]) -> None:
    operations = [(path, each) for path, methods in schema["paths"].items() for each in methods.values()]
    assert len(operations) >= 12
    for path, operation in operations:
        answers = operation["responses"]
        refused = answers["default"]["content"]["application/json"]["schema"]
        assert "422" not in answers and ("400" in answers) == (path in POSTS + MESSAGES)
        assert refused == {"$ref": f"#/components/schemas/{'MessagesError' if path in MESSAGES else 'Error'}"}
    assert "HTTPValidationError" not in schema["components"]["schemas"]


@pytest.mark.parametrize("path", POSTS)
async def test_an_error_has_the_form_that_openapi_describes(there: Clients, schema: dict[str, Any], path: str) -> None:
    answer = await there.http.post(path, json={"model": 3})
    assert answer.status_code == 400
    described = schema["components"]["schemas"]
    assert answer.json().keys() == described["Error"]["properties"].keys()
    assert answer.json()["error"].keys() == described["ErrorDetail"]["properties"].keys()


@pytest.mark.parametrize("path", MESSAGES)
async def test_an_error_of_messages_has_its_own_form(there: Clients, schema: dict[str, Any], path: str) -> None:
    described = schema["components"]["schemas"]
    for sent in ({"model": 3}, {"messages": [{"role": "x"}], "max_tokens": 3}):
        answer = await there.http.post(path, json=sent)
        assert answer.status_code == 400
        assert answer.json().keys() == described["MessagesError"]["properties"].keys()
        assert answer.json()["error"].keys() == described["MessagesErrorDetail"]["properties"].keys()


async def test_each_route_has_the_content_type_that_openapi_describes(there: Clients, schema: dict[str, Any]) -> None:
    for path, methods in schema["paths"].items():
        if "get" not in methods or "{" in path:
            continue
        (kind,) = methods["get"]["responses"]["200"]["content"]
        answer = await there.http.get(path)
        assert answer.headers["content-type"].startswith(kind), path
    for path in (*POSTS[:3], MESSAGES[0]):
        assert set(schema["paths"][path]["post"]["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }


async def test_tokenizer_info_is_returned(there: Clients) -> None:
    answer = await there.http.get("/tokenizer_info")
    assert (answer.status_code, answer.json()) == (200, {"tokenizer_class": "ByteTokenizer", "chat_template": None})


async def test_the_page_at_docs_shows_the_schema(there: Clients) -> None:
    answer = await there.http.get("/docs")
    assert answer.status_code == 200 and "url: '/openapi.json'" in answer.text
