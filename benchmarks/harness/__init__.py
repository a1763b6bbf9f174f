"""Shared by all benchmarks: alternating rounds, medians and their spread, one table, JSON, a picture."""
