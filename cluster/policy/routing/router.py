"""What a router is asked and what it answers, and the port itself. Pure: time, randomness and costs are handed in.

A router belongs to one dispatcher. It sees the view (what workers said of themselves), what this gateway has sent
since, and whatever it kept of its own choices; of other gateways it knows what the view shows.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import Struct, structs

from diptych.view import ClusterView
from workers.request import Request


class Sent(Struct, frozen=True, gc=False):
    """What this gateway has sent to a worker since the statistics in the view were taken."""

    prompt_tokens: int = 0
    sequences: int = 0


NOTHING_SENT = Sent()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to place, at `now_s` of the dispatcher's clock.

    Workers in `avoid` failed or refused this request before; they are left out. `alone`: where no pair is ready, a
    prefill or decode worker may do both phases. `beside` names the worker that computes the same prompt for a sibling:
    it comes first, since there the prompt is computed once. It came `waited_s` ago, and
    may have waited for its turn since (`is_queued`).
    """

    view: ClusterView
    request: Request
    sent: Mapping[str, Sent] = field(default_factory=dict)
    avoid: Collection[str] = ()
    alone: bool = True
    beside: str = ""
    now_s: float = 0.0
    waited_s: float = 0.0
    is_queued: bool = False

    def sent_to(self, worker: str) -> Sent:
        return self.sent.get(worker, NOTHING_SENT)

    @property
    def tokens_left(self) -> int | None:
        """How long the answer may still get; None: as long as there is room."""
        most = self.request.sampling.max_tokens
        return None if most is None else most - len(self.request.generated)

    def needed_tokens(self, longest: int) -> int:
        """Tokens of the request with the longest answer it may get, at most `longest`."""
        left = self.tokens_left
        return longest if left is None else min(longest, self.request.num_tokens + left)


class Placement(Struct, frozen=True, gc=False):
    """`prefill` and `decode` name workers; the same name twice: one worker does both, and nothing moves.

    The prefill worker is believed to have the prompt's first `cached_tokens`, or will once it has fetched them from the
    `prefix_owner`. With `cut_tokens` it computes only that many tokens of the prompt, the decode worker the rest (0:
    nothing is cut). Predictions: None is no opinion.
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
    reserve_s: float = 0.0  # until the decode worker has reserved blocks and a slot; only then is the prompt sent

    @property
    def colocated(self) -> bool:
        return self.prefill == self.decode

    def after(self, waited_s: float) -> "Placement":
        """With the first token counted from the request's arrival, so long ago, as clients see it."""
        if self.predicted_ttft_s is None:
            return self
        return structs.replace(self, predicted_ttft_s=waited_s + self.predicted_ttft_s)

    def cut(self, request: Request) -> int:
        """Behind which token this request's prompt is cut; 0 where it is not.

        Siblings share their prompt's work on one worker, and a prompt's own log probabilities come from one.
        """
        whole = self.colocated or request.group or (request.sampling.prompt_logprobs is not None)
        return 0 if whole or not 0 < self.cut_tokens < request.num_tokens else self.cut_tokens


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request is refused: its SLO could not be met."""

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Later:
    """The request is better placed later: in `start_s`, as is expected, and `need_s` after that it has its first token.

    Other requests that wait are not counted: of these, one gets in every `apart_s` for each worker that decodes, and no
    sooner than prompts are computed.
    """

    reason: str
    start_s: float
    need_s: float
    apart_s: float = 0.0


class Router(ABC):
    """Chooses workers. `links_all`: it may pair any two workers, so that all must be linked, whatever their roles.

    `wants_caches`: it looks into the index of prefixes, which workers must then be asked for.
    """

    links_all: ClassVar[bool] = False
    wants_caches: ClassVar[bool] = False

    @abstractmethod
    def choose(self, ask: Ask) -> Placement | None:
        """A placement that fits the request; None when no worker is ready for it. Asking commits to nothing."""

    def began(self, ask: Ask, placement: Placement) -> None:  # noqa: B027  (most routers have nothing to keep)
        """The request goes there: a router that learns from its own choices notes it."""
