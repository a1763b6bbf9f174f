"""Secondary tiers behind the primary one, and the manager that moves blocks between them."""
