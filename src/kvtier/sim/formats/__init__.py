"""Formats of request traces, one per file, found by name through ``registry``."""
