"""An op with providers that are each wrong in one way, for ``test_verify`` to find.

A module of its own, since verification imports it in another process.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compilepass.kernels import define, provider, register_examples

SOUND = "planted::halved"
LYING = "planted::lying"
WRITING = "planted::add_"
BARE = "planted::bare"


def halved(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    """``round(x / by)`` as int8, and ``x / by``."""
    out = x.float() / by
    return torch.round(out).clamp(-128, 127).to(torch.int8), out.to(x.dtype)


def empty_halved(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape)


def lying_fake(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape, dtype=torch.float64)


def rows(count: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    return (torch.randn(count, width) * 3).to(dtype), 2.0


define(f"{SOUND}(Tensor x, float by) -> (Tensor, Tensor)", native=halved, fake=empty_halved)
register_examples(SOUND, rows)
define(f"{LYING}(Tensor x, float by) -> (Tensor, Tensor)", native=halved, fake=lying_fake)
register_examples(LYING, rows)


def add_(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def one(count: int, width: int, dtype: torch.dtype) -> tuple[Any, ...] | None:
    return None if width > 1000 else (*rows(count, width, dtype)[:1], torch.ones(width).to(dtype))


define(f"{WRITING}(Tensor(a!) x, Tensor y) -> ()", native=add_)
register_examples(WRITING, one)
define(f"{BARE}(Tensor x) -> Tensor", native=lambda x: x + 1)


KERNELS: dict[str, Callable[..., Any]] = {}


def plant(kernel: Callable[..., Any]) -> Callable[..., Any]:
    KERNELS[kernel.__name__] = kernel
    return kernel


def dense_halved(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    q, out = halved(x, by)
    return q.contiguous(), out.contiguous()


plant(dense_halved)


@plant
def is_off_by_a_little(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return dense_halved(x, by * 1.0001)


@plant
def skips_the_tail(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    q, out = empty_halved(x, by)
    wide = x.shape[-1] // 8 * 8
    for whole, part in zip((q, out), dense_halved(x[..., :wide], by), strict=True):
        whole[..., :wide] = part
    return q, out


@plant
def ignores_strides(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return dense_halved(x.as_strided(x.shape, torch.empty(x.shape).stride()), by)


@plant
def ignores_nan(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    return dense_halved(torch.where(x.isnan(), 0, x), by)


@plant
def rounds_half_up(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    q = torch.floor(x.float() / by + 0.5).clamp(-128, 127).to(torch.int8)
    return q.contiguous(), dense_halved(x, by)[1]


@plant
def returns_its_argument(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    q, out = dense_halved(x, by)
    return q, x.copy_(out) if x.is_contiguous() else out


@plant
def writes_to_its_argument(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    out = dense_halved(x, by)
    x.zero_()
    return out


@plant
def returns_strides(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    q, out = dense_halved(x, by)
    return q, out.t().contiguous().t()


@plant
def dies(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    if x.shape[0] == 7:
        os.kill(os.getpid(), signal.SIGSEGV)
    return dense_halved(x, by)


@plant
def raises(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    raise ValueError("no such GPU")


def hangs(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    time.sleep(600)
    return dense_halved(x, by)


def declines_wide_rows(x: Tensor, by: float) -> str | None:
    return "it is wide" if x.shape[-1] > 100 else None


def takes_narrow_rows_only(x: Tensor, by: float) -> tuple[Tensor, Tensor]:
    assert x.shape[-1] <= 100
    return dense_halved(x, by)


def load_hanging() -> Callable[..., Any]:
    return hangs


def _loader(kernel: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: kernel


for name, kernel in KERNELS.items():
    provider(SOUND, name=name, device_type="cpu", load=_loader(kernel), priority=-1)
provider(SOUND, name="hangs", device_type="cpu", load=load_hanging, priority=-2)
provider(
    SOUND,
    name="narrow",
    device_type="cpu",
    load=_loader(takes_narrow_rows_only),
    priority=-2,
    supports=declines_wide_rows,
)
provider(
    SOUND,
    name="absent",
    device_type="cpu",
    load=_loader(halved),
    available=lambda: "it is elsewhere",
)
provider(LYING, name="honest", device_type="cpu", load=_loader(dense_halved))
provider(WRITING, name="sound", device_type="cpu", load=_loader(add_))
provider(WRITING, name="lazy", device_type="cpu", load=_loader(lambda x, y: None))
provider(BARE, name="sound", device_type="cpu", load=_loader(lambda x: x + 1))
