"""Engines that drive kvtier, a folder each; nothing in kvtier imports one on its own account."""
