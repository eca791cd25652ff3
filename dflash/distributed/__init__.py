"""Engines that spread a step over devices: threads in one process, ranks under torchrun, shards.

Both give the losses and weights of `engine.SerialEngine` for the same config, up to the order of float additions.
"""
