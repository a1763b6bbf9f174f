"""llama.cpp: a front before llama-server that keeps the KV of its conversations in kvtier's tiers."""
