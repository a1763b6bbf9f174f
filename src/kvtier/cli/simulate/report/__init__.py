"""The page of ``kvtier simulate --html``: tables, plots and words in one file that loads nothing."""
