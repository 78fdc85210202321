"""The plugin in a project of its own: what a test of a user sees.

In processes of their own, since pytester forgets what was imported, and torch cannot load twice.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

MODEL = """
import torch
import torch.nn.functional as F
import compilepass as cp
from compilepass.layers import QuantInt8, RMSNorm

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.quant = RMSNorm(32), QuantInt8()

    def forward(self, x):
        total = x + 1
        return self.quant(self.norm(total)), self.norm(x, total)

x = torch.ones(4, 32) + torch.arange(32.0)
"""


def test_policies_are_compared_and_counted(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
def test_policies(compilepass_policies):
    reports = compilepass_policies(Block, (x,), same_counts=["fuse_norm_quant"])
    assert list(reports) == ["none", "none,+rms_norm", "all"]
    assert {r.matches["fuse_norm_quant"] for r in reports.values()} == {1}

def test_unequal_counts(compilepass_policies):
    compilepass_policies(Block, (x,), ["none", "all"], same_counts=True)
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*AssertionError: fuse_add_rms_norm matches {'none': 1, 'all': 0}*"]
    )


def test_a_wrong_pass_fails_with_the_policy_and_the_errors(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        MODEL
        + """
from compilepass.pytest_plugin import assert_policies_agree

class Wrong(cp.Pass):
    name = "wrong"

    def run(self, graph, ctx):
        norms = [n for n in graph.nodes if n.target is torch.ops.compilepass.rms_norm.default]
        for node in norms:
            node.args = (*node.args[:2], 0.5)
        return len(norms)

def test_wrong():
    config = cp.CompilationConfig()
    config.register_pass(Wrong)
    with cp.use_config(config):
        assert_policies_agree(lambda: RMSNorm(32), (x / 9,), ["none", "all"], passes="none,+wrong")
"""
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*Under the policy 'all'*", "*out of bound: output (float32)*"])
