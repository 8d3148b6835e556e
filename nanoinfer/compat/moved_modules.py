"""The old paths of modules that have moved. One version passes them on, with a DeprecationWarning that says the new path.

MovedModules is the last entry of sys.meta_path, so Python asks it for modules that it finds nowhere else.
"""

import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# Old path -> new path. A package brings its modules with it, unless the table has them as well.
MOVED = {
    "nanoinfer.lab": "nanoinfer_lab",
    "nanoinfer.lab.bench.environment": "nanoinfer.system.environment",
    "nanoinfer.lab.learn": "nanoinfer_course.learn",
    "nanoinfer.tracing": "nanoinfer.features.tracing",
    "nanoinfer.async_llm": "nanoinfer.server.async_llm",
    "nanoinfer.chat": "nanoinfer.features.chat",
    "nanoinfer.embedding": "nanoinfer.features.embedding",
    "nanoinfer.training": "nanoinfer.features.training",
    "nanoinfer.training.functions": "nanoinfer.features.policy.functions",
    "nanoinfer.training.policy": "nanoinfer.features.policy.policy",
    "nanoinfer.engine.beam_search": "nanoinfer.features.beam_search.search",
    "nanoinfer.engine.metrics": "nanoinfer.features.metrics.engine_metrics",
    "nanoinfer.engine.speculative": "nanoinfer.features.drafts",
    "nanoinfer.engine.speculative.drafter": "nanoinfer.features.drafts.draft_model",
    "nanoinfer.engine.speculative.quantized": "nanoinfer.features.drafts.draft_model",
    "nanoinfer.models.gated_delta": "nanoinfer.features.hybrid.gated_delta",
    "nanoinfer.models.qwen_next": "nanoinfer.features.hybrid.qwen_next",
    "nanoinfer.sampling.grammar": "nanoinfer.features.structured.grammar",
    "nanoinfer.sampling.logits_processors": "nanoinfer.features.own_code.logits_processors",
}


class _OldModule(ModuleType):
    """A module at its old path, with the names of the module at its new path. `import *` finds none."""

    def __init__(self, name: str, new: str):
        super().__init__(name)
        self._new = new

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        warnings.warn(f"{self.__name__} has moved to {self._new}", DeprecationWarning, stacklevel=2)
        self.__dict__[name] = value = getattr(import_module(self._new), name)  # `from old import name` asks for it twice
        return value


class MovedModules:
    """A finder and loader of old paths, whose modules are imported when a name of theirs is used."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        new = new_path(name)
        if not new or find_spec(new) is None:
            return None
        return ModuleSpec(name, cls, is_package=True)  # type: ignore[arg-type]  # has a loader's methods

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name, new_path(spec.name))

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Nothing has to run."""


def new_path(old: str) -> str:
    """Return the new path of a module, or "" if it has not moved."""
    known = max((each for each in MOVED if f"{old}.".startswith(f"{each}.")), key=len, default=None)
    return "" if known is None else MOVED[known] + old.removeprefix(known)
