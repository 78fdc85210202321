"""What a report says about a model that nearly has the form of a rule, word for word.

The texts are in ``golden/``; :mod:`.golden` writes them again after a change that is meant.
"""

from __future__ import annotations

import re

import pytest
import torch

import compilepass as cp

from .golden import golden, text_of
from .near_misses import CASES, RMS_NORM, NearMissCase, W, X, no_eps, rms_norm
from .one_rule import Rules, apply, compile_with_rules


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_near_miss_is_told_as_written_down(case: NearMissCase) -> None:
    applied = apply(case.model, case.args, case.rule)
    assert applied.unchanged, "the model has the rule's form"
    assert applied.near is not None, "nothing is said"
    text = text_of(applied.near)
    assert "near_misses.py" in text  # the rule's file
    assert f"in {case.name}:" in text  # the model's line
    for part in ("blocker:", "expected:", "found:", "hint:"):
        assert part in text
    assert text == golden("near_misses", case.name)


def test_nothing_is_said_where_every_candidate_was_matched() -> None:
    applied = apply(lambda x, w: rms_norm(x, w, 1e-6), (X, W), RMS_NORM)
    assert (applied.result.count, applied.result.candidates) == (1, 1)
    assert applied.near is None


def test_one_of_two_candidates_is_told() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return no_eps(rms_norm(x, w, 1e-6), w)

    applied = apply(model, (X, W), RMS_NORM)
    assert (applied.result.count, applied.result.candidates) == (1, 2)
    assert applied.near is not None and applied.near.code == "op"


def test_explain_says_it_for_a_model_and_a_pass_policy() -> None:
    config = cp.CompilationConfig(custom_ops=["none"])
    config.register_pass(Rules((RMS_NORM,)))
    with torch.no_grad():
        found = cp.explain(no_eps, (X, W), config, passes=["none", "+rules_of_test"])
    assert found.matches == {"rules_of_test": 0}
    (near,) = found.near_misses
    assert near.pass_name == "rules_of_test"
    assert "in no_eps: variance = x.pow(2).mean(-1, keepdim=True)" in near.source


def test_the_report_shows_matches_of_candidates() -> None:
    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return no_eps(rms_norm(x, w, 1e-6), w)

    with torch.no_grad():
        fast = compile_with_rules(model, RMS_NORM)
        fast(X, W)
    found = cp.report(fast)
    (rule,) = next(p for p in found.graphs[0].passes if p.name == "rules_of_test").rules
    assert (len(rule.sites), rule.candidates) == (1, 2)
    assert re.search(r"rms_norm \(near_misses.py:\d+\) +1 +2 ", str(found))
    assert type(found).from_json(found.to_json()) == found


def test_messages_are_made_for_the_best_candidate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from compilepass.rewrite import engine

    made = []
    whole = engine.describe_failure

    def counted(*args: object) -> object:
        made.append(args)
        return whole(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "describe_failure", counted)

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = no_eps(x, w)
        return x

    assert apply(model, (X, W), RMS_NORM).near is not None
    assert len(made) == 1
