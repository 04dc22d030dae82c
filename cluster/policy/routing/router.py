"""The router port: what a router gets and returns. Pure: time, randomness and costs are arguments.

A router belongs to one dispatcher. It sees the view (workers' statistics), what this gateway has sent since, and its
own earlier choices; it knows other gateways only through the view.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import Struct, structs

from diptych.view import ClusterView
from workers.request import Request


class SentWork(Struct, frozen=True, gc=False):
    """What this gateway has sent to a worker since the statistics in the view were taken."""

    prompt_tokens: int = 0
    sequences: int = 0


NOTHING_SENT = SentWork()


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """A request to place, at `now_s` of the dispatcher's clock.

    Workers in `avoid` failed or refused this request before. `may_colocate`: where no pair is ready, a prefill or
    decode worker may do both phases. `sibling_worker` computes the same prompt for another parallel sample; it is
    preferred, because the prompt is then computed once. The request arrived `waited_s` ago; `is_queued`: it is in the
    admission queue.
    """

    view: ClusterView
    request: Request
    sent: Mapping[str, SentWork] = field(default_factory=dict)
    avoid: Collection[str] = ()
    may_colocate: bool = True
    sibling_worker: str = ""
    now_s: float = 0.0
    waited_s: float = 0.0
    is_queued: bool = False

    def sent_to(self, worker: str) -> SentWork:
        return self.sent.get(worker, NOTHING_SENT)

    @property
    def tokens_left(self) -> int | None:
        """Output tokens that are still allowed; None: no limit."""
        most = self.request.sampling.max_tokens
        return None if most is None else most - len(self.request.generated)

    def needed_tokens(self, longest: int) -> int:
        """Tokens of the request with the longest answer it may get, at most `longest`."""
        left = self.tokens_left
        return longest if left is None else min(longest, self.request.num_tokens + left)


class Placement(Struct, frozen=True, gc=False):
    """The chosen workers. The same name twice: one worker does both phases and no KV moves.

    The prefill worker has the prompt's first `cached_tokens` as far as known, or fetches them from the `prefix_owner`.
    With `cut_tokens` it computes only that many tokens of the prompt and the decode worker the rest (0: no cut).
    Predictions are None where there is no opinion.
    """

    prefill: str
    decode: str
    reason: str
    cached_tokens: int = 0
    prefix_owner: str = ""
    cut_tokens: int = 0
    predicted_ttft_s: float | None = None
    predicted_tpot_s: float | None = None
    prefill_s: float | None = None  # computing the prompt, once it is its turn; None: as predicted
    lenders: tuple[str, ...] = ()  # they hold a part of the KV of a request that is longer than any worker's pool

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode

    def after(self, waited_s: float) -> "Placement":
        """With the TTFT counted from the request's arrival, `waited_s` ago."""
        if self.predicted_ttft_s is None:
            return self
        return structs.replace(self, predicted_ttft_s=waited_s + self.predicted_ttft_s)

    def cut(self, request: Request) -> int:
        """How many tokens of this request's prompt the prefill worker computes; 0: no cut.

        Parallel samples share their prompt's work on one worker; prompt log probabilities and embeddings come from one.
        """
        whole = self.colocated or request.group or request.sampling.needs_whole_prompt
        return 0 if whole or not 0 < self.cut_tokens < request.num_tokens else self.cut_tokens


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is refused: its SLO could not be met."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Queue the request: it is predicted to start in `start_s`, with its first token `need_s` later.

    Queued requests ahead of it are not counted; one of them starts every `apart_s` for each decode worker, and not
    faster than prompts are computed.
    """

    reason: str
    start_s: float
    need_s: float
    apart_s: float = 0.0


class Router(ABC):
    """Chooses workers. `links_all`: it may pair any two workers, whatever their roles, so all pairs need links.

    `uses_prefix_index`: it reads the prefix index, so the dispatcher must poll workers for cache events.
    """

    links_all: ClassVar[bool] = False
    uses_prefix_index: ClassVar[bool] = False

    @abstractmethod
    def choose(self, query: PlacementQuery) -> Placement | None:
        """A placement for the request; None when no worker is ready for it. Changes nothing."""

    def began(self, query: PlacementQuery, placement: Placement) -> None:  # noqa: B027  (most routers are stateless)
        """The request was sent there; a stateful router records it."""
