"""Builds the C++ kernels on first use, into a cache that is safe to share between processes.

A build lives in ``<cache>/kernels/<key>/``, where the key covers all that decides its bytes: the
sources, the compiler and its flags, the CPU (``-march=native``) and the torch release. A file lock
keeps two processes from building at once. The library is used only with the digest that was
written after it, so an interrupted build or a damaged file is noticed, and built again.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ... import config
from ...errors import KernelError

__all__ = ["library"]

_log = logging.getLogger("compilepass")

_HERE = Path(__file__).parent
_LIBRARY = "kernels.so"
_DIGEST = "kernels.sha256"
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fno-math-errno",  # or a square root is a call, one number at a time
    "-fPIC",
    "-fvisibility=hidden",
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # what torch 2.11 has, so that it loads there
    f"-I{_TORCH / 'include'}",
)
_LINK = ("-shared", f"-L{_TORCH / 'lib'}", "-ltorch_cpu")


def library() -> ctypes.CDLL:
    """The loaded library, built if it must be; a failure is remembered for the process.

    Raises:
        KernelError: C++ is switched off, there is no compiler, or it failed.
    """
    outcome = _outcome()
    if isinstance(outcome, KernelError):
        raise outcome
    return outcome


@functools.cache
def _outcome() -> ctypes.CDLL | KernelError:
    try:
        return _load()
    except KernelError as error:
        return error
    except OSError as error:
        return KernelError(
            f"the C++ kernels could not be built in {config.cache_dir()}: {error}",
            hint="Set COMPILEPASS_CACHE_DIR to a writable folder.",
        )


def _load() -> ctypes.CDLL:
    if config.cpp_disabled():
        raise KernelError("C++ kernels are switched off by COMPILEPASS_NO_CPP")
    compiler = _compiler()
    folder = config.cache_dir() / "kernels" / _key(compiler)
    if not _intact(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not _intact(folder):  # else another process has built it meanwhile
                _build(compiler, folder)
    return ctypes.CDLL(str(folder / _LIBRARY))


def _compiler() -> str:
    chosen = config.cxx()
    names = (chosen,) if chosen else ("c++", "g++", "clang++")
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise KernelError(
        f"no C++ compiler was found ({', '.join(names)})",
        hint="Install g++ or clang++, or name one in COMPILEPASS_CXX.",
    )


def _key(compiler: str) -> str:
    digest = hashlib.sha256()
    for source in sorted((*_HERE.glob("*.cpp"), *_HERE.glob("*.h"))):
        digest.update(source.read_bytes())
    identity = (_run([compiler, "--version"]), *_FLAGS, *_LINK, _cpu_flags(), torch.__version__)
    digest.update("\0".join((compiler, *identity)).encode())
    return digest.hexdigest()[:24]


def _cpu_flags() -> str:
    """The instruction sets of this CPU: a cache in a shared home may serve several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return torch.backends.cpu.get_cpu_capability()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _intact(folder: Path) -> bool:
    try:
        recorded = (folder / _DIGEST).read_text()
        return recorded == hashlib.sha256((folder / _LIBRARY).read_bytes()).hexdigest()
    except OSError:
        return False


def _build(compiler: str, folder: Path) -> None:
    message = "compilepass: building the C++ kernels (once for this machine, about 10 s)"
    _log.info(message)
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / _LIBRARY
        units = [(source, Path(scratch) / f"{source.stem}.o") for source in _HERE.glob("*.cpp")]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # threads only wait for their compilers
            compiled = [
                pool.submit(_run, [compiler, *_FLAGS, "-c", str(source), "-o", str(unit)])
                for source, unit in units
            ]
            for outcome in compiled:
                outcome.result()
        objects = [str(unit) for _, unit in units]
        _run([compiler, *_FLAGS, *objects, "-o", str(built), *_LINK])
        digest = Path(scratch) / _DIGEST
        digest.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        os.replace(built, folder / _LIBRARY)
        os.replace(digest, folder / _DIGEST)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-20:]
        raise KernelError(f"the C++ compiler {command[0]} failed", why="\n".join(last)) from error
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:  # the lock goes with the process, so a crash leaves none behind
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
