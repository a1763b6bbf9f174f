"""``kvtier plan``: what a trace needs, and the cheapest tiers that provide it."""
