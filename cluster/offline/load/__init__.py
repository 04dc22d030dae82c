"""Load on a running endpoint: what is sent, how it is counted, searches and sweeps over it. Knows no command line."""
