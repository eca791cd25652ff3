"""Notebooks as programs: checked parameters, papermill with a report, sweeps."""
