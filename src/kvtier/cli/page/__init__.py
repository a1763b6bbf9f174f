"""The pages of ``--html``: headline numbers, plots and tables in one file that loads nothing else."""
