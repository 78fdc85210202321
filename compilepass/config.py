"""The configuration: what to compile with, which ops and passes are on, and where it comes from.

A ``CompilationConfig`` is validated at construction and at every later change; what is wrong is a
``ConfigError``. ``use_config`` makes one active for a scope of one thread; with none active, one
default made from the environment applies. This is the only module that reads environment variables.

    config = CompilationConfig(custom_ops=["none", "+rms_norm"], passes=["-fuse_act_quant"])
    with use_config(config):
        model = MyModel()
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from .config_files import dump_toml, read_config_file
from .errors import ConfigError, did_you_mean
from .policy import CUSTOM_OPS, PASSES, Policy, PolicyList

__all__ = [
    "CompilationConfig",
    "CompilationMode",
    "Policy",
    "PolicyList",
    "RegisteredPass",
    "cache_dir",
    "config_is_default",
    "cpp_disabled",
    "cxx",
    "get_config",
    "plugin_allowlist",
    "set_default_config",
    "use_config",
    "work_offline",
]

_PREFIX = "COMPILEPASS_"
_RESERVED = frozenset(_PREFIX + name for name in ("CACHE_DIR", "PLUGINS", "CXX", "NO_CPP"))
_LEVELS = ("none", "canonical", "default", "all")

#: Guards the counters of every config; they are plain, since a config must stay copyable.
_counting = threading.Lock()


class CompilationMode(IntEnum):
    """How much is compiled: nothing, stock ``torch.compile``, or ``torch.compile`` with passes."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    COMPILE_WITH_PASSES = 2


@dataclass(frozen=True)
class RegisteredPass:
    """A pass that was registered in code, and the names it wants to run before and after."""

    pass_: Any
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class CompilationConfig(BaseModel):
    """One configuration, valid at any time; every problem with it is a ``ConfigError``.

    mode: a ``CompilationMode``, its name in any case, or 0 to 2.
    backend: ``"inductor"``, ``"fx"`` (passes, no code generation), or any Dynamo backend's name.
    dynamic, fullgraph: as in ``torch.compile``.
    custom_ops: base ``all`` or ``none``, then ``+name`` / ``-name``. Without a base, ``none`` when
        compiling with Inductor, else ``all``.
    passes: base ``default``, ``all`` or ``none``, then ``+name``, ``-name``, ``+name{option=1}``.
    level: what base ``default`` means: 0 no pass, 1 canonicalisation only, 2 each pass's own
        default (as without a level), 3 all passes. An error beside the bases ``all`` and ``none``.
    expect: pass name to number of matches; another number is an error with the reason.
    strict: a pass that raises, or was asked for by name and matches nothing, is an error.
    verify: run each rewritten site and what it replaced on random inputs, and compare both with
        float64; a site that is worse is restored and its pass counts as failed.
    debug_dump_path: directory for graphs, patterns and reports.
    inductor_options: as ``torch.compile(options=…)``.
    kernel_providers: kernel to the provider that runs it where it can, whatever the priorities:
        ``{"rms_norm": "liger"}``; ``native`` is one of each kernel.
    use_inductor_graph_partition: let Inductor split at code generation, so passes see whole graphs.

    Lists and strings with commas are both accepted for the two policies. A copy has lists and
    counters of its own.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, validate_default=True)

    mode: CompilationMode = CompilationMode.COMPILE_WITH_PASSES
    backend: str = Field("inductor", min_length=1)
    dynamic: bool | None = None
    fullgraph: bool = False
    custom_ops: list[str] = Field(default_factory=list)
    passes: list[str] = Field(default_factory=lambda: ["default"])
    level: int | None = Field(None, ge=0, le=3)
    expect: dict[str, NonNegativeInt] = Field(default_factory=dict)
    strict: bool = False
    verify: bool = False
    debug_dump_path: Path | None = None
    inductor_options: dict[str, Any] = Field(default_factory=dict)
    kernel_providers: dict[str, str] = Field(default_factory=dict)
    use_inductor_graph_partition: bool = False

    _extra_passes: tuple[RegisteredPass, ...] = PrivateAttr(default=())
    _enabled: Counter[str] = PrivateAttr(default_factory=Counter)
    _disabled: Counter[str] = PrivateAttr(default_factory=Counter)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise _config_error(error) from error

    def __setattr__(self, name: str, value: Any) -> None:
        before = dict(self.__dict__)
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            # pydantic has already stored the value when a check across fields refuses it
            self.__dict__.update(before)
            raise _config_error(error) from error

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> CompilationConfig:
        """As in pydantic, but what is wrong is a ``ConfigError``."""
        try:
            return super().model_validate(obj, **options)
        except ValidationError as error:
            raise _config_error(error) from error

    @field_validator("mode", mode="before")
    @classmethod
    def _mode(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        name = value.strip().upper()
        if name.isdecimal():
            return int(name)
        if name not in CompilationMode.__members__:
            raise ConfigError(
                f"mode is {value!r}",
                why="It is the name of no compilation mode.",
                hint=did_you_mean(name, CompilationMode.__members__),
            )
        return CompilationMode[name]

    @field_validator("custom_ops", mode="plain")
    @classmethod
    def _custom_ops(cls, words: Any) -> PolicyList:
        return PolicyList(CUSTOM_OPS, words)

    @field_validator("passes", mode="plain")
    @classmethod
    def _passes(cls, words: Any) -> PolicyList:
        return PolicyList(PASSES, words)

    @model_validator(mode="after")
    def _level_agrees(self) -> CompilationConfig:
        self.pass_policy()
        return self

    # Policies

    @property
    def compiles_with_inductor(self) -> bool:
        """Whether Inductor generates code, so that native ops are fused by it."""
        return self.mode is not CompilationMode.NONE and self.backend == "inductor"

    def op_policy(self) -> Policy:
        """The policy of ``custom_ops`` with its base resolved."""
        policy = cast(PolicyList, self.custom_ops).policy
        if policy.base is not None:
            return policy
        if self.compiles_with_inductor:
            return policy.with_base(
                "none", "no base: 'none' because the config compiles with Inductor"
            )
        return policy.with_base(
            "all", "no base: 'all' because the config does not compile with Inductor"
        )

    def pass_policy(self) -> Policy:
        """The policy of ``passes`` with its base resolved: none, canonical, default or all."""
        policy = cast(PolicyList, self.passes).policy
        if policy.base not in (None, "default"):
            if self.level is not None:
                raise ConfigError(
                    f"passes has the base {policy.base!r}, and level is {self.level}",
                    why="A level says what the base 'default' means.",
                    hint="Keep one of them.",
                )
            return policy
        if self.level is None:
            return policy.with_base("default", policy.base_why or "no base: 'default'")
        base = _LEVELS[self.level]
        return policy.with_base(base, f"level={self.level} means {base!r}")

    # Passes registered in code

    @property
    def extra_passes(self) -> tuple[RegisteredPass, ...]:
        """The passes registered in code, in order."""
        return self._extra_passes

    def register_pass(
        self, pass_like: Any, *, before: Sequence[str] = (), after: Sequence[str] = ()
    ) -> None:
        """Add a pass (or a rule, callable or Inductor pass) to run before and after others.

        ``before`` and ``after`` are one pass name or several.
        """
        if pass_like is None:
            raise ConfigError(
                "register_pass() got None",
                why="A pass must be something that can be run.",
                hint="Give a pass, a rule or a callable on a graph.",
            )
        names = _pass_names("before", before), _pass_names("after", after)
        self._extra_passes = (*self._extra_passes, RegisteredPass(pass_like, *names))

    # What was dispatched

    @property
    def enabled_custom_ops(self) -> Counter[str]:
        """How many ops of each name were built as enabled under this config."""
        return self._enabled

    @property
    def disabled_custom_ops(self) -> Counter[str]:
        """How many ops of each name were built as disabled under this config."""
        return self._disabled

    def count_op(self, name: str, enabled: bool) -> None:
        """Record that one op took its decision under this config."""
        with _counting:
            (self._enabled if enabled else self._disabled)[name] += 1

    # Equality and copies: fields and registered passes, never counters

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompilationConfig):
            return NotImplemented
        return self._fields() == other._fields() and self.extra_passes == other.extra_passes

    __hash__ = None  # type: ignore[assignment]  # it can change

    def model_copy(
        self, *, update: Mapping[str, Any] | None = None, deep: bool = False
    ) -> CompilationConfig:
        """A copy with ``update`` applied and validated; options and expectations are its own."""
        fields = {k: dict(v) if isinstance(v, dict) else v for k, v in self._fields().items()}
        copied = type(self)(**{**fields, **(update or {})})
        copied._extra_passes = self._extra_passes
        return copied

    def __copy__(self) -> CompilationConfig:
        return self.model_copy()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> CompilationConfig:
        # Passes and Inductor options are objects with an identity; a copy runs the same ones.
        return self.model_copy()

    # Text

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CompilationConfig:
        """Read a ``.toml`` or ``.json`` file, or ``[tool.compilepass]`` of a ``pyproject.toml``."""
        return cls(**read_config_file(Path(path)))

    @classmethod
    def from_env(
        cls, base: CompilationConfig | None = None, environ: Mapping[str, str] | None = None
    ) -> CompilationConfig:
        """``base`` (else the defaults) with each ``COMPILEPASS_<FIELD>`` variable applied.

        Policies are comma separated, dictionaries are JSON, an empty value of an optional field
        is ``None``. A ``COMPILEPASS_*`` variable that nothing reads is a ``ConfigError``.
        """
        environ = os.environ if environ is None else environ
        names = {_PREFIX + field.upper(): field for field in cls.model_fields}
        update = {}
        for variable, text in environ.items():
            if not variable.startswith(_PREFIX) or variable in _RESERVED:
                continue
            if variable not in names:
                raise ConfigError(
                    f"unknown environment variable {variable}",
                    why=f"Nothing reads it; every {_PREFIX}* variable must mean something.",
                    hint=did_you_mean(variable, {*names, *_RESERVED}),
                )
            field = names[variable]
            update[field] = _from_text(variable, text, cls.model_fields[field].annotation)
        return (cls() if base is None else base).model_copy(update=update)

    def to_toml(self) -> str:
        """TOML that loads to an equal config; passes registered in code cannot be in it."""
        return dump_toml({**self._fields(), "mode": self.mode.name})

    def __str__(self) -> str:
        default = CompilationConfig()._fields()
        shown = [f"{k}={v!r}" for k, v in self._fields().items() if v != default[k]]
        shown += [f"register_pass({entry.pass_!r})" for entry in self.extra_passes]
        return f"CompilationConfig({', '.join(shown)})"

    def factors(self) -> dict[str, str]:
        """What influences the compiled code, by name.

        Equal policies in another order are alike; where to dump and what to expect do not count.
        What passes do is not in it: the pass manager's factors cover that.
        """
        values = {
            "mode": self.mode.name,
            "backend": self.backend,
            "dynamic": self.dynamic,
            "fullgraph": self.fullgraph,
            "verify": self.verify,
            "custom_ops": self.op_policy().key(),
            "passes": self.pass_policy().key(),
            "use_inductor_graph_partition": self.use_inductor_graph_partition,
            **{f"inductor_options.{k}": v for k, v in self.inductor_options.items()},
            **{f"kernel_providers.{k}": v for k, v in self.kernel_providers.items()},
        }
        for i, entry in enumerate(self.extra_passes):
            order = sorted(entry.before), sorted(entry.after)
            values[f"register_pass {i}"] = [_qualified_name(entry.pass_), *order]
        return {k: json.dumps(v, sort_keys=True, default=_identity) for k, v in values.items()}

    def fingerprint(self) -> str:
        """A sha256 of the :meth:`factors`."""
        return hashlib.sha256(json.dumps(self.factors(), sort_keys=True).encode()).hexdigest()


def _pass_names(what: str, names: Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(n, str) and n for n in names):
        raise ConfigError(
            f"{what}={names!r} is not a pass name or a list of them",
            why="The order of passes is given by their names.",
            hint=f'Example: {what}=["fuse_norm_quant"].',
        )
    return tuple(names)


def _identity(obj: Any) -> str:
    """What an Inductor option that is no plain data says of itself, never its address."""
    uuid = getattr(obj, "uuid", None)
    return repr(uuid()) if callable(uuid) else _qualified_name(obj)


def _qualified_name(obj: Any) -> str:
    named = obj if hasattr(obj, "__qualname__") else type(obj)
    return f"{named.__module__}.{named.__qualname__}"


def _config_error(error: ValidationError) -> ConfigError:
    """Say in our words what pydantic refused; an error of ours inside comes back as it was."""
    problems = error.errors(include_url=False)
    ours = [p["ctx"]["error"] for p in problems if "error" in p.get("ctx", {})]
    if len(problems) == 1 and ours and isinstance(ours[0], ConfigError):
        return ours[0]
    whats, hints = [], []
    for problem in problems:
        where = ".".join(map(str, problem["loc"]))
        if problem["type"] in ("extra_forbidden", "no_such_attribute"):
            whats.append(f"unknown field {where!r}")
            hints.append(did_you_mean(where, CompilationConfig.model_fields))
        elif "error" in problem.get("ctx", {}):
            whats.append(str(problem["ctx"]["error"]))
        else:
            whats.append(f"{where} is {problem['input']!r}: {problem['msg']}")
    return ConfigError(
        "; ".join(whats),
        why="The configuration accepts its documented fields and types only.",
        hint=" ".join(hints) or "See the fields in help(CompilationConfig).",
    )


def _from_text(variable: str, text: str, annotation: Any) -> Any:
    """A field's value from the text of a variable, as far as pydantic does not do it itself."""
    kind = str(annotation)
    if not text and "None" in kind:
        return None
    if kind.startswith("dict") or text.startswith("["):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"{variable} is {text!r}, which is not JSON",
                why=str(error),
                hint='Example: {"fuse_norm_quant": 4}.',
            ) from error
    return text


# The active configuration

_active: ContextVar[CompilationConfig | None] = ContextVar("compilepass_config", default=None)
_default: CompilationConfig | None = None
_default_lock = threading.Lock()


@contextmanager
def use_config(config: CompilationConfig) -> Iterator[CompilationConfig]:
    """Make ``config`` the active one inside the ``with``, in this thread or task only."""
    _require_config(config)
    token = _active.set(config)
    try:
        yield config
    finally:
        _active.reset(token)


def get_config() -> CompilationConfig:
    """The active config, else the default one, which is made from the environment once."""
    active = _active.get()
    if active is not None:
        return active
    global _default
    with _default_lock:
        if _default is None:
            _default = CompilationConfig.from_env()
        return _default


def config_is_default() -> bool:
    """Whether no config is active, so that ``get_config`` answers with the default."""
    return _active.get() is None


def set_default_config(config: CompilationConfig | None) -> None:
    """Replace the process-wide default; ``None`` makes it anew from the environment when needed."""
    if config is not None:
        _require_config(config)
    global _default
    with _default_lock:
        _default = config


def _require_config(config: object) -> None:
    if not isinstance(config, CompilationConfig):
        raise ConfigError(
            f"{config!r} is not a CompilationConfig",
            why="Only a validated configuration can be active.",
            hint="Write CompilationConfig(custom_ops=[…]).",
        )


# Environment variables that are no field of a configuration


def cache_dir() -> Path:
    """Where built kernels are kept: COMPILEPASS_CACHE_DIR, else the user's cache directory."""
    own = os.environ.get(_PREFIX + "CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compilepass"


def plugin_allowlist() -> tuple[str, ...] | None:
    """The plugins that may load: ``None`` is all (COMPILEPASS_PLUGINS unset), ``()`` is none."""
    text = os.environ.get(_PREFIX + "PLUGINS")
    if text is None:
        return None
    return tuple(name.strip() for name in text.split(",") if name.strip())


def cxx() -> str | None:
    """The C++ compiler to use: COMPILEPASS_CXX, else CXX, else ``None``."""
    return os.environ.get(_PREFIX + "CXX") or os.environ.get("CXX") or None


def work_offline() -> None:
    """Have Hugging Face libraries that are imported later make no connection."""
    os.environ["HF_HUB_OFFLINE"] = "1"


def cpp_disabled() -> bool:
    """Whether COMPILEPASS_NO_CPP forbids building C++ kernels."""
    return os.environ.get(_PREFIX + "NO_CPP", "").lower() not in ("", "0", "false", "no", "off")
