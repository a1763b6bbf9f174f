"""Shipped for implementers: contract suites to inherit, fault-injecting wrappers, a manual clock."""
