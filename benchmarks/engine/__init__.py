"""The embedded engine: time to first token, the cost of kvtier without hits, and a step's scheduler side."""
