"""The page of ``kvtier simulate --html``: tables, plots and text in one file that loads nothing else."""
