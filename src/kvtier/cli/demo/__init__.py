"""``kvtier demo``: serve a real model with a device pool that is too small, with kvtier and without it."""
