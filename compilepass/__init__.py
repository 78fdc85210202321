"""Decide once, per operation, native code or a platform kernel, from eager to compiled.

The names are imported, all at once, when the first of them is used: torch takes seconds, and pytest
imports this package at every start to find the plugin.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import testing
    from .compile import Backend, backend, compile, dynamo_backend, explain, plan, report
    from .config import CompilationConfig, CompilationMode, get_config, use_config
    from .errors import CompilePassError, ConfigError, ExpectationError
    from .merge import MergeReport, merge_linears_
    from .ops import CustomOp, PluggableLayer, describe, maybe_compile, override
    from .passmanager import FusionPass, Pass, PassContext, Phase, Plan
    from .platforms import use_platform
    from .quantize import QuantizeReport, quantize_
    from .reporting import Report
    from .rewrite import Input, Match, Reject, Rule

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "CompilationConfig",
    "CompilationMode",
    "CompilePassError",
    "ConfigError",
    "CustomOp",
    "ExpectationError",
    "FusionPass",
    "Input",
    "Match",
    "MergeReport",
    "Pass",
    "PassContext",
    "Phase",
    "Plan",
    "PluggableLayer",
    "QuantizeReport",
    "Reject",
    "Report",
    "Rule",
    "__version__",
    "backend",
    "compile",
    "describe",
    "dynamo_backend",
    "explain",
    "get_config",
    "maybe_compile",
    "merge_linears_",
    "override",
    "plan",
    "quantize_",
    "report",
    "testing",
    "use_config",
    "use_platform",
]

_HOMES = (
    "compile",
    "config",
    "errors",
    "merge",
    "layers",  # a policy may name the ops that ship, whoever uses them
    "ops",
    "passmanager",
    "platforms",
    "quantize",
    "reporting",
    "rewrite",
)

if not TYPE_CHECKING:  # type checkers would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "testing":
            return importlib.import_module(f"{__name__}.testing")
        for home in _HOMES:
            module = importlib.import_module(f"{__name__}.{home}")
            globals().update({n: getattr(module, n) for n in module.__all__ if n in __all__})
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds a submodule here once it is imported; ``compile`` stays the function.
        if name != "compile" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
