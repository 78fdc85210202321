"""The decision of every op follows the policy, with and without ``python -O``."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import truth_table

from compilepass.config import CompilationConfig, set_default_config, use_config
from compilepass.errors import ConfigError
from compilepass.ops import CustomOp, check_policy_names

EXPECTED_CHECKS = 3 * 4 * len(truth_table.ROWS) * 2 * 4 + len(truth_table.CONTRADICTIONS)


def test_every_combination_decides_as_the_table_says() -> None:
    assert truth_table.run() == EXPECTED_CHECKS


def test_the_table_holds_under_python_O() -> None:
    done = subprocess.run(
        [sys.executable, "-O", truth_table.__file__], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(EXPECTED_CHECKS), done.stderr


def test_unknown_names_are_judged_at_the_first_op_with_the_nearest() -> None:
    @CustomOp.register("rms_norm_x")
    class Op(CustomOp):
        pass

    config = CompilationConfig(custom_ops=["none", "+rms_nrm_x"])  # a plugin might still have it
    with use_config(config), pytest.raises(ConfigError, match="'rms_norm_x'"):
        Op()
    with pytest.raises(ConfigError, match="names 'rms_nrm_x'"):
        check_policy_names(config)
    assert config.disabled_custom_ops.total() == 0


def test_an_unregistered_class_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    class NeverRegistered(CustomOp):
        pass

    for _ in range(2):
        NeverRegistered()
    assert sum("NeverRegistered is not registered" in r.message for r in caplog.records) == 1


def test_the_decision_says_when_the_default_config_made_it() -> None:
    @CustomOp.register("plain")
    class Op(CustomOp):
        pass

    set_default_config(CompilationConfig(custom_ops="all"))
    try:
        op = Op()
    finally:
        set_default_config(None)
    assert op.decision.enabled
    assert "no config is active" in op.decision.why


def test_two_threads_with_two_configs_stay_apart() -> None:
    @CustomOp.register("threaded")
    class Op(CustomOp):
        pass

    configs = [CompilationConfig(custom_ops=base) for base in ("all", "none")]
    results: dict[int, set[bool]] = {0: set(), 1: set()}
    barrier = threading.Barrier(2)

    def build(i: int) -> None:
        with use_config(configs[i]):
            barrier.wait()
            for _ in range(50):
                results[i].add(Op().decision.enabled)

    threads = [threading.Thread(target=build, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: {True}, 1: {False}}
    assert configs[0].enabled_custom_ops == {"threaded": 50}
    assert configs[1].disabled_custom_ops == {"threaded": 50}
