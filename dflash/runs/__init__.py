"""The record of a run: metrics, device samples, lock, buttons, worker logs, tables."""
