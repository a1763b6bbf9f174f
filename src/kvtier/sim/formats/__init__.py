"""Formats of request traces, one a file, found by name through ``registry``."""
