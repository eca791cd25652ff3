"""The drafter: shape, visibility rule, layers, attention, losses, Triton kernels, formats of other projects."""
