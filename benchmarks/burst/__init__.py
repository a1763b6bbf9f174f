"""Many short requests that arrive in one step."""
