"""Trackers beside those of Lightning: each a class for `logger.trackers`.

For: logger=trackio. Shown: a run's rows are in it once. Leaves: when Lightning has a logger for it.
"""

from argparse import Namespace
from typing import Any

from lightning.fabric.loggers import Logger


class Trackio(Logger):
    """Trackio (https://github.com/gradio-app/trackio): runs in a local database, or in a space of the hub.

    The run there begins anew when a run is resumed, since all rows are shown again.
    """

    name = version = None

    def __init__(self, *, project: str, name: str, space_id: str | None = None) -> None:
        self.place = {"project": project, "name": name, "space_id": space_id}

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        import trackio

        self.run: Any = trackio.init(**self.place, config=params, embed=False)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.run.log(dict(metrics), step=step)

    def finalize(self, status: str) -> None:
        self.run.finish()
