"""``kvtier record``: a trace of what a live engine is asked, under salted ids."""
