"""Planning on recorded or made-up traffic, in simulated time; it moves no byte and serves no engine."""
