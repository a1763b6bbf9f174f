"""The ``kvtier`` command. Each command is one module or folder: it parses, calls the library and prints."""
