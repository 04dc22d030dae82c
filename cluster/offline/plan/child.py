"""The process of one question to the planner: reads it from stdin, writes the answer to stdout as one line.

Gives way to whoever serves, and ends by itself at its limits, also when nobody is left who waits for it.
"""

import logging
import math
import os
import resource
import signal
import sys
import time

from cluster.control.planner_process import Answer, Order, encoded, order_from
from cluster.control.replanning import PlanFailed

IN_TIME = 0.5  # of the limit: from then on nothing further is tried
MOST_CHARACTERS = 300  # of an error
GRACE_S = 5.0  # in which whoever asked ends it, if there is anybody left


def main() -> None:
    logging.disable(logging.ERROR)  # requests that fail in an overload are what is looked for
    order = order_from(sys.stdin.buffer.read())
    os.nice(order.niceness)
    resource.setrlimit(resource.RLIMIT_AS, (order.memory_bytes, order.memory_bytes))
    signal.alarm(math.ceil(order.limit_s + GRACE_S))
    try:
        answer = answered(order)
    except PlanFailed as error:
        answer = Answer(failed=str(error))
    except MemoryError:
        answer = Answer(failed=f"the planner needs more than {order.memory_bytes / 2**30:.1f} GiB of memory")
    except Exception as error:
        answer = Answer(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_CHARACTERS]}")
    sys.stdout.buffer.write(encoded(answer))


def answered(order: Order) -> Answer:
    """Raises what the search raises."""
    from cluster.offline.plan.refit import refitted
    from cluster.offline.plan.roles import planned

    if order.what == "fleet":
        return Answer(words=refitted(order.question))
    late_s = time.monotonic() + IN_TIME * order.limit_s
    return Answer.of(planned(order.question, lambda: time.monotonic() > late_s))


if __name__ == "__main__":
    main()
