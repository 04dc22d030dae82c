"""TLS, client certificates and keys at both servers, with real certificates, the real SDK and real handshakes."""

import asyncio
import logging
import ssl
from dataclasses import replace
from pathlib import Path

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import APIConnectionError, AsyncOpenAI, AuthenticationError

from cluster.frontend.auth import RECHECK_S
from cluster.frontend.servers import Servers, open_servers
from cluster.serving import serve
from cluster.spec import Role, SpecError
from diptych.access import Access
from diptych.client import AsyncClient, Client
from diptych.errors import DiptychError
from diptych.retry import is_temporary
from tests.cluster.local import split_spec
from tests.frontend.grpc.fake import FakeDispatcher, gateway_context
from tests.frontend.http.guarded import KEY, Files, Guarded, guarded
from tests.frontend.tokenizers import ByteTokenizer

HANDSHAKE_FAILED = (httpx2.ConnectError, httpx2.RemoteProtocolError, httpx2.ReadError)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files.made(tmp_path)


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIPTYCH_API_KEY", raising=False)


async def answer(server: Guarded, access: Access) -> str:
    async with server.grpc(access) as client:
        return (await client.complete("abc", max_tokens=3, timeout_s=20.0)).text


async def refusal(server: Guarded, access: Access) -> DiptychError:
    with pytest.raises(DiptychError) as caught:
        await answer(server, access)
    return caught.value


async def test_with_tls_and_a_key_both_servers_answer(files: Files) -> None:
    access = Access(files.servers.ca, api_key=KEY)
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server:
        assert server.url.startswith("https://")
        assert await answer(server, access) == "abc"
        async with server.openai(access) as client:
            received = await client.completions.create(model="bytes", prompt="abc", max_tokens=3)
            assert received.choices[0].text == "abc"
            stream = await client.completions.create(model="bytes", prompt="abc", max_tokens=5, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "abcde"


async def test_every_call_carries_the_key(files: Files) -> None:
    access = Access(files.servers.ca, api_key=KEY)
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server, server.grpc(access) as client:
        await client.wait_ready(20.0)
        assert (await client.status()).gateway == "gateway-0"
        assert "diptych_" in await client.metrics()
        assert not await client.cancel("nobody")
        assert sorted([index async for index, _ in client.batch(["a", "b"], max_tokens=1)]) == [0, 1]
        await client.trace(last_s=1.0)
        with pytest.raises(DiptychError, match="no controller"):
            await client.flip("decode-0", Role.PREFILL)


@pytest.mark.parametrize(("key", "words"), [("", "requires an API key"), ("x" * 25, "does not know this API key")])
async def test_without_the_key_everything_is_refused(files: Files, key: str, words: str) -> None:
    dispatcher, access = FakeDispatcher(), Access(files.servers.ca, api_key=key)
    async with guarded(dispatcher, **files.tls, **files.keys) as server:
        error = await refusal(server, access)
        assert (error.code, error.reason) == ("UNAUTHENTICATED", "INVALID_API_KEY") and words in error.message
        async with server.grpc(access) as client:
            for call in (client.status, client.metrics):
                with pytest.raises(DiptychError) as caught:
                    await call()
                assert caught.value.code == "UNAUTHENTICATED"
        async with server.http(access) as client:
            for path in ("/metrics", "/v1/models", "/openapi.json", "/docs", "/nothing"):
                received = await client.get(path)
                assert (received.status_code, received.headers["www-authenticate"]) == (401, "Bearer")
                assert (
                    received.json()["error"]["code"] == "invalid_api_key"
                    and words in received.json()["error"]["message"]
                )
            assert (await client.post("/v1/completions", content=b"x" * 1000)).status_code == 401
        if key:
            async with server.openai(access) as sdk:
                with pytest.raises(AuthenticationError):
                    await sdk.completions.create(model="bytes", prompt="abc")
    assert dispatcher.requests == []


async def test_probes_need_no_key(files: Files) -> None:
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server:
        async with server.http(Access(files.servers.ca)) as client:
            assert [(await client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        async with server.grpc(Access(files.servers.ca)) as client:
            await client.wait_ready(20.0)
        authorities = grpc.ssl_channel_credentials(files.servers.ca.read_bytes())
        async with grpc.aio.secure_channel(server.endpoint, authorities, [("grpc.enable_http_proxy", 0)]) as channel:
            received = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert received.status == health_pb2.HealthCheckResponse.SERVING
            asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_keys_work_without_tls(files: Files) -> None:
    async with guarded(FakeDispatcher(), **files.keys) as server:
        async with AsyncClient(server.endpoint, access=Access(api_key=KEY)) as client:
            assert (await client.complete("abc", max_tokens=3)).text == "abc"
        async with AsyncClient(server.endpoint) as client:
            with pytest.raises(DiptychError, match="requires an API key"):
                await client.complete("abc", max_tokens=3)


async def test_the_key_of_the_environment_is_used(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_API_KEY", KEY)
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server:
        assert await answer(server, Access(files.servers.ca)) == "abc"
        assert (await refusal(server, Access(files.servers.ca, api_key=""))).code == "UNAUTHENTICATED"


async def test_an_unknown_certificate_is_not_trusted(files: Files) -> None:
    async with guarded(FakeDispatcher(), **files.tls) as server:
        error = await refusal(server, Access(files.clients.ca))
        assert error.code == "UNAVAILABLE" and "is not trusted (unable to get local issuer" in error.message
        assert error.reason == "NO_HANDSHAKE" and not is_temporary(error)
        async with server.grpc(Access(files.clients.ca)) as client:
            with pytest.raises(DiptychError, match="is not trusted"):
                await client.wait_ready(600.0)
        async with server.http(Access(files.clients.ca)) as client:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.get("/health")


async def test_the_openai_sdk_gets_the_ca_from_the_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server:
        for ca in (files.clients.ca, files.servers.ca):
            monkeypatch.setenv("SSL_CERT_FILE", str(ca))
            async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
                if ca == files.clients.ca:
                    with pytest.raises(APIConnectionError):
                        await sdk.models.list()
                else:
                    assert [model.id async for model in sdk.models.list()] == ["bytes"]


async def test_a_certificate_of_another_host_is_not_trusted(files: Files) -> None:
    files.servers.sign("server", "elsewhere.example")
    async with guarded(FakeDispatcher(), **files.tls) as server:
        assert "is for another host" in (await refusal(server, Access(files.servers.ca))).message


async def test_tls_on_one_side_only_has_a_clear_error(files: Files) -> None:
    async with guarded(FakeDispatcher(), **files.tls) as server, AsyncClient(server.endpoint) as client:
        with pytest.raises(DiptychError, match=r"it may require TLS \(grpcs://127"):
            await client.complete("abc")
    async with guarded(FakeDispatcher()) as server:
        assert "does not use TLS; write grpc://" in (await refusal(server, Access(files.servers.ca))).message
        with pytest.raises(DiptychError, match="is without TLS, so neither a CA nor a certificate has an effect"):
            AsyncClient(server.endpoint, access=Access(files.servers.ca))


async def test_clients_need_a_certificate_of_the_configured_ca(files: Files) -> None:
    own, foreign = files.clients.sign("client", "client.example"), files.servers.sign("other")
    async with guarded(FakeDispatcher(), **files.mutual) as server:
        good = Access(files.servers.ca, own.cert, own.key)
        assert await answer(server, good) == "abc"
        async with server.http(good) as client:
            assert (await client.get("/v1/models")).status_code == 200
        for bad in (Access(files.servers.ca), Access(files.servers.ca, foreign.cert, foreign.key)):
            assert (await refusal(server, bad)).code == "UNAVAILABLE"
            async with server.http(bad) as client:
                with pytest.raises(HANDSHAKE_FAILED):
                    await client.get("/health")


async def test_a_renewed_certificate_is_reloaded(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "cluster.frontend.auth")
    access = Access(files.servers.ca)
    async with guarded(FakeDispatcher(), **files.tls) as server, server.http(access) as connected:
        assert (await connected.get("/health")).status_code == 200
        files.clients.sign("server")  # by another authority, so that it shows
        assert await answer(server, access) == "abc", "nobody has looked yet"
        server.clock.now_s += RECHECK_S
        assert await answer(server, Access(files.clients.ca)) == "abc"
        assert "is not trusted" in (await refusal(server, access)).message
        async with server.http(Access(files.clients.ca)) as client:
            assert (await client.get("/health")).status_code == 200
        assert (await connected.get("/health")).status_code == 200, "connections that are there stay"
    assert [record.levelname for record in caplog.records if record.name == "cluster.frontend.auth"] == ["INFO"]


async def test_an_invalid_renewed_file_keeps_the_old_one(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    access, key_file = Access(files.servers.ca), files.folder / "server-key.pem"
    key = key_file.read_bytes()
    async with guarded(FakeDispatcher(), **files.tls) as server:
        for bad in (files.clients.sign("other").key.read_bytes(), b"no key", None):
            key_file.unlink() if bad is None else key_file.write_bytes(bad)
            caplog.clear()
            for _ in range(3):
                server.clock.now_s += RECHECK_S
                assert await answer(server, access) == "abc"
                async with server.http(access) as client:
                    assert (await client.get("/health")).status_code == 200
            (received,) = [record for record in caplog.records if record.name == "cluster.frontend.auth"]
            assert received.levelname == "ERROR" and received.getMessage().endswith("the previous content stays in use")
        key_file.write_bytes(key)
        server.clock.now_s += RECHECK_S
        assert await answer(server, access) == "abc"


async def test_a_renewed_client_ca_is_reloaded(files: Files) -> None:
    old, new = files.clients.sign("client"), files.servers.sign("newer")
    async with guarded(FakeDispatcher(), **files.mutual) as server:
        before, after = (Access(files.servers.ca, each.cert, each.key) for each in (old, new))
        assert await answer(server, before) == "abc"
        files.clients.ca.write_bytes(files.servers.ca.read_bytes())
        server.clock.now_s += RECHECK_S
        assert await answer(server, after) == "abc" and (await refusal(server, before)).code == "UNAVAILABLE"
        async with server.http(after) as client:
            assert (await client.get("/health")).status_code == 200
        async with server.http(before) as client:
            with pytest.raises(HANDSHAKE_FAILED):
                await client.get("/health")


async def test_tls_sessions_are_not_resumed_with_client_certificates(files: Files) -> None:
    own = files.clients.sign("client")
    async with guarded(FakeDispatcher(), **files.mutual) as server:
        context = Access(files.servers.ca, own.cert, own.key).context()
        host, _, port = server.url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        session = writer.get_extra_info("ssl_object").session
        assert not session.has_ticket, "a ticket would come before the answer"
        writer.close()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        async with httpx2.AsyncClient(base_url=server.url, verify=context, trust_env=False) as client:
            with pytest.raises(HANDSHAKE_FAILED):
                await client.get("/health")


async def test_an_idle_client_does_not_delay_the_close(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.frontend.http.server.LINGER_S", 0.1)
    dispatcher = FakeDispatcher(step_s=0.05)
    access = Access(files.servers.ca)
    async with (
        guarded(dispatcher, **files.tls) as server,
        server.http(access) as resting,
        server.http(access) as asking,
    ):
        assert (await resting.get("/health")).status_code == 200
        body = {"prompt": "abc", "max_tokens": 20}
        answering = asyncio.create_task(asking.post("/v1/completions", json=body))
        while not dispatcher.running:
            await asyncio.sleep(0.01)
        async with asyncio.timeout(25.0):
            await server.servers.close(60.0)
        assert (await answering).json()["usage"]["completion_tokens"] == 20


async def test_keys_are_reloaded_while_connections_stay(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    new = "another-key-of-this-length"
    async with guarded(FakeDispatcher(), **files.tls, **files.keys) as server:
        async with server.grpc(Access(files.servers.ca, api_key=KEY)) as client:
            assert (await client.status()).gateway == "gateway-0"
            files.write_keys(new)
            server.clock.now_s += RECHECK_S
            with pytest.raises(DiptychError) as caught:
                await client.status()
            assert caught.value.code == "UNAUTHENTICATED"
        assert await answer(server, Access(files.servers.ca, api_key=new)) == "abc"
        files.write_keys()
        server.clock.now_s += RECHECK_S
        assert await answer(server, Access(files.servers.ca, api_key=new)) == "abc", "an empty file locks nobody out"
    assert KEY not in caplog.text and new not in caplog.text


async def test_a_key_cannot_name_another_tenant(files: Files) -> None:
    dispatcher = FakeDispatcher()
    files.write_keys(f"{KEY} bank")
    async with guarded(dispatcher, **files.tls, **files.keys) as server:
        access = Access(files.servers.ca, api_key=KEY)
        async with server.grpc(access) as client:
            await client.complete("abc", max_tokens=1)
            await client.complete("abc", max_tokens=1, tenant="bank")
            assert [index async for index, _ in client.batch(["a"], max_tokens=1)] == [0]
            with pytest.raises(DiptychError, match="belongs to tenant 'bank', not to 'eve'") as caught:
                await client.complete("abc", max_tokens=1, tenant="eve")
            assert (caught.value.code, caught.value.reason) == ("PERMISSION_DENIED", "TENANT_REFUSED")
            ((_, received),) = [each async for each in client.batch(["a"], max_tokens=1, tenant="eve")]
            assert isinstance(received, DiptychError) and received.reason == "TENANT_REFUSED"
        async with server.http(access) as client:
            body, header = {"model": "bytes", "prompt": "abc", "max_tokens": 1}, "x-diptych-tenant"
            for headers in ({}, {header: "bank"}):
                assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            refused = await client.post("/v1/completions", json=body, headers={header: "eve"})
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "tenant_refused"
            twice = [(header, "bank"), (header, "eve")], [(header, "eve"), (header, "bank")]
            assert 403 in [
                (await client.post("/v1/completions", json=body, headers=each)).status_code for each in twice
            ]
    assert {each.tenant for each in dispatcher.requests} == {"bank"}


async def test_tenants_share_prefixes_only_if_configured(files: Files) -> None:
    for shares in (False, True):
        dispatcher = FakeDispatcher()
        async with guarded(dispatcher, share_prefixes=shares) as server, AsyncClient(server.endpoint) as client:
            await client.complete("abc", max_tokens=1, tenant="bank")
        assert [each.cache_salt for each in dispatcher.requests] == ["" if shares else "bank"]


WRONG = {
    "a missing file": (("tls_cert_file", None), "server.pem cannot be read (No such file or directory)"),
    "a key of another certificate": (("tls_key_file", "other-key"), "is not the key of the certificate in"),
    "an encrypted key": (
        ("tls_key_file", "hidden-key"),
        "is encrypted; give a key without a password",
    ),
    "no certificate at all": (("tls_cert_file", "text"), "give PEM files of a certificate and of its key"),
    "no authority": (("tls_client_ca_file", "text"), "has no certificate; give a PEM file"),
    "no key": (("api_keys_file", "comment"), "has no key; write one per line"),
    "a short key": (("api_keys_file", "short"), "line 2 of "),
    "a name and a key": (("api_keys_file", "named"), "is not a key; write letters, digits"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_unusable_files_are_reported_before_the_servers_open(files: Files, wrong: str) -> None:
    files.clients.sign("other")
    files.servers.sign("hidden", password=b"word")
    texts = {
        "text": "no PEM",
        "comment": "# nobody\n",
        "short": "#\nshort-secret\n",
        "named": "me: a-key-long-enough\n",
    }
    for kind, text in texts.items():
        (files.folder / f"{kind}.pem").write_text(text)
    (option, name), words = WRONG[wrong]
    given = files.mutual | files.keys
    if name is None:
        Path(given[option]).unlink()
    else:
        given[option] = f"{files.folder}/{name}.pem"
    with pytest.raises(SpecError) as caught:
        Servers(gateway_context(FakeDispatcher(), http_port=0, **given), ByteTokenizer)
    received = str(caught.value)
    assert received.startswith(f"gateway.{option}: ") and words in received and "\n" not in received
    assert "short-secret" not in received and "a-key-long-enough" not in received


async def test_gateways_that_cannot_open_fail_before_the_model_loads(files: Files) -> None:
    """Where the gateway runs, which whoever serves may not see."""
    made = split_spec()
    spec = replace(made, gateway=replace(made.gateway, api_keys_file=f"{files.folder}/nowhere"))
    received: list[str] = []
    with pytest.raises(SpecError, match=r"nowhere cannot be read \(No such file or directory\)"):
        await serve(spec, make_server=open_servers, runtime="local", progress=received.append)
    assert received == ["closing"]  # nothing was started


async def test_a_client_s_certificate_needs_its_key(files: Files) -> None:
    with pytest.raises(DiptychError, match="come together"):
        Access(files.servers.ca, cert_file=files.servers.ca)
    with pytest.raises(OSError, match="nowhere"):
        Client("grpcs://127.0.0.1:1", access=Access("nowhere.pem"))
    assert "secret" not in repr(Access(api_key="secret"))


async def test_a_gateway_without_keys_has_no_key_check() -> None:
    servers = Servers(gateway_context(FakeDispatcher(), http_port=0), ByteTokenizer)
    endpoint = await servers.open()
    try:
        assert servers.http_url.startswith("http://") and not servers._grpc.guard.has_keys
        app, layers = servers._http._server.config.app, []  # type: ignore[union-attr]
        while app is not None:
            layers.append(type(app).__name__)
            app = getattr(app, "_app", None)
        assert layers[:3] == ["CountResponses", "NameRequests", "Connection"]
        async with AsyncClient(endpoint) as client:
            assert (await client.complete("abc", max_tokens=3)).text == "abc"
    finally:
        await servers.close(0.0)
