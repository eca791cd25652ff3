"""DFlash workbook: train a block-diffusion drafter for a frozen target model, and find out why a run fails."""

__version__ = "0.1.0"
