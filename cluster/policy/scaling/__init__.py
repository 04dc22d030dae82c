"""When workers change roles and pools change size; which requests move."""
