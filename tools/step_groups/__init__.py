"""The groups of measurements of `gpu_step.py`, by name; nothing here imports torch before a group runs."""

from step_groups import check, pieces, versions

GROUPS = {
    name.removeprefix("group_"): function
    for module in (check, versions, pieces)
    for name, function in vars(module).items()
    if name.startswith("group_")
}
