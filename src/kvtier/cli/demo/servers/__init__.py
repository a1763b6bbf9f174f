"""Servers that the demo starts: one program each. A program ends when its standard input is closed."""
