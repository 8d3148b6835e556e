"""The events of an engine, the observer that makes them, and the Recorder that keeps them."""

from nanoinfer.features.tracing.events import *  # noqa: F403
from nanoinfer.features.tracing.observer import TracingObserver as TracingObserver
from nanoinfer.features.tracing.recorder import Recorder as Recorder
