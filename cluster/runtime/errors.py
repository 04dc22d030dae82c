"""What a runtime raises. Apart from the port, so that commands without the engine can catch it."""


class WorkerGone(Exception):
    """The worker's process died, is restarting, or does not answer."""


class NoAnswer(WorkerGone):
    """No answer came in time; the process may live."""


class RuntimeUnavailable(Exception):
    """The runtime cannot be reached or cannot place what is asked; the message says what to do."""
