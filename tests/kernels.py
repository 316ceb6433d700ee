"""Notebooks without a browser: a Jupyter kernel, and what its cells print."""

import os
import re
import signal
import uuid
from pathlib import Path

from jupyter_client import KernelManager
from jupyter_core.paths import jupyter_runtime_dir

from dtlib.lab.server import transport

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Notebook:
    """A kernel that works in ``folder`` and believes that it belongs to the notebook ``name``."""

    def __init__(self, folder, name="lesson.ipynb"):
        folder_of_files = Path(jupyter_runtime_dir())  # as JupyterLab has it
        folder_of_files.mkdir(parents=True, exist_ok=True, mode=0o700)
        connection = f"{folder_of_files}/kernel-{uuid.uuid4()}.json"
        self._manager = KernelManager(kernel_name="python3", transport=transport(), connection_file=connection)
        self._manager.start_kernel(cwd=str(folder), env={**os.environ, "JPY_SESSION_NAME": name})
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def run(self, code: str, timeout: float = 60) -> str:
        """Run a cell and return all that it shows in the end as plain text, errors included.

        ``self.live`` lists what displays showed meanwhile, ``self.number`` is the cell's number.
        """
        shown, self.live = [], []
        cleared = False

        def keep(message):
            nonlocal cleared
            content = message["content"]
            if message["msg_type"] == "clear_output":
                cleared = True
                return
            if cleared and message["msg_type"] in ("stream", "display_data", "execute_result", "error"):
                shown.clear()
                cleared = False
            if message["msg_type"] in ("display_data", "update_display_data"):
                self.live.append(_COLOUR.sub("", content["data"].get("text/plain", "")))
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.append(content["data"].get("text/plain", "") + "\n")
            elif message["msg_type"] == "error":
                shown.append("\n".join(content["traceback"]) + "\n")

        reply = self._client.execute_interactive(code, output_hook=keep, timeout=timeout)
        self.number = reply["content"]["execution_count"]
        return _COLOUR.sub("", "".join(shown))

    def send(self, code: str) -> None:
        """Start a cell without waiting for it."""
        self._client.execute(code)

    def complete(self, code: str) -> list[str]:
        """What Tab offers at the end of this code."""
        return self._client.complete(code, reply=True, timeout=30)["content"]["matches"]

    def inspect(self, code: str) -> str:
        """What Shift+Tab shows at the end of this code."""
        return self._client.inspect(code, reply=True, timeout=30)["content"]["data"].get("text/plain", "")

    @property
    def pid(self) -> int:
        return self._manager.provisioner.pid

    def stop_button(self) -> None:
        """What JupyterLab's Stop button does."""
        self._manager.interrupt_kernel()

    def kill(self) -> None:
        """End the kernel as `kill -9` does."""
        os.kill(self.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
