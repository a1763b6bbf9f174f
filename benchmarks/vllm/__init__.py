"""Benchmarks of kvtier under real vLLM engines on the CPU: ``python -m benchmarks.vllm --help``."""
