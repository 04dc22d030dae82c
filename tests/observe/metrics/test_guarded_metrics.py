"""A real Prometheus and a gateway that asks for a certificate and a key."""

import asyncio
from pathlib import Path
from typing import Any

from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.guarded import Files, guarded
from tests.observe.metrics.boards import RULES
from tests.observe.metrics.prometheus import program, prometheus


async def test_prometheus_scrapes_only_with_a_key(tmp_path: Path) -> None:
    program("prometheus")
    files = Files.made(tmp_path)
    own = files.clients.sign("prometheus")
    (tmp_path / "key").write_text((tmp_path / "keys").read_text().splitlines()[1])
    scrape: dict[str, Any] = {
        "scheme": "https",
        "tls_config": {"ca_file": str(files.servers.ca), "cert_file": str(own.cert), "key_file": str(own.key)},
    }
    with_key = scrape | {"authorization": {"credentials_file": str(tmp_path / "key")}}
    async with guarded(FakeDispatcher(), **files.mutual, **files.keys) as door:
        targets = [door.url.removeprefix("https://")]
        jobs = {"with_key": with_key, "without": scrape}
        async with prometheus(targets, RULES, tmp_path, **jobs) as there, asyncio.timeout(60.0):
            for job, number in (("with_key", 1.0), ("without", 0.0)):
                while (up := await there.number(f'up{{job="{job}"}}')) is None:
                    await asyncio.sleep(0.05)
                assert up == number, job
            (info,) = await there.query("diptych_info")
            assert ("job", "with_key") in info
            errors = {each["scrapePool"]: each["lastError"] for each in (await there.ask("targets"))["activeTargets"]}
            assert errors["with_key"] == "" and "401" in errors["without"]
