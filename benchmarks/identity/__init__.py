"""Which changes of an engine separate its blocks from those of another one."""
