"""What a worker refuses or reports.

    WorkerError
    ├── InvalidRequest          the request can never work as written (field, what to do)
    ├── PromptTooLong           a text that certainly has more tokens than fit the context
    ├── KVStoreError            the folder of a KV store cannot be used
    ├── ModelError              a model that is missing, truncated, or of an unknown architecture
    ├── Overloaded              no free slot or blocks; try another worker, or later (retry_after_s)
    ├── UnknownSequence         no such sequence here: finished, cancelled, or lost in a restart
    ├── RankLost                a process of a parallel worker died or does not answer: the whole worker is replaced
    └── WorkerClosed            the worker is shutting down

All of them survive pickling: `args` are the constructor's arguments.
"""


class WorkerError(Exception):
    """Base of the errors that a worker raises to its caller."""


class InvalidRequest(WorkerError):
    """Bad input. `field` names what is wrong, the message says what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, message)
        self.field = field
        self.message = message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class PromptTooLong(WorkerError):
    """A text has at least `least_tokens`, more than fit; the exact number is unknown."""

    def __init__(self, least_tokens: int) -> None:
        super().__init__(least_tokens)
        self.least_tokens = least_tokens


class ModelError(WorkerError):
    """The model cannot be loaded; the message says which file and what to do."""


class KVStoreError(WorkerError):
    """A KV store cannot be opened; the message says which folder and what to do."""


class Overloaded(WorkerError):
    """The worker has no free slot or blocks for this now."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class UnknownSequence(WorkerError):
    """The worker does not hold this sequence."""


class RankLost(WorkerError):
    """A rank of a gang died, is cut off, or did not come to a step in time."""


class WorkerClosed(WorkerError):
    """The worker is closing and takes nothing new."""
