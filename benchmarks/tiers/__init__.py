"""Tiers with a server: one module each, whose measurements share the columns of one table."""
