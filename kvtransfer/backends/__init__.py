"""The transport backends, one file each. Only `kvtransfer.open` chooses among them."""
