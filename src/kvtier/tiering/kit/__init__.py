"""What authors of secondary tiers build on."""
