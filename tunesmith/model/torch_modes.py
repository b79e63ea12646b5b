"""Torch's global modes: gradients, inference mode, autocast, default dtype and device, CPU threads.

They belong to the thread, not to the coroutine. User code that awaits inside `torch.no_grad()`, or that changes a mode
and does not restore it, would change them for the engine and the trainer: these run on the same thread in between.
Engine and trainer run under `default_modes`; `UserModes` saves and restores a user coroutine's modes across awaits.
One mode of our own belongs to the process: exact numerics. Attributes of modules that are replaced for a while are
modes too (`replaced`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tunesmith.errors import ConfigError

AUTOCAST_DEVICES = ("cpu", "cuda")
_numerics = {"is_exact": False}
_open_guards: list[torch.inference_mode] = []
"""Guards that keep inference mode off after coroutines that ended inside it; a collected guard would turn it on."""


def is_exact() -> bool:
    """Whether models of this process compute with exact numerics (`forward/exact.py`)."""
    return _numerics["is_exact"]


def set_exact() -> None:
    """For `use_exact_numerics`, which says what else the mode needs."""
    _numerics["is_exact"] = True


Attribute = tuple[dict[str, Any], str, Any]
"""The attributes of a module, the name of one, and its value."""


@contextlib.contextmanager
def replaced(attributes: Sequence[Attribute]) -> Iterator[None]:
    """Within, these attributes of instances hide the methods and submodules of the same names."""
    for place, name, value in attributes:
        place[name] = value
    try:
        yield
    finally:
        for place, name, _ in attributes:
            place.pop(name, None)


@contextlib.contextmanager
def default_modes(*, num_threads: int | None = None, device: torch.device | None = None) -> Iterator[None]:
    """Within: gradients on, inference mode and autocast off, float32 and CPU as defaults, and `device`, if it is a GPU,
    the current one, on which Triton launches. All modes are restored at the end, except the number of CPU threads."""
    if num_threads is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    is_current = device is None or device.type != "cuda" or device.index == torch.cuda.current_device()
    if is_current and _has_default_modes():
        yield
        return
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if not is_current:
            stack.enter_context(torch.cuda.device(device))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for each in AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(each):
                stack.enter_context(torch.autocast(each, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


def _has_default_modes() -> bool:
    probe = torch.empty(0)  # several times faster than `torch.get_default_device`
    return (
        probe.device.type == "cpu"
        and probe.dtype == torch.float32
        and torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))
    )


class UserModes:
    """The modes of one user coroutine: active while it runs, saved while it waits.

    Modes are compared before they are set: setting them takes microseconds, and most coroutines never change one.
    """

    def __init__(self) -> None:
        self._has_grad = True
        self._dtype = torch.float32
        self._autocast: list[str] = []
        self._suspended_inference: torch.inference_mode | None = None

    def enter(self) -> None:
        """Restore the coroutine's modes before it resumes."""
        if self._suspended_inference is not None:
            self._suspended_inference.__exit__(None, None, None)
            self._suspended_inference = None
        if torch.is_grad_enabled() is not self._has_grad:
            torch.set_grad_enabled(self._has_grad)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        for device in self._autocast:
            torch.set_autocast_enabled(device, True)

    def leave(self, *, has_ended: bool = False) -> None:
        """Save the coroutine's modes when it waits or has ended, and restore the defaults."""
        self._has_grad = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        if torch.is_inference_mode_enabled():
            self._suspended_inference = torch.inference_mode(False)
            self._suspended_inference.__enter__()
            if has_ended:
                _open_guards.append(self._suspended_inference)
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
        if self._dtype is not torch.float32:
            torch.set_default_dtype(torch.float32)
        if self._autocast or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            self._autocast = [device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
            for device in self._autocast:
                torch.set_autocast_enabled(device, False)


MIN_LIMIT = 64
"""Allowed on any machine, so that a run file written for a larger machine works on a smaller one."""


def set_num_threads(number: int) -> None:
    """Set the number, and refuse one far above the number of CPUs, with which kernels only wait for each other."""
    num_cpus = os.cpu_count() or 1
    limit = max(num_cpus, MIN_LIMIT)
    if number > limit:
        raise ConfigError(f"num_cpu_threads={number}: this machine has {num_cpus} CPUs; set it to {limit} or less")
    torch.set_num_threads(number)
