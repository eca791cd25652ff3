"""One training run: settings, recipes, devices, memory, plan, steps, checkpoints, resume, replay."""
