"""What an operator sees of an engine, and can do to it while it runs."""
