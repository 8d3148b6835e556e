"""The events of an engine, the observer that makes them, and the Recorder that keeps them.

The names are imported when they are first used, so a module that imports this one imports neither the events nor their pages.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.features.tracing.events import *  # noqa: F403
    from nanoinfer.features.tracing.observer import TracingObserver as TracingObserver
    from nanoinfer.features.tracing.recorder import Recorder as Recorder
else:

    def __getattr__(name: str) -> object:
        module = {"Recorder": "recorder", "TracingObserver": "observer"}.get(name, "events")
        return getattr(import_module(f"nanoinfer.features.tracing.{module}"), name)
