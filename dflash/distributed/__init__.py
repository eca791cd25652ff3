"""Engines that spread a step over devices: `ThreadsEngine` in one process, `ProcessEngine` under torchrun.

Both give the losses and weights of `engine.SerialEngine` for the same config, up to the order of float additions.
"""
