"""Commands that talk to a running engine through its control socket."""
