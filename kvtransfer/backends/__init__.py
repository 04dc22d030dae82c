"""The ways bytes can move, one file each. Nobody but `kvtransfer.open` chooses among them."""
