"""For authors of tiers, policies and managers: contract suites to inherit, fault-injecting wrappers, a manual clock."""
