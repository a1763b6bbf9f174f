"""``kvtier demo``: a real model whose prefixes outlive its device memory, measured against the same without kvtier."""
