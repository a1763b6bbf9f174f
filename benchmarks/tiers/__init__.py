"""Tiers behind a server of their own: one module each, whose measurements share the columns of one table."""
