"""Scripts of web pages: what a browser asks beforehand, and what it needs to see in the answer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from cluster.spec import SpecError
from cluster.spec_file import parse_spec
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import opened

PAGE = "https://chat.example.com"
QUESTION = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-diptych-slo-class",
}
BODY = {"prompt": "the sea", "max_tokens": 4}


@asynccontextmanager
async def browser(**gateway: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with opened(FakeDispatcher(), **gateway) as (there, _):
        yield there.http


@pytest.mark.parametrize("origins", [(PAGE,), ("https://else.example.com", PAGE), ("*",)])
async def test_an_allowed_origin_may_send_requests_and_read_headers(origins: tuple[str, ...]) -> None:
    async with browser(http_allowed_origins=origins) as http:
        asked = await http.options("/v1/completions", headers=QUESTION)
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "POST" in asked.headers["access-control-allow-methods"]
        allowed = asked.headers["access-control-allow-headers"]
        assert "x-diptych-slo-class" in allowed and "authorization" in allowed
        answer = await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] in (PAGE, "*")
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        wrong = await http.post("/v1/completions", json=BODY | {"model": "other"}, headers={"origin": PAGE})
        assert wrong.status_code == 404 and "access-control-allow-origin" in wrong.headers


async def test_another_origin_may_not() -> None:
    async with browser(http_allowed_origins=("https://else.example.com",)) as http:
        assert (await http.options("/v1/completions", headers=QUESTION)).status_code == 400
        answer = await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers


async def test_without_origins_nothing_is_allowed() -> None:
    async with browser() as http:
        asked = await http.options("/v1/completions", headers=QUESTION)
        assert asked.status_code == 405 and "access-control-allow-origin" not in asked.headers


async def test_preflight_needs_no_key_and_requests_do(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("open-sesame-0123456789\n")
    async with browser(http_allowed_origins=(PAGE,), api_keys_file=str(tmp_path / "keys")) as http:
        assert (await http.options("/v1/completions", headers=QUESTION)).status_code == 200
        refused = await http.post("/v1/completions", json=BODY, headers={"origin": PAGE})
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == PAGE
        plain = await http.options("/v1/completions")
        assert plain.status_code == 401


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", "ftp://chat.example.com", ""])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    pools = [{"name": "mixed", "role": "mixed"}]
    with pytest.raises(SpecError, match=r"is no origin; write https://chat\.example\.com, or"):
        parse_spec({"model": "tiny", "pools": pools, "gateway": {"http_allowed_origins": [origin]}})
