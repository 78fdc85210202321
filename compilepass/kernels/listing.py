"""Which kernel of each op runs on this machine, and why each other one does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..config import get_config
from .preference import NATIVE
from .registry import KernelOp, Provider, load_plugins, named_provider, refusals, steer

__all__ = ["Listed", "State", "listed", "preference_of"]

PREFERRED = "preferred by the configuration"

State = Literal["runs", "next", "idle", "absent"]


@dataclass(frozen=True)
class Listed:
    """A provider of an op on a device type, its state there, and the reason of the state.

    The state is ``runs``, ``next`` (takes what those before it decline), ``idle`` (could run, and
    one of higher priority does) or ``absent``.
    """

    op: str
    device: str
    provider: str
    priority: int | None
    state: State
    reason: str


def listed(op: KernelOp) -> Iterator[Listed]:
    """The providers of ``op``, best first, and native where it runs; loads (builds) what would run.

    Native also runs what all of them decline, and calls that need gradients.
    """
    load_plugins()
    for device in sorted({"cpu", *(p.device_type for p in op.providers)}):
        yield from _on(op, device)


def preference_of(op: KernelOp, device: str) -> str | None:
    """The provider that the active configuration prefers for ``op``, where it can run there."""
    name = steer(get_config().kernel_providers).get(op.name)
    if name is None or name == NATIVE:
        return name
    candidate = named_provider(op, device, name)
    return None if candidate is None or _absence(candidate) is not None else name


def _on(op: KernelOp, device: str) -> Iterator[Listed]:
    wanted = preference_of(op, device)
    if wanted == NATIVE and _is_here(device):
        yield Listed(op.name, device, NATIVE, None, "runs", PREFERRED)
    rows = list(_by_priority(op, device))
    for row in sorted(rows, key=lambda row: row.provider != wanted):
        if wanted is None or row.state == "absent":
            yield row
        elif row.provider == wanted:
            yield replace(row, state="runs", reason=PREFERRED)
        elif wanted == NATIVE:
            yield replace(row, state="idle", reason="native is preferred")
        elif row.state == "runs":
            yield replace(row, state="next", reason=f"for what {wanted} declines")
        else:
            yield row


def _by_priority(op: KernelOp, device: str) -> Iterator[Listed]:
    runs = op.available(device).provider
    refused = refusals(op, device)
    takers: list[str] = []
    settled = False
    for candidate in op.providers:
        if candidate.device_type != device:
            continue
        reason = refused.get(candidate.name) or _absence(candidate)
        state: State
        if reason is not None:
            state = "absent"
        elif candidate.name == runs:
            state, reason = "runs", ""
        elif settled:
            state, reason = "idle", f"{takers[-1]} comes first"
        else:
            state, reason = "next", f"for what {' and '.join(takers)} declines"
        if state in ("runs", "next"):
            takers.append(candidate.name)
            settled = settled or not candidate.may_decline
        yield Listed(op.name, device, candidate.name, candidate.priority, state, reason)
    if runs is None and _is_here(device) and preference_of(op, device) != NATIVE:
        yield Listed(op.name, device, "native", None, "runs", "there is no kernel")


def _absence(candidate: Provider) -> str | None:
    return candidate.available() if candidate.available else None


def _is_here(device: str) -> bool:
    module = getattr(torch, device, None)
    return device == "cpu" or (module is not None and bool(module.is_available()))
