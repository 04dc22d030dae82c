"""Any OpenAI server as an endpoint: streamed `/v1/completions`, with the server's own token counts.

Before the load, short requests find out which request form the server accepts, in this order:

    token ids + ignore_eos and usage in every chunk  >  text + the same  >  token ids alone  >  text alone

Each chunk is timed on arrival; its number of tokens is known if the chunk has usage.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from cluster.offline.load.endpoint import EndpointError, Target
from cluster.offline.load.sender import Ended, LoadOptions, RequestFailed, drive, nothing
from cluster.offline.scoring.records import Run
from cluster.offline.scoring.request_recorder import CountedAnswer, TokenChunk
from cluster.offline.workload.arrivals import Workload
from cluster.offline.workload.prompts import FIRST_TOKEN
from workers.request import Request, SamplingParams

SAFE_VOCAB_SIZE = 256  # ids that every vocabulary has
CONNECT_S = 10.0
TRIAL_S = 120.0  # for the list of models, and for each short request before the load
LINE_BYTES = 1 << 20  # a chunk's longest line
PROBE = Request("trial", tuple(range(3, 11)), SamplingParams(temperature=0.0, seed=0, max_tokens=2, ignore_eos=True))
REFUSED = (429, 503)
BAD_FORM = (400, 422)  # the server does not accept this form of request
# Words for prompts as text: most vocabularies have each as one token.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city
"""
WORDS = tuple(_TEXT.split())
VOCAB_SIZE = FIRST_TOKEN + len(WORDS)


class TextTokenizer(Protocol):
    """The tokenizer methods used here."""

    def encode(self, text: str) -> Sequence[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Form:
    """The form of requests. `extended`: with vLLM's extensions (`ignore_eos`, `continuous_usage_stats`)."""

    token_ids: bool
    extended: bool

    def __str__(self) -> str:
        prompts = "token ids" if self.token_ids else "text"
        return f"prompts as {prompts}" + ("" if self.extended else ", answers may end early")


FORMS = tuple(Form(token_ids, extended) for extended in (True, False) for token_ids in (True, False))


class HttpEndpoint:
    """A server and one of its models. `open_http` owns the session."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base: str,
        model: str,
        form: Form,
        tokenizer: TextTokenizer | None,
        vocab_size: int,
    ) -> None:
        self._session = session
        self._base = base
        self._model = model
        self._form = form
        self._tokenizer = tokenizer
        self.name = model
        self.vocab_size = vocab_size if form.token_ids else VOCAB_SIZE
        self.description = f"{model} at {base}, {form}"

    async def drive(self, workload: Workload, load: LoadOptions, ended: Ended = nothing) -> Run:
        run = await drive(self.ask, workload, load, ended)
        return replace(run, notes=(*run.notes, f"{self.description}; counted as one rank, the server does not say"))

    async def ask(self, request: Request) -> AsyncGenerator[TokenChunk | CountedAnswer, None]:
        """Raises `RequestFailed` unless the answer is complete."""
        try:
            async with self._session.post(f"{self._base}/completions", json=self._body(request)) as response:
                if response.status != 200:
                    message = await _message(response)
                    refused = response.status in REFUSED
                    raise RequestFailed(f"HTTP {response.status}", message, refused=refused)
                async for event in _events(response):
                    yield event
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            raise RequestFailed("no connection", _connection_error(error)) from error
        except (aiohttp.ClientError, HttpProcessingError, ValueError) as error:
            raise RequestFailed("stream cut", f"{type(error).__name__}: {error}") from error

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        prompt = list(request.prompt) if self._form.token_ids else text_of(request.prompt, self._tokenizer)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._form.extended:
            body["ignore_eos"] = sampling.ignore_eos
            body["stream_options"]["continuous_usage_stats"] = True
        return body


async def _events(response: aiohttp.ClientResponse) -> AsyncGenerator[TokenChunk | CountedAnswer, None]:
    """One `TokenChunk` for each piece of the answer, then the server's count. Raises `RequestFailed`, ValueError."""
    streamed, done, finished = 0, False, False
    usage: dict[str, Any] = {}
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        piece = json.loads(data)
        try:
            if "error" in piece:
                raise RequestFailed("error in the stream", _error_message(piece))
            usage = piece.get("usage") or usage
            choice: dict[str, Any] = next(iter(piece.get("choices") or ()), {})
            finished = finished or choice.get("finish_reason") is not None
            counted = (piece.get("usage") or {}).get("completion_tokens") if choice else None
            new = int(bool(choice.get("text"))) if counted is None else counted - streamed
        except (AttributeError, TypeError):
            raise ValueError(f"a chunk of another form: {data[:80]!r}") from None
        if new > 0:
            streamed += new
            yield TokenChunk(new)
    if not (done or finished):
        raise RequestFailed("stream cut", f"the stream ended after {streamed} tokens, without its end")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    yield CountedAnswer(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def _connection_error(error: aiohttp.ClientError | HttpProcessingError) -> str:
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"the server's certificate is not trusted ({error.certificate_error})"
    number = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    return os.strerror(number) if number else " ".join(str(error).split()) or type(error).__name__


async def _message(response: aiohttp.ClientResponse) -> str:
    text = (await response.text(errors="replace")).strip()
    try:
        return _error_message(json.loads(text))
    except ValueError:
        return " ".join(text[:200].split()) or str(response.reason)


def _error_message(body: Any) -> str:
    """The message in an error body of OpenAI's or FastAPI's form."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    return " ".join(str(message or error)[:400].split())


@asynccontextmanager
async def open_http(target: Target) -> AsyncIterator[HttpEndpoint]:
    """Finds the model and the accepted request form. Raises `EndpointError`."""
    base = target.address.rstrip("/")
    if base.count("/") == 2:
        base += "/v1"
    headers = {"Authorization": f"Bearer {target.bearer}"} if target.bearer else {}
    tokenizer = _tokenizer(target)
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0, ssl=target.access.context() if target.access.has_files else True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        read_bufsize=LINE_BYTES,
    ) as session:
        vocab_size = tokenizer.vocab_size if tokenizer is not None else SAFE_VOCAB_SIZE
        try:
            model = target.model or await _only_model(session, base)
            endpoint = await _first_accepted_form(session, base, model, tokenizer, vocab_size)
        except TimeoutError:
            raise EndpointError(f"{base} did not answer within {TRIAL_S:g} s; does the server work?") from None
        yield endpoint


def _tokenizer(target: Target) -> Any:
    if target.tokenizer is None:
        return None
    from workers.model.tokenizer import ModelTokenizer

    return ModelTokenizer(target.tokenizer)


async def _first_accepted_form(
    session: aiohttp.ClientSession, base: str, model: str, tokenizer: TextTokenizer | None, vocab_size: int
) -> HttpEndpoint:
    rejected: RequestFailed | None = None
    for form in FORMS:
        endpoint = HttpEndpoint(session, base, model, form, tokenizer, vocab_size)
        try:
            async with asyncio.timeout(TRIAL_S):
                async for _ in endpoint.ask(PROBE):
                    pass
            return endpoint
        except RequestFailed as error:
            if error.reason not in map("HTTP {}".format, BAD_FORM):
                raise EndpointError(f"{base}: a short request for model {model} fails: {_with_hint(error)}") from error
            rejected = rejected or error
    raise EndpointError(f"{base}: a short request for model {model} is refused: {_with_hint(rejected)}")


def _with_hint(error: RequestFailed | None) -> str:
    assert error is not None
    hints = {
        "HTTP 401": "; give a key by --key-file, DIPTYCH_API_KEY or OPENAI_API_KEY",
        "HTTP 403": "; give a key by --key-file, DIPTYCH_API_KEY or OPENAI_API_KEY",
        "HTTP 404": "; is this the server's /v1, and --model one of its models?",
    }
    return f"{error} ({error.reason}){hints.get(error.reason, '')}"


async def _only_model(session: aiohttp.ClientSession, base: str) -> str:
    try:
        async with asyncio.timeout(TRIAL_S), session.get(f"{base}/models") as response:
            if response.status != 200:
                failed = RequestFailed(f"HTTP {response.status}", await _message(response))
                raise EndpointError(f"{base}/models: {_with_hint(failed)}")
            names = [str(each["id"]) for each in (await response.json(content_type=None))["data"]]
    except aiohttp.ClientConnectorCertificateError as error:
        raise EndpointError(f"{base}: {_connection_error(error)}; give the CA that signed it with --ca") from error
    except (aiohttp.ClientError, HttpProcessingError) as error:
        raise EndpointError(f"nothing answers at {base} ({_connection_error(error)}); is the server up?") from error
    except (ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{base}/models is no list of models; is this an OpenAI server?") from error
    if len(names) != 1:
        raise EndpointError(f"{base} has {len(names)} models ({', '.join(names[:5])}); choose one with --model")
    return names[0]


def text_of(prompt: Sequence[int], tokenizer: TextTokenizer | None = None) -> str:
    """A word for each token id below `VOCAB_SIZE`; with a tokenizer, cut to the prompt's number of tokens."""
    text = " ".join(WORDS[token - FIRST_TOKEN] for token in prompt)
    if tokenizer is None:
        return text
    return tokenizer.decode(tokenizer.encode(text)[: len(prompt)])
