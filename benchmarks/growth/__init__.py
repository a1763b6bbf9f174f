"""How costs grow with blocks, tiers and requests; per block or request they should stay constant."""
