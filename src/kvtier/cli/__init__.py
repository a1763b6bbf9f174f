"""The ``kvtier`` command: one file per command, each parses, calls and prints."""
