"""Passes that the user had installed in Inductor keep running, before ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

import compilepass as cp
from compilepass import inductor

from .models import AddNorm, built, fx_config, inputs

FUSED = torch.ops.compilepass.fused_add_rms_norm.default


class Seen:
    """A custom pass that notes whether it saw the fused kernel."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def __call__(self, graph: Graph) -> None:
        self.log.append((self.name, bool(graph.find_nodes(op="call_function", target=FUSED))))


def aware(log: list[Any]) -> Any:
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    class Aware(CustomInferenceAwareGraphPass):
        def __call__(self, graph: Graph, is_inference: bool) -> None:
            log.append(("aware", is_inference))

        def uuid(self) -> str:
            return "aware"

    return Aware()


def run(**fields: Any) -> None:
    model, args = built(AddNorm), inputs()
    fast = cp.compile(model, fx_config(expect={"fuse_add_rms_norm": 1}, **fields))
    torch.testing.assert_close(fast(*args), model(*args))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_pass_in_the_options_runs_first(as_list: bool) -> None:
    log: list[Any] = []
    one, two = Seen("one", log), Seen("two", log)
    run(inductor_options={"post_grad_custom_pre_pass": [one, two] if as_list else one})
    assert log == [("one", False), ("two", False)][: 1 + as_list]


def test_a_pass_in_inductors_config_runs_first() -> None:
    from torch._inductor import config

    log: list[Any] = []
    passes = [Seen("one", log), aware(log)]
    with config.patch(post_grad_custom_pre_pass=passes):
        run()
        assert config.post_grad_custom_pre_pass == passes
    assert log == [("one", False), ("aware", True)]


@pytest.mark.slow
def test_inductor_runs_the_post_pass_after_ours() -> None:
    from torch._inductor import config

    log: list[Any] = []
    pre, post = Seen("pre", log), Seen("post", log)
    model, args = built(AddNorm), inputs()
    with config.patch(post_grad_custom_pre_pass=pre, post_grad_custom_post_pass=post):
        fast = cp.compile(model, cp.CompilationConfig(expect={"fuse_add_rms_norm": 1}))
        torch.testing.assert_close(fast(*args), model(*args))
    assert log == [("pre", False), ("post", True)]


def test_the_hook_has_an_identity_if_all_passes_have_one() -> None:
    def uuid(own: str | None, *users: Any) -> Any:
        return inductor._hook(lambda graph, kind: None, own, users).uuid()  # type: ignore[attr-defined]

    assert uuid("ours") == ("ours",)
    assert uuid("ours", aware([])) == ("ours", "aware")
    assert uuid("ours", Seen("plain", [])) is None
    assert uuid(None) is None
