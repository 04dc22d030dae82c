"""The transports. Each is one file; `kvtransfer.open` is the only place that chooses among them."""
