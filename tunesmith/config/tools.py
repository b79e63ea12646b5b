"""Settings of the tools that agents call."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tunesmith.config.section import Section


class PythonToolSection(Section):
    """The Python tool: isolation, workers, packages, and the limits of one call."""

    isolation: Literal["auto", "bubblewrap", "seccomp"] = "auto"
    """How model-written code is isolated; auto takes bubblewrap where it works, else seccomp with Landlock."""
    unsafe: bool = False
    """Run code with limits but without isolation where none is available; only inside a container of your own."""
    num_workers: int | None = Field(default=None, ge=1, le=1024)
    """Calls that run at the same time; by default the CPUs of this process. Sessions have workers of their own."""
    max_wait_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that a call waits for a worker and its start; then the rollout fails. Raise `num_workers` first."""
    packages: tuple[str, ...] = ()
    """Installed distributions that code may import besides the standard library, such as numpy and sympy; they are
    imported once per worker."""
    wall_s: float = Field(default=10.0, gt=0, le=3600, allow_inf_nan=False)
    """Seconds after which a call is ended."""
    cpu_s: int = Field(default=10, ge=1, le=3600)
    """CPU seconds of each process of a call; in a session, 2 s later the process is killed if its code continues."""
    memory_mb: int = Field(default=512, ge=64, le=1_000_000)
    """Address space of each process of a call in MiB (1,048,576 bytes each, not 1,000,000), the interpreter (about 30)
    and the packages included."""
    max_processes: int = Field(default=1, ge=1, le=1000)
    """Processes of a call; with 1, code cannot start others, and CPU and memory limits hold for the whole call."""
    max_threads: int = Field(default=16, ge=0, le=1000)
    """Threads that a call may start."""
    max_open_files: int = Field(default=64, ge=16, le=4096)
    """Open files of each process."""
    max_file_mb: int = Field(default=16, ge=1, le=100_000)
    """Size of each written file in MiB (1,048,576 bytes each)."""
    tmp_mb: int = Field(default=64, ge=1, le=100_000)
    """Size of the private temporary folder in MiB (1,048,576 bytes each)."""
    max_output_bytes: int = Field(default=65536, ge=1024, le=100_000_000)
    """Bytes of standard output, and of standard error, after which a call is ended."""
    max_result_chars: int = Field(default=4000, ge=200)
    """Characters of the text that the model reads; the middle of a longer text is left out."""
