"""Benchmarks of kvtier under real vLLM engines on the CPU."""
