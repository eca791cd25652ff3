"""What a server loads of us: this folder goes on its PYTHONPATH. Nothing here is imported by the package."""
