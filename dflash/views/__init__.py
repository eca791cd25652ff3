"""Pictures and pages of runs: live dashboard, terminal progress, report, comparison."""
