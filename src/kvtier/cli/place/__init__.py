"""The commands about a tier's place that need no engine: ``kvtier inspect``, ``verify`` and ``purge``."""
