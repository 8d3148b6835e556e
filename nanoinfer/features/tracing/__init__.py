"""The events that the engine emits, and the Recorder that keeps them.

The names are imported when they are first used, so a run without a tracer imports neither the events nor their pages. Emitters
therefore write `tracing.TokenAppended(...)`, and quote these names in annotations, which Python would evaluate.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoinfer.features.tracing.events import *  # noqa: F403
    from nanoinfer.features.tracing.recorder import Recorder as Recorder
else:

    def __getattr__(name: str) -> object:
        module = "recorder" if name == "Recorder" else "events"
        return getattr(import_module(f"nanoinfer.features.tracing.{module}"), name)
