"""The CUDA part: streams and events, pinned memory, and ways to copy between device memory and pinned rows."""
