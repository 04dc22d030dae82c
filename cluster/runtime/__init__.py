"""Where workers and services run: in this process, or as Ray actors. Same interface, same behaviour."""
