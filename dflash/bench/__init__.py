"""Measurements that print a table and write JSON: kernels, a step, the target, the pipeline."""
