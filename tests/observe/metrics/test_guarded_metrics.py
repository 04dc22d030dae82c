"""A real Prometheus and a gateway that asks for a certificate and a key."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.guarded import Files, guarded
from tests.observe.metrics.boards import RULES
from tests.observe.metrics.prometheus import program, prometheus


@pytest.mark.parametrize("with_key", [True, False])
async def test_it_scrapes_with_a_key_and_not_without(tmp_path: Path, with_key: bool) -> None:
    program("prometheus")
    files = Files.made(tmp_path)
    own = files.clients.sign("prometheus")
    (tmp_path / "key").write_text((tmp_path / "keys").read_text().splitlines()[1])
    scrape: dict[str, Any] = {
        "scheme": "https",
        "tls_config": {"ca_file": str(files.servers.ca), "cert_file": str(own.cert), "key_file": str(own.key)},
    }
    if with_key:
        scrape["authorization"] = {"credentials_file": str(tmp_path / "key")}
    async with guarded(FakeDispatcher(), **files.mutual, **files.keys) as door:
        targets = [door.url.removeprefix("https://")]
        async with prometheus(targets, RULES, tmp_path, **scrape) as there, asyncio.timeout(60.0):
            while (up := await there.number("up")) is None:
                await asyncio.sleep(0.05)
            assert up == with_key
            assert bool(await there.query("diptych_info")) == with_key
            (target,) = (await there.ask("targets"))["activeTargets"]
            assert ("401" in target["lastError"]) != with_key
