"""Verification finds each kernel that is wrong, and says of the sound ones that they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from compilepass import kernels
from compilepass.errors import KernelError, RegistrationError
from compilepass.kernels.examples import examples_of
from compilepass.kernels.verify import Record, verifiable, verify, verify_all

from . import planted

#: Which checks find it, and what the first of them says.
WRONG = {
    "is_off_by_a_little": (["float64", "native"], "where float64 has"),
    "skips_the_tail": (
        ["float64", "native"],
        "1 row of 33, float32, contiguous: output 0: 127 at [0, 32]",
    ),
    "ignores_strides": (["float64"], "every second element"),
    "ignores_nan": (["native"], "NaN: output 1: 0 at [1, 0], where native has nan"),
    "rounds_half_up": (["native"], "ties: output 0"),
    "returns_its_argument": (["fake", "opcheck"], "output 1 shares the memory of an argument"),
    "writes_to_its_argument": (["fake", "opcheck"], "writes to x, which the schema does not say"),
    "returns_strides": (["fake", "opcheck"], "output 1 has the stride"),
    "dies": (["fake", "float64"], "7 rows of 33, float32, contiguous: the process died of SIGSEGV"),
    "raises": (["fake", "opcheck", "float64", "native"], "raises ValueError: no such GPU"),
}


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], list[Record]]:
    wanted = [
        provider
        for op in (planted.SOUND, planted.LYING, planted.WRITING)
        for provider in verifiable(known(op))
        if provider.name != "hangs"
    ]
    records: dict[tuple[str, str], list[Record]] = {}
    for record in verify_all(wanted):
        records.setdefault((record.op, record.provider), []).append(record)
    return records


def known(op: str) -> kernels.KernelOp:
    found = kernels.find(op)
    assert found is not None
    return found


def failed(records: list[Record]) -> list[str]:
    return list(dict.fromkeys(r.outcome.check for r in records if not r.ok))


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_wrong_kernel_is_found(name: str, found: Any) -> None:
    records = found[planted.SOUND, name]
    checks, message = WRONG[name]
    assert failed(records) == checks
    first = next(r for r in records if not r.ok)
    assert message in first.outcome.problem


def test_a_lying_fake_is_found(found: Any) -> None:
    records = found[planted.LYING, "honest"]
    assert failed(records) == ["fake", "opcheck"]
    problem = next(r for r in records if not r.ok).outcome.problem
    assert "output 1 has the dtype torch.float32, and the fake says torch.float64" in problem


def test_a_sound_kernel_passes_every_check_in_every_dtype(found: Any) -> None:
    records = found[planted.SOUND, "dense_halved"]
    assert failed(records) == []
    dtypes = ["float32", "bfloat16", "float16"]
    wanted = [(c, d) for c in ("fake", "opcheck", "float64", "native") for d in dtypes]
    wanted = [pair for pair in wanted if pair[0] != "opcheck"]
    wanted.insert(3, ("opcheck", ""))
    assert [(r.outcome.check, r.outcome.dtype) for r in records] == wanted
    assert all(r.outcome.calls > 0 and r.outcome.declined == 0 for r in records)
    (worst,) = {r.outcome.worst is not None for r in records if r.outcome.check == "float64"}
    assert worst


def test_what_a_provider_declines_is_counted_and_not_called(found: Any) -> None:
    records = found[planted.SOUND, "narrow"]
    assert failed(records) == []
    assert all(r.outcome.declined > 0 for r in records if r.outcome.check == "float64")


def test_an_op_that_writes_to_an_argument_is_judged_by_what_it_leaves_there(found: Any) -> None:
    assert failed(found[planted.WRITING, "sound"]) == []
    assert failed(found[planted.WRITING, "lazy"]) == ["float64", "native"]


@pytest.mark.slow
def test_a_kernel_that_does_not_return_is_stopped() -> None:
    records = verify(planted.SOUND, "hangs", timeout=20)
    assert [r.ok for r in records] == [False]
    assert "was stopped, since it did not answer" in records[0].outcome.problem


@pytest.mark.parametrize(
    ("op", "provider", "message"),
    [
        ("planted::halve", None, "Did you mean 'planted::halved'"),
        (planted.SOUND, "dense", "has no provider 'dense'"),
        (planted.SOUND, "absent", "it is elsewhere"),
        (planted.BARE, None, "has no examples"),
    ],
)
def test_what_cannot_be_verified_is_said(op: str, provider: str | None, message: str) -> None:
    with pytest.raises(KernelError) as raised:
        verify(op, provider)
    assert message in str(raised.value)


def test_what_a_script_defines_cannot_be_imported_and_this_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from compilepass.kernels import define, provider, register_examples\n"
        "from compilepass.kernels.verify import verify\n"
        "define('scripted::one(Tensor x) -> Tensor', native=lambda x: x + 1)\n"
        "provider('scripted::one', name='mine', device_type='cpu', load=lambda: torch.neg)\n"
        "register_examples('scripted::one', lambda *size: (torch.ones(size[:2]),))\n"
        "verify('scripted::one')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a part of it is defined in a script" in done.stderr
    assert "Move the definitions into a module" in done.stderr


def test_examples_of_an_unknown_op_are_refused() -> None:
    with pytest.raises(RegistrationError, match="Did you mean 'planted::halved'"):
        kernels.register_examples("planted::halve", planted.rows)


def test_every_shipped_op_has_examples_that_its_native_form_takes() -> None:
    for op in kernels.SHIPPED:
        assert examples_of(op.name), op.name
        for label, example in examples_of(op.name).items():
            args = example(3, 8, torch.bfloat16)
            assert args is not None, label
            op.run_native(*args)


@pytest.mark.slow
def test_every_shipped_cpu_kernel_is_sound() -> None:
    providers = [
        p
        for op in kernels.SHIPPED
        for p in verifiable(op)
        if (p.name, p.device_type) == ("cpp", "cpu")
    ]
    assert len(providers) == len(kernels.SHIPPED)
    records = list(verify_all(providers))
    assert [r.to_dict() for r in records if not r.ok] == []
