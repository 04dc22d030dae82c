"""What a worker would make of a request: when the first token comes, how long the others take, whether there is room.

Knows that prompts are cut to what the promises of decodes leave (`workers.engine.batching`): a worker whose decodes
take most of each step computes prompts slowly, and one whose decodes take all of it should not be given any.
"""

from dataclasses import dataclass

from cluster.policy.book import Book
from cluster.policy.forecast import LEAST_CHUNK, Decodes, Forecast
from cluster.policy.placement import Ask
from cluster.spec import Role
from cluster.view import WorkerView
from kvtransfer.ticket import LinkReport

MOST_FULL = 0.97  # of a pool's tokens promised
NEAR_S = 0.25


@dataclass(frozen=True, slots=True)
class Load:
    """Decodes of a worker at a moment: sequences, the tokens they attend to, and those they will have in the end."""

    batch: int
    context_tokens: int
    promised_tokens: int


@dataclass(frozen=True, slots=True)
class PromptSide:
    """One worker as who computes the prompt, in `steps`; 0: its decodes leave no time for it. Times in seconds.

    `batch`: sequences that decode there or will.
    """

    name: str
    role: Role
    cached_tokens: int
    batch: int
    queue_s: float
    prefill_s: float
    steps: int

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class DecodeSide:
    """One worker as who decodes. `leaves_time`: it could still compute prompts, and keep this request's promise."""

    name: str
    role: Role
    free_tokens: int
    tpot_s: float
    has_room: bool
    leaves_time: bool


class Outlook:
    """Owned by a router."""

    def __init__(self, forecast: Forecast, book: Book) -> None:
        self._forecast = forecast
        self._book = book
        self._links: tuple[LinkReport, ...] = ()
        self._pairs: dict[tuple[str, str], LinkReport] = {}

    def prompt_side(self, ask: Ask, worker: WorkerView, cached_tokens: int, tpot_slo_s: float | None) -> PromptSide:
        """`tpot_slo_s`: what decodes there were promised, as far as that is known."""
        forecast = self._forecast
        load = self._load(ask, worker, ask.now_s)
        new_tokens = max(1, ask.request.num_tokens - cached_tokens)
        decodes = Decodes(load.batch, load.context_tokens, tpot_slo_s)
        prefill_s, steps = forecast.prefill_beside(worker, new_tokens, cached_tokens, decodes)
        queue_s = forecast.queue_seconds(ask, worker)
        return PromptSide(worker.name, worker.role, cached_tokens, load.batch, queue_s, prefill_s, steps)

    def decode_side(
        self, ask: Ask, worker: WorkerView, answer: int, begin_s: float, tpot_slo_s: float | None
    ) -> DecodeSide:
        """`answer`: its tokens, as expected; `begin_s`: when its prompt will be done, on the dispatcher's clock."""
        forecast, num_tokens = self._forecast, ask.request.num_tokens
        load = self._load(ask, worker, begin_s)
        capacity = forecast.kv_tokens(worker)
        free_tokens = capacity - load.promised_tokens
        context = load.context_tokens + num_tokens + answer // 2
        return DecodeSide(
            name=worker.name,
            role=worker.role,
            free_tokens=free_tokens,
            tpot_s=forecast.step_seconds(worker, load.batch + 1, context),
            has_room=num_tokens + answer <= free_tokens - (1 - MOST_FULL) * capacity,
            leaves_time=tpot_slo_s is None
            or forecast.cost(worker).mixed_seconds(((LEAST_CHUNK, 0),), load.batch + 1, context) <= tpot_slo_s,
        )

    def _load(self, ask: Ask, worker: WorkerView, at_s: float) -> Load:
        """Of those that will not have ended by then, whether they have begun or not.

        Ours by the book: a request decodes from its first token, or when that is expected, for as many steps as its
        answer has tokens; a moment that is near is now. Of other gateways, what the worker has beyond them stays.
        """
        batch, prompts, answers = all_ours = self._book.promised(worker.name)
        if at_s - ask.now_s > NEAR_S and batch:
            step_s = self._step_seconds(worker)
            for work in self._book.decoding(worker.name):
                starts_s = work.first_token_s if work.prefilled_s is not None else max(work.first_token_s, ask.now_s)
                if starts_s + work.output_tokens * step_s < at_s:
                    batch, prompts, answers = batch - 1, prompts - work.prompt_tokens, answers - work.output_tokens
        context, promised = prompts + answers // 2, prompts + answers
        stats = worker.stats
        seen = stats.running + stats.reserved + ask.sent_to(worker.name).sequences
        foreign = seen - all_ours.sequences - len(self._book.prefilling(worker.name))
        if foreign > 0:
            used = self._forecast.kv_tokens(worker) - self._forecast.free_tokens(worker)
            theirs = max(0, used - all_ours.prompt_tokens)
            batch, context, promised = batch + foreign, context + theirs, promised + theirs
        return Load(batch, context, promised)

    def _step_seconds(self, worker: WorkerView) -> float:
        """A decode step there, about."""
        batch, prompts, answers = self._book.promised(worker.name)
        return self._forecast.step_seconds(worker, max(1, batch), prompts + answers)

    def transfer_seconds(self, ask: Ask, owner: str, reader: WorkerView, num_tokens: int) -> float:
        """Moving the KV of so many tokens, alone on the wire: as preflight measured the pair, else by the costs."""
        links = ask.view.links
        if links is not self._links:
            self._links, self._pairs = links, {(link.owner, link.reader): link for link in links}
        link = self._pairs.get((owner, reader.name))
        if link is None or not link.bytes_per_s > 0.0 or not reader.kv_token_bytes:
            return self._forecast.transfer_seconds(reader, num_tokens)
        return link.latency_s + num_tokens * reader.kv_token_bytes / link.bytes_per_s
