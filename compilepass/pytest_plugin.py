"""The pytest plugin: one model under several policies, compared in one test.

    def test_policies(compilepass_policies):
        reports = compilepass_policies(build_model, (x,), same_counts=("fuse_norm_quant",))
        assert reports["all"].matches["fuse_norm_quant"] == 4

pytest loads this module at every start, so it imports nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .comparison import Inputs
    from .reporting import Report

__all__ = ["POLICIES", "assert_policies_agree", "compilepass_policies"]

POLICIES = ("none", "none,+rms_norm", "all")


@pytest.fixture
def compilepass_policies() -> Callable[..., dict[str, Report]]:
    """:func:`assert_policies_agree`, as a fixture."""
    return assert_policies_agree


def assert_policies_agree(
    model_factory: Callable[[], Callable[..., Any]],
    inputs: Inputs,
    policies: Sequence[str] = POLICIES,
    *,
    same_counts: bool | Sequence[str] = False,
    factor: float = 2.0,
    **config: Any,
) -> dict[str, Report]:
    """Build and compile a model under each policy, and check each against float64.

    ``model_factory`` builds the model, always with the same weights. ``policies`` are values of
    ``custom_ops``; ``config`` are other fields to change in the active configuration, whose backend
    is ``"fx"`` here unless they name one. ``same_counts`` asserts that the named passes matched as
    often under every policy; ``True`` means all passes that fuse. Returns the report on each.

    Raises ``AssertionError`` as ``testing.assert_compiled_close`` does, and for unequal counts.
    """
    from .config import get_config, use_config
    from .testing import assert_compiled_close

    reports = {}
    for policy in policies:
        fields = {"backend": "fx", **config, "custom_ops": policy}
        active = get_config().model_copy(update=fields)
        with use_config(active):
            model = model_factory()
        try:
            found = assert_compiled_close(model, inputs, active, factor=factor)
        except AssertionError as error:
            raise AssertionError(f"Under the policy {policy!r}: {error}") from error
        reports[policy] = found.report
    if same_counts:
        _check_counts(reports, same_counts)
    return reports


def _check_counts(reports: dict[str, Report], names: bool | Sequence[str]) -> None:
    if isinstance(names, bool):
        passes = [p for r in reports.values() for g in r.graphs for p in g.passes if p.rules]
        names = sorted({p.name for p in passes})
    for name in names:
        counts = {policy: r.matches.get(name, 0) for policy, r in reports.items()}
        if len(set(counts.values())) > 1:
            near = [n for r in reports.values() for n in r.near_misses if n.pass_name == name]
            why = "\n".join(dict.fromkeys(map(str, near)))
            raise AssertionError(f"{name} matches {counts} sites, by policy\n{why}")
