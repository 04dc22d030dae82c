"""Our router: both phases where both SLOs hold."""
