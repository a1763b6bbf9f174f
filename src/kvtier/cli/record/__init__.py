"""``kvtier record``: a trace of the requests of a running engine, with salted ids."""
