"""The control plane: keeps workers, membership, roles, pool sizes and gateways as the cluster file describes them."""
