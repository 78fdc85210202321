"""Whether an op is enabled, and the record of the decision that it took.

Enabled means that a platform's own implementation runs; disabled means native PyTorch code, which
Inductor can fuse.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import config_is_default, get_config
from ..reporting import note
from .replaceable import Replaceable

__all__ = ["Decision", "default_on", "judge"]


@dataclass(frozen=True)
class Decision:
    """What one op decided when it was built.

    name: its policy name, or the class's own name when it is not registered.
    op_class: module and name of the class that was built.
    enabled, why: the decision and the word, base or argument that made it.
    platform, device_type: where it was taken; ``device_type`` is ``None`` if any device will do.
    method: the forward that runs, after aliases are followed.
    compile_backend: the Dynamo backend that compiles the native forward on its own, or ``None``.
    providers: the kernels for which a provider is preferred, each with that, as the config had it.
    """

    name: str
    op_class: str
    enabled: bool
    why: str
    platform: str
    device_type: str | None
    method: str
    compile_backend: str | None
    providers: tuple[tuple[str, str], ...] = ()

    @property
    def implementation(self) -> str:
        """The code that runs, for people."""
        compiled = f", compiled with {self.compile_backend!r}" if self.compile_backend else ""
        preferred = "".join(f", preferring {name} for {op}" for op, name in self.providers)
        return f"{self.op_class}.{self.method}{compiled}{preferred}"


def judge(cls: type[Replaceable], *, enforce: bool = False) -> tuple[bool, str]:
    """Whether ops of ``cls`` are enabled under the active config, and why.

    A class without a name follows the base, and says so once.
    """
    policy = get_config().op_policy()
    on = default_on()
    if enforce:
        enabled, why = True, "enforce_enable=True"
    elif cls.name is None:
        enabled, why = on, f"not registered: {policy.base_why}"
        note(
            "ops",
            f"{cls.__module__}.{cls.__qualname__} is not registered, so no word of custom_ops can "
            "name it: it follows the base. Decorate it with "
            f'@{cls._root().__name__}.register("…").',
        )
    else:
        enabled, why = policy.decide(cls.name, on), policy.why(cls.name, on)
    return enabled, why + (" (no config is active: the default one)" if config_is_default() else "")


def default_on() -> bool:
    """Whether the active config's base enables ops that no word names."""
    return get_config().op_policy().base == "all"
