"""Which workers a request gets: the port, our SLO router, and the routers of the literature."""
