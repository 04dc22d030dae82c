"""The asyncio client of a running cluster, over gRPC. Every failed call raises `DiptychError`.

`grpcs://HOST:PORT` uses TLS; `access=Access(ca_file=..., api_key=...)` sets the CA and the key. With `retry=Retry()`,
calls with temporary errors are retried, and a broken stream continues where it stopped.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from types import TracebackType
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from diptych.access import Access
from diptych.channel import Interceptors, host_port, open_channel
from diptych.codec import duration_of
from diptych.errors import NO_HANDSHAKE, DiptychError
from diptych.events import Accepted, Answer, Completed, TextDelta, TextEvent, answer_of
from diptych.failures import error_from, error_of_call
from diptych.history import Window
from diptych.messages import events_from, request_message
from diptych.options import BatchOptions, Messages, Prompt, RequestOptions
from diptych.request_ids import new_id
from diptych.retry import Received, Retry, Tries
from diptych.shapes import Shape, Timings
from diptych.status import CACHED_PROMPT, ROLE, SHAPE, TIMINGS, ClusterStatus, window_from
from diptych.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from diptych.view import CachedPrompt, Role
from diptych.wire import INFERENCE


class AsyncClient:
    """One connection. Create it in a running event loop and close it, for example with `async with`.

    `retry` applies to requests and read-only calls; changes of the cluster are never retried. None: no retries. A
    retried request has `.1`, `.2`, ... appended to its id; Accepted has the new id.

    `access`: TLS files and API key; None: the system's CAs, and the key in DIPTYCH_API_KEY if there is one.
    `interceptors`: gRPC interceptors for every call, such as those of OpenTelemetry.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        retry: Retry | None = None,
        access: Access | None = None,
        interceptors: Interceptors = (),
    ) -> None:
        self.endpoint = host_port(endpoint)
        self._retry = retry
        self._channel = open_channel(endpoint, access or Access(), interceptors)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all running calls and close the connection."""
        await self._channel.close()

    def generate(
        self, prompt: Prompt, *, apply_chat_template: bool = False, **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[TextEvent, None]:
        """Continue text or token ids. Closing the iterator cancels the request in the cluster.

        `apply_chat_template`: the text is a user's message; a model without a template continues it as it is.
        """
        request = request_message(prompt, **options)
        request.apply_chat_template = apply_chat_template
        return self._stream(request, options.get("timeout_s"))

    def chat(
        self, messages: Messages, *, tools: Sequence[Mapping[str, Any]] = (), **options: Unpack[RequestOptions]
    ) -> AsyncGenerator[TextEvent, None]:
        """Answer (role, content) messages. Closing the iterator cancels the request in the cluster.

        `tools` describe functions in the format of the model's chat template; the answer has calls as plain text.
        """
        request = request_message(messages=messages, tools=tools, **options)
        return self._stream(request, options.get("timeout_s"))

    async def complete(
        self, prompt: Prompt, *, apply_chat_template: bool = False, **options: Unpack[RequestOptions]
    ) -> Answer:
        """Like `generate`, but returns the whole answer at once."""
        request = request_message(prompt, **options)
        request.apply_chat_template = apply_chat_template
        request.response_mode = inference_pb2.RESPONSE_MODE_WHOLE
        return answer_of([event async for event in self._stream(request, options.get("timeout_s"))])

    async def batch(
        self, prompts: Sequence[Prompt], **options: Unpack[BatchOptions]
    ) -> AsyncGenerator[tuple[int, Answer | DiptychError], None]:
        """Yields (index, answer) in the order in which answers finish; a failed prompt yields its error instead."""
        requests = [request_message(prompt, **options) for prompt in prompts]
        for request in requests:
            request.response_mode = inference_pb2.RESPONSE_MODE_WHOLE
        left, tries = list(range(len(requests))), self._tries(options.get("timeout_s"))
        while True:
            sent, events = tuple(left), dict[int, list[TextEvent]]()
            batch = inference_pb2.GenerateBatchRequest(requests=[requests[index] for index in sent])
            call = self._inference.GenerateBatch(batch, timeout=tries.left_s(_now_s()))
            try:
                async with aclosing(self._messages(call)) as messages:
                    async for message in messages:
                        index = sent[message.index]
                        received = events.setdefault(index, [])
                        if not message.HasField("error"):
                            received.extend(events_from(message.response))
                            if not received or not isinstance(received[-1], Completed):
                                continue
                        tries.progressed()
                        left.remove(index)
                        yield index, error_from(message.error) if message.HasField("error") else answer_of(received)
                return
            except DiptychError as failure:
                if requests and not left:
                    return  # all answers have arrived; only the call's status was lost
                await asyncio.sleep(tries.wait_s(failure, _now_s()))

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request by its id. Returns whether it was running in this gateway."""
        with self._errors():
            answer = await self._inference.Cancel(inference_pb2.CancelRequest(request_id=request_id))
        return bool(answer.was_running)

    async def status(self, *, audit: bool = False, timeout_s: float = 10.0) -> ClusterStatus:
        """The state of the cluster. `audit`: every worker checks that each of its KV blocks is accounted for."""
        request = admin_pb2.GetClusterRequest(audit=audit)
        message = await self._query(lambda left_s: self._admin.GetCluster(request, timeout=left_s), timeout_s)
        return ClusterStatus.read(message)

    async def metrics(self, *, timeout_s: float = 10.0) -> str:
        """The gateway's metrics in Prometheus' text format."""
        request = admin_pb2.GetMetricsRequest()
        answer = await self._query(lambda left_s: self._admin.GetMetrics(request, timeout=left_s), timeout_s)
        return str(answer.text)

    async def trace(
        self, *, last_s: float | None = None, begin_unix_ns: int = 0, end_unix_ns: int = 0, timeout_s: float = 60.0
    ) -> tuple[str, Window]:
        """The gateway's name, and its history: of the last `last_s` seconds, or of a time window (end 0: now).

        Times are Unix nanoseconds by the gateway's clock.
        """
        request = admin_pb2.GetTraceRequest(begin_unix_ns=begin_unix_ns, end_unix_ns=end_unix_ns)
        if last_s is not None:
            request.last.CopyFrom(duration_of(last_s))
        call = self._admin.GetTrace(request, timeout=timeout_s)
        async with aclosing(self._messages(call)) as messages:
            pages = [page async for page in messages]
        return pages[0].gateway, window_from(pages)

    async def flip(self, worker: str, role: Role, *, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Change a ready worker's role; its running requests continue. Returns the cluster's new revision.

        `revision`, in all changes: the one that the caller has seen; ABORTED if the cluster has changed since. 0: any.
        Other errors: NOT_FOUND, FAILED_PRECONDITION with the reason.
        """
        request = admin_pb2.FlipWorkerRequest(worker=worker, role=ROLE.encode(role), expected_revision=revision)
        with self._errors():
            return int((await self._admin.FlipWorker(request, timeout=timeout_s)).revision)

    async def drain(
        self, worker: str, *, deadline_s: float | None = None, revision: int = 0, timeout_s: float = 90.0
    ) -> int:
        """Drain a worker: it takes no new work and stops once it is empty, or at the deadline. Does not wait for it."""
        request = admin_pb2.DrainWorkerRequest(worker=worker, expected_revision=revision)
        if deadline_s is not None:
            request.deadline.CopyFrom(duration_of(deadline_s))
        with self._errors():
            return int((await self._admin.DrainWorker(request, timeout=timeout_s)).revision)

    async def scale(self, pool: str, replicas: int, *, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Set a pool's number of workers: new ones start, or those with the least work drain. Waits for neither."""
        request = admin_pb2.ScalePoolRequest(pool=pool, replicas=replicas, expected_revision=revision)
        with self._errors():
            return int((await self._admin.ScalePool(request, timeout=timeout_s)).revision)

    async def load_adapter(
        self, name: str, path: str, *, model: str = "", revision: int = 0, timeout_s: float = 90.0
    ) -> int:
        """Serve a LoRA adapter: a PEFT folder at this path on every node. Requests name it as their model.

        INVALID_ARGUMENT if it does not fit the model.
        """
        request = admin_pb2.LoadAdapterRequest(name=name, path=path, model=model, expected_revision=revision)
        with self._errors():
            return int((await self._admin.LoadAdapter(request, timeout=timeout_s)).revision)

    async def unload_adapter(self, name: str, *, revision: int = 0, timeout_s: float = 90.0) -> int:
        """Refuse new requests for an adapter. Running ones go on."""
        request = admin_pb2.UnloadAdapterRequest(name=name, expected_revision=revision)
        with self._errors():
            return int((await self._admin.UnloadAdapter(request, timeout=timeout_s)).revision)

    async def warm(
        self,
        text: str,
        *,
        pin_s: float | None = None,
        pool: str = "",
        tenant: str = "",
        apply_chat_template: bool = False,
        timeout_s: float = 150.0,
    ) -> tuple[CachedPrompt, ...]:
        """Compute a prompt on each worker that prefills, of this pool or of all, so that prompts which begin with it
        find it. `pin_s`: it also stays in host memory until this long after its last use.
        """
        template = apply_chat_template
        request = admin_pb2.WarmPromptRequest(text=text, pool=pool, tenant=tenant, apply_chat_template=template)
        if pin_s is not None:
            request.pin.CopyFrom(duration_of(pin_s))
        with self._errors():
            answer = await self._admin.WarmPrompt(request, timeout=timeout_s)
        return tuple(map(CACHED_PROMPT.decode, answer.workers))

    async def unpin(
        self,
        text: str | None = None,
        *,
        pool: str = "",
        tenant: str = "",
        apply_chat_template: bool = False,
        timeout_s: float = 30.0,
    ) -> tuple[CachedPrompt, ...]:
        """Unpin this prompt of this tenant, or all prompts of all tenants, on each worker that prefills."""
        template = apply_chat_template
        request = admin_pb2.UnpinPromptsRequest(text=text, pool=pool, tenant=tenant, apply_chat_template=template)
        with self._errors():
            answer = await self._admin.UnpinPrompts(request, timeout=timeout_s)
        return tuple(map(CACHED_PROMPT.decode, answer.workers))

    async def measure(self, worker: str, shape: Shape, repeats: int = 1, *, timeout_s: float = 150.0) -> Timings:
        """Time steps of this shape on an idle worker. Errors: INVALID_ARGUMENT if no step can have this shape,
        RESOURCE_EXHAUSTED if the worker has work.
        """
        with self._errors():
            message = SHAPE.encode(shape, worker=worker, repeats=repeats)
            return TIMINGS.decode(await self._admin.MeasureSteps(message, timeout=timeout_s))

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until a worker is ready; the server itself may still be starting."""
        request = health_pb2.HealthCheckRequest(service=INFERENCE)
        try:
            async with asyncio.timeout(timeout_s):
                await self._check_handshake(request)
                async with aclosing(self._messages(self._health.Watch(request, wait_for_ready=True))) as answers:
                    async for answer in answers:
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
        except TimeoutError:
            raise DiptychError("DEADLINE_EXCEEDED", f"{self.endpoint} was not ready after {timeout_s:g} s") from None
        raise DiptychError("UNAVAILABLE", f"{self.endpoint} is shutting down")

    async def _check_handshake(self, request: health_pb2.HealthCheckRequest) -> None:
        """Raise `DiptychError` if the TLS handshake fails, because waiting cannot fix that."""
        try:
            with self._errors():
                await self._health.Check(request)
        except DiptychError as failure:
            if failure.reason == NO_HANDSHAKE:
                raise

    async def _stream(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[TextEvent, None]:
        tries, received = self._tries(timeout_s), Received()
        name = request.request_id or new_id()
        if self._retry is not None and not request.sampling.HasField("seed"):
            request.sampling.seed = secrets.randbits(64)  # so that every try gives the same answer
        for number in itertools.count():
            if number:  # workers may still run the previous try
                request.request_id = f"{name[:120]}.{number}"
            accepted = ""
            received.begin()
            call = self._inference.Generate(request, timeout=tries.left_s(_now_s()))
            try:
                async with aclosing(self._messages(call)) as messages:
                    async for message in messages:
                        for event in events_from(message):
                            if isinstance(event, Accepted) and event.index == 0:
                                accepted = event.request_id.partition("#")[0]  # without the number of an answer
                            if isinstance(event, TextDelta) and self._retry is not None:
                                new = received.new(event)
                                if new is None:
                                    continue
                                event = new
                                tries.progressed()
                            yield event
                return
            except DiptychError as failure:
                await asyncio.sleep(tries.wait_s(failure, _now_s()))
                if accepted:
                    await self._end(accepted)

    async def _end(self, request_id: str) -> None:
        """Cancel the request of a broken stream, if it still runs. An unreachable gateway notices by itself."""
        with suppress(DiptychError), self._errors():
            await self._inference.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=5.0)

    async def _query(self, call: Callable[[float | None], Awaitable[Any]], timeout_s: float) -> Any:
        """The answer to a read-only call, with retries."""
        tries = self._tries(timeout_s)
        while True:
            try:
                with self._errors():
                    return await call(tries.left_s(_now_s()))
            except DiptychError as failure:
                await asyncio.sleep(tries.wait_s(failure, _now_s()))

    def _tries(self, timeout_s: float | None) -> Tries:
        return Tries(self._retry, None if timeout_s is None else _now_s() + timeout_s)

    async def _messages(self, call: Any) -> AsyncGenerator[Any, None]:
        """The call's messages. Closing the iterator early cancels the call."""
        try:
            with self._errors():
                async for message in call:
                    yield message
        finally:
            call.cancel()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            raise error_of_call(failure, self.endpoint) from None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
