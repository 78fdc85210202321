"""Decide once, per operation, native code or a platform kernel, from eager to compiled."""

from .compile import Backend, backend, compile, dynamo_backend, plan, report
from .config import CompilationConfig, CompilationMode, get_config, use_config
from .errors import CompilePassError, ConfigError, ExpectationError
from .ops import CustomOp, PluggableLayer, describe, maybe_compile, override
from .passmanager import FusionPass, Pass, PassContext, Phase, Plan
from .platforms import use_platform
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
    "Pass",
    "PassContext",
    "Phase",
    "Plan",
    "PluggableLayer",
    "Reject",
    "Report",
    "Rule",
    "__version__",
    "backend",
    "compile",
    "describe",
    "dynamo_backend",
    "get_config",
    "maybe_compile",
    "override",
    "plan",
    "report",
    "use_config",
    "use_platform",
]
