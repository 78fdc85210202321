"""Custom ops and pluggable layers: written once, with implementations chosen by a policy."""

from .custom_op import CustomOp
from .decision import Decision
from .describe import OpDescription, describe
from .maybe_compile import maybe_compile, maybe_disable_graph_partition
from .overrides import override, unmatched_overrides
from .pluggable import PluggableLayer
from .registry import check_policy_names, load_op_plugins, op_registry, op_registry_oot

__all__ = [
    "CustomOp",
    "Decision",
    "OpDescription",
    "PluggableLayer",
    "check_policy_names",
    "describe",
    "load_op_plugins",
    "maybe_compile",
    "maybe_disable_graph_partition",
    "op_registry",
    "op_registry_oot",
    "override",
    "unmatched_overrides",
]
