"""The old paths of modules that have moved. One version passes them on, with a DeprecationWarning that says the new path.

moved/ has a file for each of them. It is a folder of nanoinfer.__path__, so moved/tracing.py is found as nanoinfer.tracing.
"""

import sys
import warnings
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType

# Old path -> new path. A package brings its modules with it, unless the table has them as well.
MOVED = {
    "nanoinfer.lab": "nanoinfer_lab",
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
    "nanoinfer.models.gated_delta": "nanoinfer.features.hybrid.gated_delta",
    "nanoinfer.models.qwen_next": "nanoinfer.features.hybrid.qwen_next",
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
        return getattr(import_module(self._new), name)


def pass_on(old: str) -> None:
    """Pass on a module at its old path. Its submodules are imported when a name of theirs is used."""
    paths = {old: MOVED[old]}
    for each, new in [(each, new) for each, new in MOVED.items() if f"{each}.".startswith(f"{old}.")]:
        found = walk_packages(getattr(import_module(new), "__path__", ()), f"{new}.")
        paths |= {each: new} | {each + one.name.removeprefix(new): one.name for one in found}
    for each, new in paths.items():
        sys.modules[each] = module = _OldModule(each, new)
        if each != old:
            parent, _, name = each.rpartition(".")
            setattr(sys.modules[parent], name, module)
