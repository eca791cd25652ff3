"""Starting a run: in this process, under torchrun, as one rank; signals."""
