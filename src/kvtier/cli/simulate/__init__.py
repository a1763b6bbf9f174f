"""``kvtier simulate``: replay a request trace on simulated time."""
