"""Traces of live traffic: salted block ids, lengths and times, no text."""
