"""How many connections a port takes, in all and from one client address. Knows no port."""

import resource

MAX_CONNECTIONS = 4096  # or a share of the process's limit of open files, if that is less
MAX_CONNECTIONS_PER_ADDRESS = 1024  # and at most a quarter of all; a proxy is one address


def connection_limits(parts: int) -> tuple[int, int]:
    """Connections in all, at most one part in `parts` of the process's open files, and connections per address."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS if open_files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, open_files // parts)
    return most, min(MAX_CONNECTIONS_PER_ADDRESS, max(1, most // 4))
