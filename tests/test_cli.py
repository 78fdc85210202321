"""The command line, as a user and as a script see it."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from compilepass.cli import app

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "int8_llama.py"
SMALL = ("hidden=32", "intermediate=48", "heads=4", "layers=2")

MODEL = """
import torch

def model(width: int = 8, fail: bool = False):
    print("building")
    layer = torch.nn.Linear(width, width)
    return (torch.nn.Dropout(0.5) if fail else layer), (torch.ones(2, width),)

def wrong():
    return 3
"""


def run(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], catch_exceptions=False)


def run_json(*words: str) -> Any:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)  # nothing else is on stdout


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / f"target_{tmp_path.name}.py"
    path.write_text(MODEL)
    return str(path)


@pytest.mark.parametrize("options", [(), ("--dynamic",), ("--dtype", "bf16")], ids=str)
def test_llama_has_four_sites_of_five_norms(options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    found = run_json("run", "hf:llama", "--backend", "fx", "--repeats", "1", *options)
    (one,) = found["runs"]
    assert found["ok"]
    assert one["report"]["matches"]["fuse_add_rms_norm"] == 4
    assert (
        set(one["errors"]) == set(one["seconds"]) == {"eager", "fx without passes", "compilepass"}
    )


def test_policies_are_compared_in_one_table(tmp_path: Path) -> None:
    sets = [word for setting in SMALL for word in ("--set", setting)]
    policies = [w for p in ("none", "none,+rms_norm", "all") for w in ("--custom-ops", p)]
    words = ["run", f"{EXAMPLE}:block", "--tokens", "8", "--backend", "fx", "--repeats", "1"]
    result = run(*words, *sets, *policies, "--dump", str(tmp_path / "dump"))
    assert result.exit_code == 0, result.stderr
    table = result.stdout[result.stdout.index("Matches by policy") :]
    rows = {row.split()[0]: row.split()[1:] for row in table.splitlines() if row.strip()}
    assert rows["fuse_norm_quant"] == ["4", "4", "4"]
    assert rows["fuse_act_quant"] == ["2", "2", "2"]
    for part in ("Ops", "Passes", "Matches", "Errors against float64", "Time:", "int8_llama.py:"):
        assert part in result.stdout
    assert (tmp_path / "dump" / "none_rms_norm" / "index.md").exists()


def test_settings_reach_the_function_and_its_prints_stay_out_of_json(target: str) -> None:
    found = run_json("run", f"{target}:model", "--set", "width=16", "--backend", "fx")
    assert found["runs"][0]["errors"]["eager"][0]["output"] == "output"


def test_the_config_file_is_read_and_options_change_it(target: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('backend = "fx"\ncustom_ops = "all"\nexpect = {fuse_norm_quant = 1}\n')
    result = run("run", f"{target}:model", "-c", str(config))
    assert result.exit_code == 1
    assert "Pass 'fuse_norm_quant' matched 0 times, and expect says 1" in result.stderr
    config.write_text('backend = "fx"\ncustom_ops = "all"\n')
    found = run_json("run", f"{target}:model", "-c", str(config), "--custom-ops", "none")
    assert found["runs"][0]["policy"] == "none"


def test_an_error_out_of_bound_fails(target: str) -> None:
    result = run(
        "run",
        f"{EXAMPLE}:block",
        "--tokens",
        "8",
        *(w for s in SMALL for w in ("--set", s)),
        "--dtype",
        "bf16",
        "--backend",
        "fx",
        "--factor",
        "-1",
    )
    assert result.exit_code == 1
    assert "out of bound" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "nothing"], "Write hf:llama"),
        (["run", "hf:lama"], "Did you mean 'llama'"),
        (["run", "hf:llama", "--set", "hidden=3"], "Did you mean 'hidden_act' or 'hidden_size'?"),
        (["run", "hf:llama", "--set", "hidden"], "'hidden' is not a setting"),
        (["run", "hf:gemma3"], "hf:gemma3_text"),
        (["run", "hf:vitt"], "Did you mean 'vit'"),
        (["run", "no_such_module:f"], "there is no module 'no_such_module'"),
        (["run", "no_such_file.py:f"], "there is no file 'no_such_file.py'"),
        (["run", "TARGET:modl"], "Did you mean 'model'?"),
        (["run", "TARGET:wrong"], "returned int"),
        (["run", "TARGET:model", "--set", "size=1"], "unexpected keyword argument 'size'"),
        (["run", "TARGET:model", "--set", "fail=True", "--backend", "fx"], "Call model.eval()"),
        (["run", "TARGET:model", "--dtype", "fp8"], "none of fp32, bf16, fp16"),
        (["run", "TARGET:model", "--passes", "+nope"], "there is no such pass"),
        (["run", "TARGET:model", "--custom-ops", "none,+rms_nrm"], "Did you mean 'rms_norm'"),
        (["run", "TARGET:model", "--backend", "eager"], "runs no passes"),
        (["plan", "-c", "no_such.toml"], "cannot read the configuration"),
        (["ops", "--custom-ops", "none,all"], "two bases"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_said_without_a_traceback(
    words: list[str], message: str, target: str
) -> None:
    if any("hf:" in w for w in words):
        pytest.importorskip("transformers")
    result = run(*(w.replace("TARGET", target) for w in words))
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout in ("", "building\n")


def test_ops_say_what_runs_and_why() -> None:
    text = run("ops", "--custom-ops", "none,+rms_norm").stdout
    assert "rms_norm: enabled ('+rms_norm' in custom_ops)" in text
    assert "silu_and_mul: disabled (base 'none' in custom_ops)" in text
    assert "forward_xpu: alias of native" in text
    found = run_json("ops", "--custom-ops", "all")
    assert all(op["decision"]["enabled"] for op in found)


def test_plan_is_in_order_with_reasons() -> None:
    text = run("plan", "--passes", "default,-fuse_act_quant").stdout
    assert "'-fuse_act_quant' in passes" in text
    found = {entry["name"]: entry for entry in run_json("plan", "--passes", "none")}
    assert found["fuse_norm_quant"]["state"] == "disabled"
    assert list(found).index("eliminate_noops") < list(found).index("fuse_norm_quant")


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\nfrom compilepass.cli import app\n"
        "try: app(['run', '--help'])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_interrupt_exits_with_130_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import sys, time\ndef model():\n    print('here', flush=True)\n    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "compilepass", "run", "slow.py:model", "--dump", "dump"]
    # what runs in the background of a script ignores interrupts, and so would its children
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=listen,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "dump").exists()


def test_kernels_say_what_runs_and_why() -> None:
    text = run("kernels", "--op", "rms_norm").stdout
    assert "Kernels for cpu" in text
    assert re.search(r"rms_norm +cpp +0 +runs", text)
    found = run_json("kernels", "--op", "rms_norm", "--provider", "triton")
    assert [(row["op"], row["device"]) for row in found] == [("compilepass::rms_norm", "cuda")]


def test_kernels_are_verified_and_a_wrong_one_fails_with_its_first_wrong_call() -> None:
    planted = ("--import", "tests.kernels.planted", "--op", "planted::halved")

    def verify(*words: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own: another test may have planted them under another name."""
        command = [sys.executable, "-m", "compilepass", "kernels", "--verify", *planted, *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = verify("--provider", "narrow")
    assert good.returncode == 0, good.stderr
    assert re.search(r"planted::halved +cpu +narrow +ok +ok +ok +ok", good.stdout)
    bad = verify("--provider", "rounds_half_up")
    assert bad.returncode == 1
    assert "ties: output 0" in bad.stdout
    document = json.loads(verify("--provider", "rounds_half_up", "--json").stdout)
    assert not document["ok"]
    assert {r["check"] for r in document["records"] if not r["ok"]} == {"native"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--op", "rms_nrm"], "Did you mean 'rms_norm'"),
        (["--import", "no_such_module"], "no_such_module, which --import names"),
        (["--verify", "--provider", "cp"], "Did you mean 'cpp'"),
        (["--verify", "--op", "rms_norm", "--provider", "absent"], "No op has a provider 'absent'"),
        (["--verify", "--op", "rms_norm", "--device", "tpu"], "There is no kernel to verify"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_kernels_that_are_not_there_are_said(words: list[str], message: str) -> None:
    result = run("kernels", *words)
    assert result.exit_code == 2
    assert message in result.stderr
