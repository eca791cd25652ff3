"""The frozen model: loading, captured features and their cache, GPUs it is spread over, random weights."""
