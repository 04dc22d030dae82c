"""Errors of a runtime. Importing them does not import the engine."""


class WorkerGone(Exception):
    """The worker's process died, is restarting, or does not answer."""


class NoAnswer(WorkerGone):
    """No answer within the timeout; the process may be alive."""


class RuntimeUnavailable(Exception):
    """The runtime cannot be reached or cannot place a worker; the message says what to do."""
