"""What every benchmark shares: rounds in turns, medians and their spread, one table, JSON, a picture."""
