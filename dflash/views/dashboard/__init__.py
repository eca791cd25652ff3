"""Live plots of a run, and the static form of the same plots.

    with LiveDashboard(run.path, live="auto"):
        train(...)

`series` folds metrics.jsonl into bounded series, `panels` says what each plot shows, `plotly_form` and
`image_form` draw it, `bundle` is the form that a saved notebook keeps, `live` follows a run, `widgets` is
the interactive view.
"""

from dflash.views.dashboard.live import LIVE, LiveDashboard, show_run
from dflash.views.dashboard.panels import PANELS, build_panels
from dflash.views.dashboard.series import RunSeries

__all__ = ["LIVE", "PANELS", "LiveDashboard", "RunSeries", "build_panels", "show_run"]
