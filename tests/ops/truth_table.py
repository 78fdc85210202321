"""Which ops are enabled, for every combination of what decides it; also runs as a script."""

from __future__ import annotations

import itertools

import torch

from compilepass.config import CompilationConfig, CompilationMode, use_config
from compilepass.errors import ConfigError
from compilepass.ops import CustomOp
from compilepass.platforms import use_platform

#: words -> for (a, b, unregistered): with Inductor, without Inductor
ROWS = {
    (): ("...", "+++"),
    ("all",): ("+++", "+++"),
    ("none",): ("...", "..."),
    ("+a",): ("+..", "+++"),
    ("-a",): ("...", ".++"),
    ("none", "+a"): ("+..", "+.."),
    ("none", "-a"): ("...", "..."),
    ("all", "+a"): ("+++", "+++"),
    ("all", "-a"): (".++", ".++"),
    ("+a", "all", "+a", "all"): ("+++", "+++"),
    ("none", "+a", "-b"): ("+..", "+.."),
    ("none", "+a", "+b"): ("++.", "++."),
}
CONTRADICTIONS = [("all", "none"), ("+a", "-a"), ("none", "+b", "-a", "-b")]


def run() -> int:
    """Check every row; raises ``SystemExit`` (never an assert) at the first that is wrong."""

    @CustomOp.register("a")
    class A(CustomOp):
        def forward_native(self, x: torch.Tensor) -> str:
            return "native"

        def forward_cpu(self, x: torch.Tensor) -> str:
            return "kernel"

    @CustomOp.register("b")
    class B(A):
        pass

    class SubclassOfA(A):
        """Inherits the name, so the words for ``a`` hold."""

    class Unregistered(CustomOp):
        forward_native = A.forward_native
        forward_cpu = A.forward_cpu

    x, checked = torch.ones(1), 0
    combinations = itertools.product(
        CompilationMode, ["inductor", "fx", "eager", "aot_eager"], ROWS.items(), [False, True]
    )
    for mode, backend, (words, expected), enforce in combinations:
        config = CompilationConfig(mode=mode, backend=backend, custom_ops=list(words))
        inductor = mode is not CompilationMode.NONE and backend == "inductor"
        row = expected[0] if inductor else expected[1]
        with use_config(config), use_platform("cpu"):
            for cls, sign in zip((A, B, Unregistered, SubclassOfA), row + row[0], strict=True):
                wanted = sign == "+" or enforce
                op = cls(enforce_enable=enforce)
                got = (op.decision.enabled, op(x), cls.enabled() or enforce)
                if got != (wanted, "kernel" if wanted else "native", wanted):
                    raise SystemExit(f"{mode!r} {backend} {words} {cls} enforce={enforce}: {got}")
                checked += 1
            if CustomOp.default_on() != ("all" in words or not (inductor or "none" in words)):
                raise SystemExit(f"default_on is wrong for {mode!r} {backend} {words}")
        if config.enabled_custom_ops.total() + config.disabled_custom_ops.total() != 4:
            raise SystemExit(f"counted {config.enabled_custom_ops}, {config.disabled_custom_ops}")
    for contradiction in CONTRADICTIONS:
        if not is_refused(contradiction):
            raise SystemExit(f"{contradiction} was accepted")
        checked += 1
    return checked


def is_refused(words: tuple[str, ...]) -> bool:
    try:
        CompilationConfig(custom_ops=list(words))
    except ConfigError:
        return True
    return False


if __name__ == "__main__":
    print(run())
