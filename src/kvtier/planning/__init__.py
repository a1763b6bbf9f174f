"""What to buy: the working set of a trace, prices of media, and mixes of tiers that reach a goal."""
