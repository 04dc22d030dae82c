"""The inference and admin services of a gateway. `cluster.frontend.grpc.interceptors` turns errors into statuses.

Handlers are coroutines that write, not generators: a client that disconnects cancels the handler wherever it waits, and
the handler then closes the request's iterator.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from cluster.control.changes import MAX_DRAIN_S, ControllerUnavailable
from cluster.events import Completed
from cluster.frontend.auth import Authenticator
from cluster.frontend.context import Operator
from cluster.frontend.gateway import Gateway, GenerateOptions, servable
from cluster.frontend.grpc.messages import (
    prompt_from,
    read_batch,
    read_model,
    read_request,
    request_from,
    requests_from,
    sampling_from,
    slo_from,
)
from cluster.frontend.grpc.sender import Context, OutputNotTaken, Sender, abort
from cluster.frontend.grpc.statuses import code_name, status_of
from cluster.frontend.output_collector import SendDelta
from cluster.frontend.preprocessing import LARGE_BYTES
from cluster.frontend.served_models import ServedModels
from cluster.frontend.text import PromptInput, TextDelta, TextEnd, TextPrompt
from cluster.observe.ledger import now_ns
from cluster.observe.metrics import ModelMetrics, exposition_of
from cluster.observe.trace_context import set_trace_headers
from cluster.spec import MAX_REPLICAS
from diptych.codec import seconds
from diptych.messages import DELTA, event_message
from diptych.request_ids import new_id
from diptych.status import CACHED_PROMPT, OPTIONAL_ROLE, SHAPE, TIMINGS, ClusterStatus, trace_pages
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from diptych.view import Role
from diptych.wire import INFERENCE, MAX_MESSAGE_BYTES
from workers.errors import InvalidRequest

MAX_BATCH_IN_FLIGHT = 64  # answers of one batch; the others wait, so that a batch cannot fill the gateway
MAX_NAME_CHARS = 256
MAX_PIN_S = 30 * 86_400.0


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Requests arrive as bytes, and large ones are decoded outside the event loop. Owned by the server."""

    def __init__(self, models: ServedModels, guard: Authenticator) -> None:
        self._models = models
        self._preprocessing = models.gateways[0].preprocessing  # of what is read before the model is known
        self._guard = guard

    async def Generate(self, raw: bytes, context: Context) -> None:
        request_id = ""
        sender = Sender(context, event_message)
        self._set_trace_headers(context)
        try:
            gateway, request, prompt = await self._read(raw, context)
            request_id = request.request_id
            generated = responses(gateway, request, prompt, deadline_of(context), sender.send_at_once)
            async with sender, aclosing(generated) as messages:
                async for message in messages:
                    await sender.send(message)
        except Exception as error:  # not left to the interceptor, so that the log line has the request's id
            await abort(context, status_of(error, servable(self._models.view), request_id))

    async def GenerateBatch(self, raw: bytes, context: Context) -> None:
        if len(raw) <= LARGE_BYTES:
            requests = requests_from(raw)
        else:
            requests = await self._preprocessing.call(len(raw), read_batch, raw)
        self._set_trace_headers(context)
        await self._batch(requests, context, deadline_of(context))

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        return inference_pb2.CancelResponse(was_running=self._models.cancel(request.request_id))

    async def _read(self, raw: bytes, context: Context) -> tuple[Gateway, inference_pb2.GenerateRequest, PromptInput]:
        """The gateway of the request's model; the request, with its id and the tenant of the call's key; the prompt.

        Raises `UnknownModel`, `InvalidRequest`, the preprocessing errors of a large prompt, `KeyRefused` and
        `TenantRefused`.
        """
        if len(raw) <= LARGE_BYTES:
            request = request_from(raw)
            gateway, prompt = self._models.of(request.model), prompt_from(request)  # type: Gateway, PromptInput
        else:
            model = await self._preprocessing.call(len(raw), read_model, raw) if self._models.has_several else ""
            gateway = self._models.of(model)
            call = gateway.preprocessing.call
            without_prompt, prompt = await call(len(raw), read_request, raw, gateway.limits.bounds)
            request = request_from(without_prompt)
        request.request_id = request.request_id or new_id()  # before the checks, so that logged errors have it
        metadata: Any = context.invocation_metadata() or ()
        request.tenant = self._guard.tenant(dict(metadata).get("authorization"), request.tenant)
        return gateway, request, prompt

    def _set_trace_headers(self, context: Context) -> None:
        if self._models.traces:
            set_trace_headers(context.invocation_metadata() or ())

    async def _batch(self, requests: Sequence[bytes], context: Context, deadline_s: float | None) -> None:
        slots = asyncio.Semaphore(MAX_BATCH_IN_FLIGHT)
        acquiring = asyncio.Lock()  # one request acquires all its slots at a time: two with half of theirs deadlock
        writing = asyncio.Lock()  # one write at a time; meanwhile each request's collector joins its deltas
        sender = Sender(context)
        clock = asyncio.get_running_loop()
        started_s = clock.time()

        async def write(index: int, **result: Any) -> None:
            async with writing:
                await sender.send(inference_pb2.GenerateBatchResponse(index=index, **result))

        async def run(index: int, raw: bytes) -> None:
            request_id, acquired = "", 0
            try:
                async with acquiring:
                    gateway, request, prompt = await self._read(raw, context)
                    request_id = request.request_id
                    for _ in range(min(MAX_BATCH_IN_FLIGHT, max(1, request.sampling.n, request.sampling.best_of))):
                        await slots.acquire()
                        acquired += 1
                left_s = None if deadline_s is None else deadline_s - (clock.time() - started_s)
                async with aclosing(responses(gateway, request, prompt, left_s)) as messages:
                    async for message in messages:
                        await write(index, response=message)
                self._models.responses.count("grpc", "Generate", "OK")
            except OutputNotTaken:
                raise  # ends the whole batch
            except Exception as error:
                status = status_of(error, servable(self._models.view), request_id)
                self._models.responses.count("grpc", "Generate", code_name(status.code))
                await write(index, error=status)
            finally:
                for _ in range(acquired):
                    slots.release()

        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(run(index, request))


def add_inference_service(service: InferenceService, server: grpc.aio.Server) -> None:
    """Like the generated function, but `Generate` and `GenerateBatch` get their requests as bytes."""
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.Generate, response_serializer=inference_pb2.GenerateResponse.SerializeToString
        ),
        "GenerateBatch": grpc.unary_stream_rpc_method_handler(
            service.GenerateBatch, response_serializer=inference_pb2.GenerateBatchResponse.SerializeToString
        ),
        "Cancel": grpc.unary_unary_rpc_method_handler(
            service.Cancel,
            request_deserializer=inference_pb2.CancelRequest.FromString,
            response_serializer=inference_pb2.CancelResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, methods),))


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Owned by the server."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models
        self._name = models.context.name
        self._queries = models.context.queries

    async def GetCluster(self, request: admin.GetClusterRequest, context: Context) -> admin.GetClusterResponse:
        operator = self._models.context.operator
        return ClusterStatus(
            view=await self._queries.audit() if request.audit else self._queries.view,
            gateway=self._name,
            active_requests=self._models.active,
            max_requests=self._models.max_requests,
            decisions=() if operator is None else await operator.decisions(),
            slo_attainment=self._queries.slo_attainment(),
            recent=self._queries.recent(),
        ).message()

    async def GetMetrics(self, request: admin.GetMetricsRequest, context: Context) -> admin.GetMetricsResponse:
        return admin.GetMetricsResponse(text=await metrics_text(self._models))

    async def GetTrace(self, request: admin.GetTraceRequest, context: Context) -> None:
        offset_ns = time.time_ns() - now_ns()
        sender = Sender(context)
        begin_ns, end_ns = _interval(request, now_ns(), offset_ns)
        window = self._queries.window(begin_ns, end_ns).shifted(offset_ns)
        for page in trace_pages(window, self._name):
            await sender.send(page)

    async def MeasureSteps(self, request: admin.MeasureStepsRequest, context: Context) -> admin.MeasureStepsResponse:
        worker = _checked_name("worker", request.worker)
        timings = await self._queries.measure(worker, SHAPE.decode(request), request.repeats)
        message: admin.MeasureStepsResponse = TIMINGS.encode(timings)
        return message

    async def WarmPrompt(self, request: admin.WarmPromptRequest, context: Context) -> admin.WarmPromptResponse:
        ttl_s = seconds(request.pin) if request.HasField("pin") else 0.0
        if request.HasField("pin") and not 0.0 < ttl_s <= MAX_PIN_S:
            raise InvalidRequest("pin", f"is {ttl_s:g} s; it must be above 0 and at most {MAX_PIN_S:.0f}")
        prompt = TextPrompt(request.text, apply_chat_template=request.apply_chat_template)
        pool = _checked_name("pool", request.pool)
        warmed = await self._models.of_pool(pool).warm(prompt, request.tenant, pool, ttl_s)
        return admin.WarmPromptResponse(workers=map(CACHED_PROMPT.encode, warmed))

    async def UnpinPrompts(self, request: admin.UnpinPromptsRequest, context: Context) -> admin.UnpinPromptsResponse:
        prompt = None
        if request.HasField("text"):
            prompt = TextPrompt(request.text, apply_chat_template=request.apply_chat_template)
        pool = _checked_name("pool", request.pool)
        every = prompt is None and not pool
        gateways = self._models.gateways if every else [self._models.of_pool(pool)]
        unpinned = [each for gateway in gateways for each in await gateway.unpin(prompt, request.tenant, pool)]
        return admin.UnpinPromptsResponse(workers=map(CACHED_PROMPT.encode, unpinned))

    async def FlipWorker(self, request: admin.FlipWorkerRequest, context: Context) -> admin.FlipWorkerResponse:
        role: Role | None = OPTIONAL_ROLE.decode(request.role)
        if role is None:
            raise InvalidRequest("role", "is missing; give POOL_ROLE_PREFILL, POOL_ROLE_DECODE or POOL_ROLE_MIXED")
        worker = _checked_name("worker", request.worker)
        revision = await self._operator().flip(worker, role, request.expected_revision)
        return admin.FlipWorkerResponse(revision=revision)

    async def DrainWorker(self, request: admin.DrainWorkerRequest, context: Context) -> admin.DrainWorkerResponse:
        deadline_s = seconds(request.deadline) if request.HasField("deadline") else 0.0
        if request.HasField("deadline") and not 0.0 < deadline_s <= MAX_DRAIN_S:
            rule = f"it must be above 0 and at most {MAX_DRAIN_S:.0f}"
            raise InvalidRequest("deadline", f"is {deadline_s:g} s; {rule}")
        worker = _checked_name("worker", request.worker)
        revision = await self._operator().drain(worker, request.expected_revision, deadline_s)
        return admin.DrainWorkerResponse(revision=revision)

    async def ScalePool(self, request: admin.ScalePoolRequest, context: Context) -> admin.ScalePoolResponse:
        pool = _checked_name("pool", request.pool)
        if request.replicas > MAX_REPLICAS:
            raise InvalidRequest("replicas", f"is {request.replicas}; a pool has at most {MAX_REPLICAS} workers")
        revision = await self._operator().scale(pool, request.replicas, request.expected_revision)
        return admin.ScalePoolResponse(revision=revision)

    async def LoadAdapter(self, request: admin.LoadAdapterRequest, context: Context) -> admin.LoadAdapterResponse:
        gateway = self._models.of(request.model)
        adapter = await gateway.read_adapter(_checked_name("name", request.name), request.path)
        revision = await self._operator().load_adapter(adapter, request.expected_revision)
        return admin.LoadAdapterResponse(revision=revision)

    async def UnloadAdapter(self, request: admin.UnloadAdapterRequest, context: Context) -> admin.UnloadAdapterResponse:
        name = _checked_name("name", request.name)
        revision = await self._operator().unload_adapter(name, request.expected_revision)
        return admin.UnloadAdapterResponse(revision=revision)

    def _operator(self) -> Operator:
        if self._models.context.operator is None:
            raise ControllerUnavailable("this gateway has no controller; ask another one")
        return self._models.context.operator


def _checked_name(field: str, name: str) -> str:
    """The name, unless it is too long to repeat in errors and to send to other processes."""
    if len(name) > MAX_NAME_CHARS:
        raise InvalidRequest(field, f"has {len(name)} characters; no name here has more than {MAX_NAME_CHARS}")
    return name


def _interval(request: admin.GetTraceRequest, current_ns: int, offset_ns: int) -> tuple[int, int]:
    """Begin and end on this gateway's clock; the request's clock is `offset_ns` ahead."""
    if request.HasField("last"):
        if (last_ns := request.last.ToNanoseconds()) < 0:
            raise InvalidRequest("last", f"is {last_ns / 1e9:g} s; give 0 or more")
        return current_ns - last_ns, current_ns
    end_ns = request.end_unix_ns - offset_ns if request.end_unix_ns else current_ns
    begin_ns = request.begin_unix_ns - offset_ns
    if begin_ns > end_ns:
        raise InvalidRequest("begin_unix_ns", "is after the end; give an earlier time")
    return begin_ns, end_ns


async def metrics_text(models: ServedModels) -> str:
    """This gateway's metrics in Prometheus' text format."""
    operator = models.context.operator
    decided = None if operator is None else await operator.decision_counts()
    parts = [
        ModelMetrics(context.dispatcher.slo_attainment(), context.dispatcher.view, gateway.active)
        for context, gateway in zip(models.context.models, models.gateways, strict=True)
    ]
    extra = decided, models.spec.metrics.compat, models.responses.rows()
    # In a thread: a thousand series take about 15 ms, which would delay tokens.
    return await asyncio.to_thread(exposition_of, parts, models.context.name, models.view, *extra)


@asynccontextmanager
async def _grammar_named(sampling: inference_pb2.Sampling) -> AsyncIterator[None]:
    """A refused grammar is named by the field that has it."""
    try:
        yield
    except InvalidRequest as error:
        field = sampling.WhichOneof("grammar")
        if error.field != "sampling.grammar" or field is None:
            raise
        raise InvalidRequest(f"sampling.{field}", error.message) from None


async def responses(
    gateway: Gateway,
    request: inference_pb2.GenerateRequest,
    prompt: PromptInput,
    deadline_s: float | None,
    send_delta: SendDelta | None = None,
) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    """The messages of one request, in its response mode. Closing the iterator cancels the request.

    `send_delta`: see `Gateway.generate`; not used for whole answers.
    """
    whole = _is_whole(request)
    sampling = sampling_from(request.sampling, gateway.default_sampling)
    if sampling.num_answers > sampling.n and not whole:
        rule = "above n it needs RESPONSE_MODE_WHOLE, because the best are known at the end"
        raise InvalidRequest("sampling.best_of", f"is {sampling.best_of} for {sampling.n} answers; {rule}")
    events = gateway.generate(
        prompt,
        sampling,
        GenerateOptions(
            slo=slo_from(request.slo),
            request_id=request.request_id,
            deadline_s=deadline_s,
            session=request.session_id,
            model=request.model,
            tenant=request.tenant,
        ),
        send_delta=None if whole else send_delta,
    )
    deltas: list[TextDelta] = []
    async with _grammar_named(request.sampling), aclosing(events):
        async for event in events:
            if isinstance(event, TextEnd):
                continue  # Completed has all ends
            if whole and isinstance(event, TextDelta):
                deltas.append(event)
                continue
            message = event_message(event)
            if whole and isinstance(event, Completed):
                message.completed.outputs.extend(map(DELTA.encode, TextDelta.join_each(deltas)))
                _check_size(message)
            yield message


def _check_size(message: inference_pb2.GenerateResponse) -> None:
    if (num_bytes := message.ByteSize()) > MAX_MESSAGE_BYTES:
        rule = f"more than one message can carry ({MAX_MESSAGE_BYTES >> 20} MiB); ask for RESPONSE_MODE_DELTAS"
        raise InvalidRequest("response_mode", f"the whole output has {num_bytes >> 20} MiB, {rule}")


def _is_whole(request: inference_pb2.GenerateRequest) -> bool:
    mode = request.response_mode
    if mode not in inference_pb2.ResponseMode.values():
        raise InvalidRequest("response_mode", f"{mode} is unknown; give RESPONSE_MODE_DELTAS or RESPONSE_MODE_WHOLE")
    return mode == inference_pb2.RESPONSE_MODE_WHOLE


def deadline_of(context: Context) -> float | None:
    """Seconds until the request's deadline: a little before the call's, so that the status with the phase still reaches
    the client. None: no deadline.
    """
    left_s = context.time_remaining()
    return None if left_s is None else left_s - min(0.05, 0.1 * left_s)
