"""The report is plain data with views: sums over graphs, text for people, JSON and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compilepass.reporting import (
    GraphRecord,
    MatchRecord,
    NearMiss,
    Note,
    OpRecord,
    PassRecord,
    Report,
    RuleRecord,
    notes,
)
from compilepass.reporting.store import Identity, load_graphs, save_graphs, stored

IDENTITY = Identity({"torch": "2.13.0", "pass mine": "0123456789abcdef"})

NEAR = NearMiss(
    rule="norm (norm.py:7)",
    code="literal",
    message="a number differs from the one in the pattern",
    blocker="add_1 = aten.add.Tensor",
    expected="0.5",
    found="0.25",
    source="model.py:3 in forward: x + 0.25",
    hint="Change it.",
    matched=3,
    wanted=5,
)
SITES = (
    MatchRecord("kernel_1", ("model.py:9 in forward: self.norm(x)",)),
    MatchRecord("kernel_2", ("model.py:9 in forward: self.norm(x)",)),
    MatchRecord("kernel_3", ()),
)


def graph(name: str, *passes: PassRecord, backward: bool = False) -> GraphRecord:
    return GraphRecord(name, not backward, "cpu", 9, 7, passes, backward)


def fused(*sites: MatchRecord, near: NearMiss | None = None, ms: float = 1.5) -> PassRecord:
    rules = (RuleRecord("norm (norm.py:7)", sites, near, refused=1, candidates=4),)
    return PassRecord("fuse_norm", "ran", changes=len(sites), ms=ms, rules=rules)


REPORT = Report(
    graphs=(
        graph(
            "graph 0",
            fused(*SITES, near=NEAR),
            PassRecord("fuse_more", "disabled", "'-fuse_more' in passes"),
            PassRecord("mine", "failed", "ValueError: [no] luck"),
        ),
    ),
    ops=(OpRecord("rms_norm", "disabled", "base 'none' in custom_ops", "forward_native", 3),),
    notes=(Note("kernels.cpu", "no compiler"),),
    config='backend = "fx"\n',
)

TEXT = """\
3 changes in 1 graph
Ops
op        state     count  runs            why
rms_norm  disabled      3  forward_native  base 'none' in custom_ops
Passes
pass       status    changes   ms  reason
fuse_norm  ran             3  1.5
fuse_more  disabled                '-fuse_more' in passes
mine       failed                  ValueError: [no] luck
Matches
pass       rule              count  of  at
fuse_norm  norm (norm.py:7)      3   4  2 × model.py:9 in forward: self.norm(x)
                                        kernel_3
Nearly matched
fuse_norm, norm (norm.py:7): a number differs from the one in the pattern [literal; 3 of 5 matched]
  blocker: add_1 = aten.add.Tensor
  expected: 0.5
  found: 0.25
  source: model.py:3 in forward: x + 0.25
  hint: Change it.
note kernels.cpu: no compiler"""


def test_the_text_for_people() -> None:
    assert "\n".join(line.rstrip() for line in str(REPORT).splitlines()) == TEXT


def test_an_empty_report_says_so() -> None:
    assert str(Report()) == "0 changes in 0 graphs"
    assert str(Report(from_cache=True)).endswith("from the cache")


def test_json_comes_back_equal() -> None:
    again = Report.from_json(REPORT.to_json())
    assert again == REPORT
    assert again.to_json() == REPORT.to_json()
    data = json.loads(REPORT.to_json())
    assert data["matches"] == {"fuse_norm": 3}
    assert data["near_misses"][0]["pass_name"] == "fuse_norm"


def test_graphs_are_summed() -> None:
    report = Report(graphs=(graph("graph 0", fused(SITES[0])), graph("graph 1", fused(*SITES))))
    assert report.matches == {"fuse_norm": 4}
    assert report.rules == {"fuse_norm: norm (norm.py:7)": 4}
    assert (report.passes[0].changes, report.passes[0].ms) == (4, 3.0)
    assert len(report.sites) == 4


def test_the_worst_status_of_a_pass_is_shown_and_its_changes_elsewhere_count() -> None:
    failed = PassRecord("fuse_norm", "failed", "ValueError: no")
    skipped = PassRecord("fuse_norm", "skipped", "the graph has a backward pass")
    for first, second in ((failed, fused(SITES[0])), (fused(SITES[0]), failed)):
        report = Report(graphs=(graph("graph 0", first), graph("graph 1", second)))
        assert (report.passes[0].status, report.passes[0].reason) == ("failed", "ValueError: no")
        assert report.matches == {"fuse_norm": 1}
    assert Report(graphs=(graph("graph 0", skipped),)).matches == {}
    mixed = Report(graphs=(graph("graph 0", skipped), graph("graph 1", fused())))
    assert mixed.matches == {"fuse_norm": 0}


def test_near_misses_are_the_best_of_each_rule_those_that_got_furthest_first() -> None:
    def missed(rule: str, matched: int) -> PassRecord:
        near = dataclasses.replace(NEAR, rule=rule, matched=matched)
        return PassRecord("p", "ran", rules=(RuleRecord(rule, near_miss=near),))

    report = Report(
        graphs=(
            graph("graph 0", missed("a", 2)),
            graph("graph 1", missed("b", 4)),
            graph("graph 2", missed("a", 3)),
            graph("graph 3", missed("a", 1)),
        )
    )
    assert [(n.rule, n.matched) for n in report.near_misses] == [("b", 4), ("a", 3)]


# Stored records


def test_stored_records_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILEPASS_CACHE_DIR", str(tmp_path))
    assert load_graphs(IDENTITY) is None
    save_graphs(IDENTITY, REPORT.graphs)
    assert load_graphs(IDENTITY) == REPORT.graphs
    (entry,) = stored()
    assert (entry.key, entry.identity) == (IDENTITY.key, IDENTITY)
    assert [p.name for p in (tmp_path / "reports").iterdir()] == [f"{IDENTITY.key}.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"x"',
        "7",
        "{}",
        '{"factors": {}, "report": {"graphs": [1]}}',
        '{"report": 7}',
        "\x00",
    ],
)
def test_what_is_stored_may_be_damaged(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPILEPASS_CACHE_DIR", str(tmp_path))
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / f"{IDENTITY.key}.json").write_text(text)
    assert load_graphs(IDENTITY) is None
    assert any("a stored report is unreadable" in n.message for n in notes())
    assert not list(stored())


def test_a_cache_that_cannot_be_written_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("COMPILEPASS_CACHE_DIR", str(tmp_path / "file"))
    save_graphs(IDENTITY, REPORT.graphs)
    assert any("reports cannot be stored" in n.message for n in notes())
