"""KV blocks on a Redis or Valkey server, which workers share: reads and writes beside the event loop, on threads.

    key     diptych: FINGERPRINT : CONTENT HASH      both in hexadecimal digits
    value   header page, block                       as in a slot of the disk (`slot_format`)

Whatever goes wrong is a miss, and a server that fails or hangs is not used for a while. The server evicts by its own
rule (`maxmemory-policy`). Knows no sequence and no tensor.
"""

import asyncio
import io
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

from redis import Redis
from redis._parsers import _RESP2Parser
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from workers.errors import KVStoreError
from workers.kv_store.health import KVStoreStats, StoreHealth
from workers.kv_store.io_threads import (
    CLOSE_TIMEOUT_S,
    CORRUPT,
    GOOD,
    LATE,
    MAX_READS,
    MAX_WRITES,
    MISS,
    READ_THREADS,
    WRITE_THREADS,
    BlockCopies,
    BlockCopy,
    IOOutcome,
    IOResult,
    IOThreads,
)
from workers.kv_store.known_blocks import MAX_KNOWN, KnownBlocks
from workers.kv_store.slot_format import HASH_BYTES, PAGE_BYTES, decode_header, encode_header, is_intact, slot_bytes

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0  # without a byte from the server
UPLOAD_TIMEOUT_S = 5.0
MAX_ASKED = 256  # block hashes in one question
DEFAULT_BYTE_S = 1e-8  # of a server that does not answer at the start
PROBE_READS = 8
READ_BYTES = 1 << 20  # that the client takes from its socket at once: fewer, larger copies


class RemoteStore:
    """Call it on one event loop, and close it. `client` is then its own.

    `added` gets what others have written and this worker has read, with the prefix hash, and
    `gone` each block hash that was known to be there and may not be any more. `read_byte_s`: seconds that reading a
    byte took at the start, of several blocks at once. `problem`: why the server did not answer then.
    """

    def __init__(
        self, client: "Redis", fingerprint: bytes, block_bytes: int, read_byte_s: float, problem: str = ""
    ) -> None:
        self._client = client
        self._fingerprint = fingerprint
        self._block_bytes = block_bytes
        self._problem = problem
        self.read_byte_s = read_byte_s
        self.added: Callable[[bytes, int], object] = lambda block_hash, prefix: None
        self._readers = IOThreads("kv-remote-read", READ_THREADS, MAX_READS, PAGE_BYTES)
        self._writers = IOThreads("kv-remote-write", WRITE_THREADS, MAX_WRITES, slot_bytes(block_bytes))
        self.known = KnownBlocks()
        self._reads = StoreHealth("reads of the remote KV store", self.known.clear, partial(self._probe, self._readers))
        self._writes = StoreHealth("writes of the remote KV store", probe=partial(self._probe, self._writers))
        self._copies = BlockCopies()
        self._writing: set[bytes] = set()
        self._doubtful: OrderedDict[bytes, None] = OrderedDict()  # forgotten, and not yet written again or deleted
        self._read = self._written = self._corrupt = self._dropped = 0
        self._closed = False

    def watch(self, added: Callable[[bytes, int], object], gone: Callable[[bytes], object]) -> dict[bytes, int]:
        """On the event loop: tell `added` and `gone`, and try again later what did not answer at the start. Returns
        what is known: nothing.
        """
        self.added, self.known.gone = added, gone
        if self._problem:
            self._reads.stop(self._problem)
            self._writes.stop(self._problem)
        return {}

    def stats(self) -> KVStoreStats:
        return KVStoreStats(
            num_stored=len(self.known),
            reads=self._read,
            read_failures=self._reads.failures,
            corrupt=self._corrupt,
            writes=self._written,
            write_failures=self._writes.failures,
            writes_dropped=self._dropped,
            late=self._copies.late,
            stopped_reads=self._reads.stopped,
            stopped_writes=self._writes.stopped,
        )

    # ---- find ----------------------------------------------------------------------------------------------------

    async def find(self, hashes: Sequence[bytes], timeout_s: float) -> int:
        """How many of the first blocks the server has; 0 if it does not say so in time."""
        if not hashes or self._closed or self._reads.stopped or self._readers.is_full:
            return 0
        count = 0

        def ended(result: IOResult) -> None:
            nonlocal count
            count = result.found
            if result.outcome is IOOutcome.GOOD:
                for block_hash in hashes[count : count + 1]:
                    self.known.lost(block_hash)
            self._copies.ended(job, result)
            job.finish(result.outcome is IOOutcome.GOOD)

        job = self._copies.begin(self._reads, timeout_s)
        self._readers.submit(partial(self._ask, hashes, job), ended)
        await self._wait(job)
        return next((place for place, block_hash in enumerate(hashes[:count]) if block_hash in self._doubtful), count)

    def _ask(self, hashes: Sequence[bytes], job: BlockCopy, _: memoryview) -> IOResult:
        """On a thread. A value of another size is not there."""
        count = 0
        try:
            for first in range(0, len(hashes), MAX_ASKED):
                if job.is_over:
                    return LATE
                asked = self._client.pipeline(transaction=False)
                for block_hash in hashes[first : first + MAX_ASKED]:
                    asked.strlen(self._key(block_hash))
                sizes = asked.execute(raise_on_error=False)
                there = [size == PAGE_BYTES + self._block_bytes for size in sizes]
                count += [*there, False].index(False)
                if not all(there):
                    break
        except Exception as error:  # a reply may be anything
            return _failed(error)
        return IOResult(IOOutcome.GOOD, found=count)

    # ---- write ---------------------------------------------------------------------------------------------------

    async def write(self, block_hash: bytes, block: memoryview, prefix: int | None = None) -> bool:
        """Store a block, whose memory must not change meanwhile. Whether it is there and can be read, as far as known.

        False also if the queue is full, the server fails, is full or is too slow, or reads are stopped.
        """
        assert len(block_hash) == HASH_BYTES and block.nbytes == self._block_bytes
        if block_hash in self.known:
            self.known.found(block_hash)
            return True
        if block_hash in self._writing:
            return False
        if self._closed or self._writes.stopped or self._writers.is_full:
            self._dropped += 1
            return False
        self._writing.add(block_hash)
        job = self._copies.begin(self._writes, UPLOAD_TIMEOUT_S)
        is_doubtful = block_hash in self._doubtful

        def ended(result: IOResult) -> None:
            self._writing.discard(block_hash)
            if result is GOOD:
                self._written += 1
                if is_doubtful:
                    self._doubtful.pop(block_hash, None)
            self._copies.ended(job, result)
            job.finish(result is GOOD or result is MISS)  # a miss: another worker has written it

        self._writers.submit(partial(self._set, block_hash, prefix, job, block, is_doubtful), ended)
        is_there = await self._wait(job) and block_hash not in self._doubtful and not self._reads.stopped
        if is_there:
            self.known.found(block_hash)
        return is_there

    def _set(
        self,
        block_hash: bytes,
        prefix: int | None,
        job: BlockCopy,
        block: memoryview,
        is_doubtful: bool,
        buffer: memoryview,
    ) -> IOResult:
        """On a thread. What another worker has written is not sent again."""
        value = buffer[: PAGE_BYTES + self._block_bytes]
        if job.is_over:
            return LATE
        key = self._key(block_hash)
        try:
            if not is_doubtful and self._client.strlen(key) == len(value):
                return MISS
            if not job.copy(block, value[PAGE_BYTES:]):
                return LATE
            value[:PAGE_BYTES] = encode_header(self._fingerprint, block_hash, prefix, 0, value[PAGE_BYTES:])
            self._client.set(key, value)
        except Exception as error:  # a reply may be anything
            return _failed(error)
        return GOOD

    # ---- read ----------------------------------------------------------------------------------------------------

    async def read(self, block_hash: bytes, target: memoryview, timeout_s: float) -> bool:
        """Read a block into `target`, which is not written to once this has returned.

        False: a miss, and `target` is as it was. If cancelled, `target` is released at once too.
        """
        assert target.nbytes == self._block_bytes and not target.readonly
        if self._closed or self._reads.stopped or self._readers.is_full or block_hash in self._doubtful:
            return False
        job = self._copies.begin(self._reads, timeout_s)

        def ended(result: IOResult) -> None:
            if result.outcome is IOOutcome.GOOD:
                self._read += 1
                if result.prefix is not None and block_hash not in self.known:
                    self.added(block_hash, result.prefix)
            elif result is CORRUPT:
                self._corrupt += 1
                if self._corrupt == 1:
                    logger.warning("a block of the remote KV store is corrupt: a miss; later ones are only counted")
            self._copies.ended(job, result)
            job.finish(result.outcome is IOOutcome.GOOD)

        self._readers.submit(partial(self._get, block_hash, job, target), ended)
        arrived = await self._wait(job)
        (self.known.found if arrived else self.known.lost)(block_hash)
        return arrived

    def _get(self, block_hash: bytes, job: BlockCopy, target: memoryview, _: memoryview) -> IOResult:
        """On a thread."""
        if job.is_over:
            return LATE
        key, size = self._key(block_hash), PAGE_BYTES + self._block_bytes
        try:
            value = memoryview(cast(bytes, self._client.getrange(key, 0, size)))  # not more, whatever is there
            if not value:
                return MISS
            header = (
                decode_header(value[:PAGE_BYTES], self._fingerprint, self._block_bytes) if len(value) == size else None
            )
            if header is None or header.block_hash != block_hash or not is_intact(header, value[PAGE_BYTES:]):
                self._client.delete(key)  # so that it is written again
                return CORRUPT
        except Exception as error:  # a reply may be anything
            return _failed(error)
        return IOResult(IOOutcome.GOOD, prefix=header.prefix) if job.copy(value[PAGE_BYTES:], target) else LATE

    # ---- the rest ------------------------------------------------------------------------------------------------

    def forget(self, hashes: Iterable[bytes]) -> None:
        """The content of these is in doubt: they are not read until they have been written again."""
        keys = []
        for block_hash in hashes:
            self.known.lost(block_hash)
            self._doubtful[block_hash] = None
            keys.append(self._key(block_hash))
            if len(self._doubtful) > MAX_KNOWN:
                self._doubtful.popitem(last=False)

        def delete(_: memoryview) -> None:
            """Also for the other workers."""
            with suppress(Exception):
                self._client.delete(*keys)

        if keys and not (self._closed or self._writes.stopped or self._writers.is_full):
            self._writers.submit(delete, lambda _: None)

    def _key(self, block_hash: bytes) -> str:
        return f"diptych:{self._fingerprint.hex()}:{block_hash.hex()}"

    async def _wait(self, job: BlockCopy) -> bool:
        try:
            return await job.done
        finally:
            job.finish(False)  # for a caller that was cancelled

    def _probe(self, threads: IOThreads) -> None:
        health = self._reads if threads is self._readers else self._writes

        def ask(_: memoryview) -> str:
            try:
                self._client.set("diptych:probe", b"", px=1000) if health is self._writes else self._client.ping()
            except Exception as error:  # a reply may be anything
                return _failed(error).why
            return ""

        def ended(problem: str) -> None:
            if not self._closed:
                health.failed(problem) if problem else health.succeeded()

        threads.submit(ask, ended)  # at most one at a time

    async def close(self) -> None:
        """End what is in progress without success. What is stored stays on the server."""
        self._closed = True
        for each in (self._reads, self._writes):
            each.close()
        self._copies.finish()
        for threads in (self._readers, self._writers):
            threads.stop()
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        ended = [await asyncio.to_thread(each.join, deadline_s) for each in (self._readers, self._writers)]
        if all(ended):
            self._client.close()
        else:
            logger.error("the remote KV store's server hangs; its connections stay open until the process ends")


class _BoundedBuffer(io.BytesIO):
    """Holds at most `most` bytes of a reply."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def write(self, data: Any, /) -> int:
        if self.tell() + len(data) > self._most:
            raise RedisError(f"the server sent a reply of more than {self._most} bytes")
        return super().write(data)


class _BoundedParser(_RESP2Parser):
    """Fails on a reply that is longer than any of a block. The client would read as much as the server announces."""

    def __init__(self, most: int, socket_read_size: int) -> None:
        super().__init__(socket_read_size)  # type: ignore[no-untyped-call]
        self._most = most

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        assert self._buffer is not None
        self._buffer._buffer = _BoundedBuffer(self._most)


def _failed(error: Exception) -> IOResult:
    """The text of an error of the client, which parses whatever the server sends."""
    return IOResult(IOOutcome.FAILED, str(error) or repr(error))


def open_remote_store(
    url: str, password: str | None, ca_file: str | None, fingerprint: bytes, block_bytes: int
) -> RemoteStore:
    """Connect, and measure reading. A server that does not answer is tried again later. Blocks.

    Raises `KVStoreError` if the URL is wrong.
    """
    tls = {"ssl_ca_certs": ca_file} if ca_file else {}
    try:
        client = Redis.from_url(
            url,
            password=password,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            socket_read_size=READ_BYTES,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            parser_class=partial(_BoundedParser, PAGE_BYTES + block_bytes + 2 * READ_BYTES),
            **tls,
        )
    except ValueError as error:
        raise KVStoreError(f"cache.remote.url {url!r} is no URL of a server: {error}") from None
    read_byte_s, problem = DEFAULT_BYTE_S, ""
    try:
        if _answers_without_tls(url):
            raise RedisError("the server answers without TLS: write redis:// for it")
        read_byte_s = _measure(client, f"diptych:{fingerprint.hex()}:probe", PAGE_BYTES + block_bytes)
    except Exception as error:  # a reply may be anything
        problem = _failed(error).why
    return RemoteStore(client, fingerprint, block_bytes, read_byte_s, problem)


def _answers_without_tls(url: str) -> bool:
    """Whether a `rediss://` URL is that of a server without TLS, which would not answer a handshake at all."""
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return False
    try:
        with socket.create_connection((parts.hostname, parts.port or 6379), CONNECT_TIMEOUT_S) as plain:
            plain.sendall(b"PING\r\n")
            return plain.recv(1) in (b"+", b"-")
    except OSError:
        return False


def _measure(client: Redis, key: str, size: int) -> float:
    """Seconds to read a byte, with as many reads at once as prompts have."""
    client.set(key, bytes(size), px=60_000)
    with ThreadPoolExecutor(READ_THREADS) as threads:

        def read_all(count: int) -> float:
            begun_s = time.perf_counter()
            list(threads.map(client.get, [key] * count))
            return time.perf_counter() - begun_s

        read_all(READ_THREADS)  # connects
        return read_all(PROBE_READS) / (PROBE_READS * size)
