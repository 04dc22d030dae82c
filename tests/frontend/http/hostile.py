"""Inputs that take long to read or to tokenize, and a measure of how long each holds the event loop up."""

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from unittest import mock

from diptych.v1 import common_pb2, inference_pb2

MAX_S = 0.1  # that nobody's token may be late because of what another client sends
SIZE = 2 << 20
OK = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1'
LAST = b'{"role":"user","content":"hi"}]}'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CONTENT = b'{"messages":[{"role":"user","content":['
CALL = b'{"type":"function_call","call_id":"a","name":"b","arguments":"{}"}'


@dataclass
class Longest:
    """The longest callback of the loop, in CPU time of its thread: what waited for others does not count."""

    seconds: float = 0.0
    name: str = ""


@contextmanager
def longest_callback() -> Iterator[Longest]:
    """Of all callbacks that run meanwhile. As in a gateway, garbage collection passes over what is there already:
    a full collection of the objects of a test process alone can take longer than MAX_S.
    """
    longest, run = Longest(), asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        begun_s = time.thread_time()
        try:
            run(handle)
        finally:
            took_s = time.thread_time() - begun_s
            if took_s > longest.seconds:
                longest.seconds, longest.name = took_s, repr(handle)

    gc.collect()
    gc.freeze()  # for good: unfreezing would also thaw what conftest.py froze, and slow all later collections
    with mock.patch.object(asyncio.Handle, "_run", timed):
        yield longest


def repeated(begin: bytes, piece: bytes, end: bytes, size: int = SIZE) -> bytes:
    return begin + piece * ((size - len(begin) - len(end)) // len(piece)) + end


def bodies() -> list[tuple[str, str, bytes]]:
    """(name, path, body)."""
    text = b'{"prompt":"'
    return [
        ("one text", COMPLETIONS, repeated(text, b"ab ", b'","max_tokens":1}')),
        ("one text of escapes", COMPLETIONS, repeated(text, b"\\u00e9", b'","max_tokens":1}')),
        ("an echo", COMPLETIONS, repeated(text, b"ab ", b'","max_tokens":1,"echo":true}')),
        ("token ids", COMPLETIONS, repeated(b'{"prompt":[', b"1,", b"1]}")),
        ("token ids out of range", COMPLETIONS, repeated(b'{"prompt":[', b"-1,", b"1]}")),
        ("many prompts", COMPLETIONS, repeated(b'{"prompt":[', b'"a",', b'"a"]}')),
        ("many lists", COMPLETIONS, repeated(b'{"prompt":[', b"[1],", b"[1]]}")),
        ("many stops", COMPLETIONS, repeated(b'{"prompt":"a","stop":[', b'"a",', b'"a"]}')),
        ("many stop ids", COMPLETIONS, repeated(b'{"prompt":"a","stop_token_ids":[', b"1,", b"1]}")),
        ("a long stop", COMPLETIONS, repeated(b'{"prompt":"a","stop":["', b"ab", b'"]}')),
        ("a long message", CHAT, OK.replace(b"hi", b"ab " * (SIZE // 3)) + b"}"),
        ("many messages", CHAT, repeated(b'{"messages":[', b'{"role":"user","content":""},', LAST)),
        ("many parts", CHAT, repeated(CONTENT, b'{"type":"text","text":""},', b'{"type":"text","text":""}]}]}')),
        ("many tools", CHAT, repeated(OK + b',"tools":[', b'{"name":"a"},', b'{"name":"a"}]}')),
        ("an ignored list of lists", CHAT, repeated(OK + b',"foo":[', b"[[]],", b"1]}")),
        ("an ignored list of objects", CHAT, repeated(OK + b',"foo":[', b"{},", b"{}]}")),
        ("a deep list", CHAT, OK + b',"foo":' + b"[" * (SIZE // 2) + b"]" * (SIZE // 2) + b"}"),
        ("many biases", CHAT, OK + b',"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(SIZE // 11)) + b"}}"),
        ("a large format", CHAT, repeated(OK + b',"response_format":{"type":"text","a":[', b"[],", b"[]]}}")),
        ("no JSON", CHAT, b"[" * SIZE),
        ("a long number", CHAT, OK + b',"seed":1' + b"0" * SIZE + b"}"),
        ("many items", RESPONSES, repeated(b'{"input":[', b'{"role":"user","content":"a"},', LAST[:-2] + b"]}")),
        ("many calls", RESPONSES, repeated(b'{"input":[', CALL + b",", CALL + b"]}")),
        (
            "much metadata",
            RESPONSES,
            b'{"input":"a","metadata":{' + b",".join(b'"%d":"a"' % i for i in range(SIZE // 13)) + b"}}",
        ),
        (
            "many blocks",
            MESSAGES,
            repeated(CONTENT, b'{"type":"text","text":""},', b'{"type":"text","text":""}]}],"max_tokens":1}'),
        ),
        (
            "many results",
            MESSAGES,
            repeated(CONTENT, b'{"type":"tool_result"},', b'{"type":"tool_result"}]}],"max_tokens":1}'),
        ),
        ("text to count", "/tokenize", repeated(text, b"ab ", b'","return_token_strs":true}')),
        ("a context to count", "/tokenize", repeated(text, b"ab ", b'","return_token_strs":true}', 8000)),
        (
            "messages to count",
            "/tokenize",
            repeated(b'{"messages":[', b'{"role":"a","content":""},', LAST),
        ),
        ("tokens to show", "/detokenize", repeated(b'{"tokens":[', b"5,", b"5]}")),
        ("a context to show", "/detokenize", repeated(b'{"tokens":[', b"5,", b"5]}", 16000)),
    ]


@cache
def messages(size: int = SIZE) -> dict[str, tuple[str, bytes]]:
    """(method, message of about `size` bytes) for the inference service over gRPC, by name."""
    asked = inference_pb2.GenerateRequest
    sampling = inference_pb2.Sampling
    chat, turn = inference_pb2.ChatMessages, inference_pb2.ChatMessage
    several = inference_pb2.GenerateBatchRequest
    count = size // 8
    one = [
        ("one text", asked(text="ab " * (size // 3))),
        ("token ids", asked(tokens=common_pb2.TokenIds(ids=[1] * size))),
        ("many messages", asked(chat=chat(messages=[turn(role="a")] * count))),
        ("many tools", asked(chat=chat(messages=[turn(role="a", content="b")], tools=['{"name":"a"}'] * count))),
        ("many stops", asked(text="a", sampling=sampling(stop=["a"] * count))),
        ("many stop ids", asked(text="a", sampling=sampling(stop_token_ids=[1] * count))),
        ("many biases", asked(text="a", sampling=sampling(logit_bias={i: 1.0 for i in range(count)}))),
        ("a long name", asked(text="a", session_id="a" * size)),
    ]
    batches = [
        ("a batch of nothing", several(requests=[asked()] * count)),
        ("a batch of texts", several(requests=[asked(text="a" * (size // 4))] * 4)),
    ]
    return {
        **{name: ("Generate", message.SerializeToString()) for name, message in one},
        **{name: ("GenerateBatch", message.SerializeToString()) for name, message in batches},
        "no message": ("Generate", b"\xff" * size),
    }
