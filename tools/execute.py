"""Run a notebook from a fresh kernel, always with the same environment."""

import asyncio
import os
from pathlib import Path
from subprocess import DEVNULL

from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

from tools.normalise import scrub

CELL_SECONDS = 120
# One thread and a fixed hash seed, so that last digits and set order repeat.
KERNEL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "COLUMNS": "80",
}


def kernel_environment() -> dict[str, str]:
    """Return this process's environment for a kernel; figures stay inline."""
    environment = {**os.environ, **KERNEL_ENVIRONMENT}
    environment.pop("MPLBACKEND", None)
    return environment


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in place; a failure is a RuntimeError that names the cell and the error."""
    running = {"id": "none: the kernel did not start"}
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=lambda cell, cell_index: running.update(id=cell.id),
    )
    # A manager given to the constructor would be left running at the end.
    client.km = _own_kernel()
    try:
        # The kernel's own stderr holds only notices such as "running over TCP".
        asyncio.run(client.async_execute(env=kernel_environment(), stderr=DEVNULL))
    except CellTimeoutError:
        raise RuntimeError(f"cell {running['id']}: still running after {CELL_SECONDS} s.") from None
    except DeadKernelError:
        raise RuntimeError(f"cell {running['id']}: the kernel died in it.") from None
    except Exception as error:
        raise RuntimeError(f"cell {running['id']}: {scrub(str(error))}") from error


def _own_kernel() -> AsyncKernelManager:
    # With no folders to search, "python3" is the Python of this process, whatever is registered.
    specs = KernelSpecManager()
    specs.kernel_dirs = []
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
