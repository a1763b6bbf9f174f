"""Servers that the demo starts for itself: one program each, which ends when its standard input does."""
