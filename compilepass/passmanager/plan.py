"""The plan: which passes run, in which order, and why the others do not.

The order is computed from phases and declared edges, ties broken by name, so that it never depends
on the order of registration.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, PlanError, did_you_mean
from ..policy import Policy
from .base import Pass, Phase

__all__ = ["Known", "Plan", "PlanEntry", "build_plan"]


@dataclass(frozen=True)
class Known:
    """A pass that could run, where it came from, and edges that were added to it."""

    pass_: Pass
    origin: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    registered: bool = False  # by config.register_pass: on unless the policy says off


@dataclass(frozen=True)
class PlanEntry:
    """One pass with its place in the plan; ``state`` is ``run`` or ``disabled``."""

    pass_: Pass
    state: str
    reason: str
    origin: str

    @property
    def name(self) -> str:
        return self.pass_.name


@dataclass(frozen=True)
class Plan:
    """Passes in the order in which they run, those that are off included."""

    entries: tuple[PlanEntry, ...]
    edges: tuple[tuple[str, str, str], ...] = ()  # (first, then, who declared it)
    asked: frozenset[str] = frozenset()  # switched on by name

    @property
    def running(self) -> tuple[Pass, ...]:
        return tuple(e.pass_ for e in self.entries if e.state == "run")

    def __str__(self) -> str:
        width = max((len(e.name) for e in self.entries), default=0)
        return "\n".join(
            f"{e.pass_.phase.name.lower():<13}{e.name:<{width}}  {e.state:<9}{e.reason}"
            for e in self.entries
        )


@dataclass(frozen=True)
class _Edge:
    first: str
    then: str
    who: str


def build_plan(known: Iterable[Known], policy: Policy) -> Plan:
    """Choose and order ``known`` by ``policy``.

    Raises :class:`ConfigError` for a name or option that no pass has, :class:`PlanError` for two
    passes of one name, a required pass that is missing, and a cycle.
    """
    passes = _by_name(known)
    for name in sorted(policy.names - passes.keys()):
        sign = "+" if name in policy.enabled else "-"
        raise ConfigError(
            f"passes has '{sign}{name}', and there is no such pass",
            why="No installed package brings a pass of that name, and none was registered.",
            hint=did_you_mean(name, passes),
        )
    states = {name: _state(k, policy) for name, k in passes.items()}
    _apply_requirements(passes, states, policy)
    configured = {
        name: dataclasses.replace(k, pass_=_with_options(k.pass_, policy.enabled.get(name, {})))
        for name, k in passes.items()
    }
    edges = _edges(configured)
    order = _sorted(configured, edges)
    entries = tuple(
        PlanEntry(configured[n].pass_, states[n][0], states[n][1], configured[n].origin)
        for n in order
    )
    return Plan(entries, tuple((e.first, e.then, e.who) for e in edges), frozenset(policy.enabled))


def _by_name(known: Iterable[Known]) -> dict[str, Known]:
    passes: dict[str, Known] = {}
    for k in known:
        name = k.pass_.name
        if not name:
            raise PlanError(
                f"The pass {type(k.pass_).__qualname__} from {k.origin} has no name.",
                hint="Set the class attribute 'name'.",
            )
        other = passes.get(name)
        if other is not None:
            raise PlanError(
                f"Two passes are named {name!r}.",
                why=f"One comes from {other.origin}, the other from {k.origin}.",
                hint="Rename one; a policy must be able to tell them apart.",
            )
        passes[name] = k
    return passes


def _state(known: Known, policy: Policy) -> tuple[str, str]:
    name = known.pass_.name
    default = known.pass_.default or known.registered
    if policy.base == "canonical":
        default = default and known.pass_.phase in (Phase.CANONICALIZE, Phase.CLEANUP)
    state = "run" if policy.decide(name, default) else "disabled"
    if known.registered and state == "run" and name not in policy.names:
        return state, "registered in the config"
    return state, policy.why(name, default)


def _apply_requirements(
    passes: Mapping[str, Known], states: dict[str, tuple[str, str]], policy: Policy
) -> None:
    """Switch off what requires a pass that is switched off, and on what a running pass requires."""
    for name in [n for n, (state, _) in states.items() if state == "run"]:
        needed = _all_required(passes, name)
        off = next((n for n in needed if n in policy.disabled), None)
        if off is not None:
            states[name] = "disabled", f"requires {off!r}, which '-{off}' switches off"
            continue
        for other in needed:
            if states[other][0] != "run":
                states[other] = "run", f"required by {name!r}"


def _all_required(passes: Mapping[str, Known], name: str) -> list[str]:
    """What a pass requires, and what that requires in turn."""
    found: list[str] = []
    todo = [name]
    while todo:
        user = todo.pop()
        for needed in passes[user].pass_.requires:
            if needed not in passes:
                raise PlanError(
                    f"Pass {user!r} requires {needed!r}, which does not exist.",
                    why=f"{user!r} comes from {passes[user].origin}.",
                    hint=did_you_mean(needed, passes),
                )
            if needed not in found:
                found.append(needed)
                todo.append(needed)
    return found


def _with_options(pass_: Pass, options: Mapping[str, Any]) -> Pass:
    known = pass_.options()
    for option in options:
        if option not in known:
            raise ConfigError(
                f"pass {pass_.name!r} has no option {option!r}",
                hint=did_you_mean(option, known) if known else f"Write '+{pass_.name}'.",
            )
        if not _fits(known[option], options[option]):
            raise ConfigError(
                f"option {option!r} of pass {pass_.name!r} is {options[option]!r}",
                why=f"It must be of type {type(known[option]).__name__}.",
                hint=f"Its default is {known[option]!r}.",
            )
    return dataclasses.replace(pass_, **options) if options else pass_  # type: ignore[type-var]


def _fits(default: Any, value: Any) -> bool:
    """Whether an option may have ``value``; ``True`` is no number, and 1 is a float too."""
    if default is None or type(value) is type(default):
        return True
    return isinstance(default, float) and type(value) is int


def _edges(passes: Mapping[str, Known]) -> list[_Edge]:
    edges = []
    for name, k in passes.items():
        declared = k.pass_
        for other in (*declared.requires, *declared.after):
            edges.append(_Edge(other, name, f"{type(declared).__qualname__} ({k.origin})"))
        for other in declared.before:
            edges.append(_Edge(name, other, f"{type(declared).__qualname__} ({k.origin})"))
        for others, after in ((k.after, True), (k.before, False)):
            for other in others:
                if other not in passes:
                    raise ConfigError(
                        f"register_pass({name!r}) names {other!r}, and there is no such pass",
                        hint=did_you_mean(other, passes),
                    )
                first, then = (other, name) if after else (name, other)
                edges.append(_Edge(first, then, "config.register_pass"))
    return [e for e in edges if e.first in passes and e.then in passes]


def _sorted(passes: Mapping[str, Known], edges: list[_Edge]) -> list[str]:
    phase = {name: k.pass_.phase for name, k in passes.items()}
    for e in edges:
        if phase[e.first] > phase[e.then]:
            raise PlanError(
                f"{e.first!r} cannot run before {e.then!r}.",
                why=f"{e.who} says so, but {e.first!r} belongs to phase {phase[e.first].name} and "
                f"{e.then!r} to the earlier phase {phase[e.then].name}.",
                hint="Change a phase or the edge.",
            )
    following: dict[str, list[str]] = defaultdict(list)
    waiting = dict.fromkeys(passes, 0)
    for first, then in {(e.first, e.then) for e in edges}:
        following[first].append(then)
        waiting[then] += 1
    ready = [(phase[n], n) for n, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for then in following[name]:
            waiting[then] -= 1
            if waiting[then] == 0:
                heapq.heappush(ready, (phase[then], then))
    if len(order) < len(passes):
        cycle = _on_cycles(set(passes) - set(order), edges)
        shown = [
            f"{e.first} before {e.then} (by {e.who})" for e in edges if {e.first, e.then} <= cycle
        ]
        raise PlanError(
            "The passes cannot be ordered: they form a cycle.",
            why="; ".join(dict.fromkeys(shown)),
            hint="Remove one of these edges.",
        )
    return order


def _on_cycles(names: set[str], edges: list[_Edge]) -> set[str]:
    """Of passes that all wait for one another, those that do not merely follow a cycle."""
    while True:
        leading = {e.first for e in edges if {e.first, e.then} <= names}
        if leading == names:
            return names
        names = leading
