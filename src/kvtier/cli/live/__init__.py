"""Commands that talk to a living engine through its control socket."""
