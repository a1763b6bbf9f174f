"""What to buy: the working set of a trace, prices, and mixes of tiers that reach a goal."""
