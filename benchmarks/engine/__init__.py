"""The embedded engine: time to first token, what kvtier costs when it never helps, and a step's scheduler side."""
