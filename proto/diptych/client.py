"""The Python client of a running cluster, over gRPC. Every failed call raises `DiptychError`.

with Client("127.0.0.1:50051") as client:
    for event in client.generate("The sea is", max_tokens=32):
        if isinstance(event, TextDelta):
            print(event.text, end="")

`AsyncClient` is the same for asyncio programs. This package imports only the gRPC libraries, protobuf and msgspec: no
serving code, and no top-level name that could clash with a caller's own packages.
"""

from diptych.access import Access
from diptych.aio import AsyncClient
from diptych.blocking import Client
from diptych.errors import DiptychError
from diptych.events import Accepted, Answer, Completed, FinishReason, Queued, TextDelta, TextEvent, answer_of
from diptych.options import SLO, BatchOptions, Messages, Prompt, RequestOptions, SamplingOptions
from diptych.retry import Retry
from diptych.shapes import Shape, Timings
from diptych.status import ClusterStatus
from diptych.view import ClusterView, Role, WorkerState, WorkerView

__all__ = [
    "SLO",
    "Accepted",
    "Access",
    "Answer",
    "AsyncClient",
    "BatchOptions",
    "Client",
    "ClusterStatus",
    "ClusterView",
    "Completed",
    "DiptychError",
    "FinishReason",
    "Messages",
    "Prompt",
    "Queued",
    "RequestOptions",
    "Retry",
    "Role",
    "SamplingOptions",
    "Shape",
    "TextDelta",
    "TextEvent",
    "Timings",
    "WorkerState",
    "WorkerView",
    "answer_of",
]
