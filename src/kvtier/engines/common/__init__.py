"""What Python engines share: the pool of device blocks, and the values of a step that the connector reads."""
