"""What engines in Python share: the device's block pool, and the values of a step that the connector reads."""
