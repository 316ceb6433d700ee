"""A JupyterHub on the hosts of tests/hosts.py, and learners who use it as a browser would, but without one."""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import requests
import websocket

from tests import hosts
from tests.conftest import ROOT
from tests.users import PASSWORD, Users

PROXY = "configurable-http-proxy@5.3.0"
PROXY_FOLDER = ROOT / "build" / "hub"
TOKEN = "0123456789abcdef0123456789abcdef"
SECONDS = 320  # that anything may take on a busy machine; the hub gives a server 300
CLONE_NEWNET = 0x40000000
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# What tests add to the configuration of the course: a service that may start servers and look into them.
CONFIGURATION = """
load_subconfig({name!r}, {folder!r})
c = get_config()
c.JupyterHub.bind_url = "http://{address}:8000"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.JupyterHub.services += [{{"name": "tests", "api_token": {token!r}}}]
scopes = ["admin:users", "admin:servers", "access:servers", "list:users"]
c.JupyterHub.load_roles += [{{"name": "tests", "services": ["tests"], "scopes": scopes}}]
"""


@cache
def missing() -> str:
    """Why there can be no hub here, or ''."""
    if find_spec("jupyterhub") is None or find_spec("batchspawner") is None:
        return "JupyterHub is not installed: pip install 'dtlib[hub]'"
    if not shutil.which("npm"):
        return "npm is missing, which fetches JupyterHub's proxy: install Node.js"
    return hosts.missing()


def proxy() -> Path:
    """npm's configurable-http-proxy, fetched once."""
    program = PROXY_FOLDER / "node_modules" / ".bin" / "configurable-http-proxy"
    if not program.exists():
        PROXY_FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(PROXY_FOLDER), PROXY], check=True
        )
    return program


class Hub:
    """``with Hosts(folder) as machine, Hub(machine, Users(machine, "ada"), ["ada"]) as hub: hub.learner("ada")``.

    ``name`` is the file of cluster_profiles/hub; ``site`` replaces lines of site.toml.
    """

    def __init__(self, machine, users: Users, learners, name="jupyterhub_config.py", site=(), address="127.0.0.1"):
        self.machine, self.users, self.url = machine, users, f"http://{address}:8000"
        self.folder = machine.folder / "hub"
        profiles = self.folder / "cluster_profiles"
        shutil.copytree(ROOT / "cluster_profiles", profiles, ignore=shutil.ignore_patterns("state", "log", "security"))
        text = (profiles / "site.toml").read_text()
        for before, after in (("learners = []", f"learners = {json.dumps(list(learners))}"), *site):
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (profiles / "site.toml").write_text(text)
        told = {"folder": str(profiles / "hub"), "address": address, "token": TOKEN, "proxy": str(proxy())}
        (self.folder / "config.py").write_text(CONFIGURATION.format(name=name, **told))
        self.log = self.folder / "log"
        self.learners = []

    def __enter__(self):
        with open(self.log, "w") as log:
            command = ["env", f"--chdir={self.folder}", sys.executable, "-m", "jupyterhub", "-f", "config.py"]
            self.process = self.machine.start("h1", command, stdout=log, stderr=log)
        self._admin = self.learner("")
        self.wait_until(lambda: self._admin.asks("GET", "/hub/api/").ok)
        return self

    def __exit__(self, *error):
        for learner in self.learners:
            learner.pool.shutdown(cancel_futures=True)
        self.process.terminate()
        self.process.wait(60)

    def wait_until(self, condition, seconds: float = SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except requests.ConnectionError:
                pass
            said = self.log.read_text()[-6000:]
            assert time.monotonic() < deadline and self.process.poll() is None, f"not within {seconds} s\n{said}"
            time.sleep(0.2)

    def learner(self, name: str) -> "Learner":
        self.learners.append(Learner(self, name))
        return self.learners[-1]

    def processes(self, name: str) -> dict[int, str]:
        """Command lines of the processes of a user, on these hosts: users of other tests may have the same number."""
        found, number = {}, self.users.ids[name]
        for process in self.machine.inside():
            path = Path(f"/proc/{process.pid}")
            try:
                if path.stat().st_uid == number:
                    found[process.pid] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found


class Learner:
    """One who logs in, and runs cells. What it does runs in a thread of its own, which is on the hub's host."""

    def __init__(self, hub: Hub, name: str):
        self.hub, self.name, self.web = hub, name, requests.Session()
        self.web.trust_env = False
        network = os.open(f"/proc/{hub.machine.pids['h1']}/ns/net", os.O_RDONLY)
        enter = ctypes.CDLL(None, use_errno=True).setns
        self.pool = ThreadPoolExecutor(1, initializer=lambda: enter(network, CLONE_NEWNET))

    def there(self, function, *arguments, **named):
        return self.pool.submit(function, *arguments, **named).result()

    def asks(self, method: str, where: str, **body):
        """What the hub, or a server, answers to one with a token."""
        head = {"Authorization": f"token {TOKEN}"}
        ask = {"headers": head, "timeout": SECONDS, "allow_redirects": False, **({"json": body} if body else {})}
        return self.there(requests.request, method, self.hub.url + where, **ask)

    def logs_in(self, password: str = PASSWORD) -> requests.Response:
        """With name and password, on the page for it; where they are right, the server is asked for."""
        page = self.there(self.web.get, f"{self.hub.url}/hub/login", timeout=SECONDS)
        form = {"username": self.name, "password": password, "_xsrf": self.web.cookies.get("_xsrf", path="/hub/")}
        answer = self.there(self.web.post, page.url, data=form, timeout=SECONDS)
        return answer

    def is_ready(self) -> bool:
        servers = self.asks("GET", f"/hub/api/users/{self.name}").json().get("servers", {})
        return bool(servers.get("", {}).get("ready"))

    def starts(self) -> "Learner":
        """The server, as a click on the hub's button would."""
        self.asks("POST", f"/hub/api/users/{self.name}")
        answer = self.asks("POST", f"/hub/api/users/{self.name}/server")
        assert answer.status_code in (201, 202) or "already running" in answer.text, answer.text
        self.hub.wait_until(self.is_ready)
        return self

    def stops(self) -> None:
        self.asks("DELETE", f"/hub/api/users/{self.name}/server")

    def opens(self, notebook: str = "notebooks/lectures/00_start_here.ipynb") -> "Learner":
        """A notebook, with its kernel."""
        kernel = {"name": "python3"}
        opened = self.asks(
            "POST", f"/user/{self.name}/api/sessions", path=notebook, name=Path(notebook).name, type="notebook",
            kernel=kernel,
        )  # fmt: skip
        assert opened.status_code == 201, opened.text
        address = (
            f"{self.hub.url.replace('http', 'ws', 1)}/user/{self.name}/api/kernels/{opened.json()['kernel']['id']}"
        )
        head = {"Authorization": f"token {TOKEN}"}
        options = {"header": head, "timeout": SECONDS}
        channels = f"{address}/channels?session_id={uuid.uuid4().hex}"
        self.channels = self.there(websocket.create_connection, channels, **options)
        return self

    def runs(self, code: str) -> str:
        """All that a cell shows in the end, an error too."""
        return COLOUR.sub("", self.there(self._run, code))

    def _run(self, code: str) -> str:
        number, shown = uuid.uuid4().hex, []
        content = {
            "code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
            "stop_on_error": True,
        }  # fmt: skip
        head = {
            "msg_id": number, "msg_type": "execute_request", "username": "", "session": uuid.uuid4().hex,
            "version": "5.3", "date": "",
        }  # fmt: skip
        message = {"header": head, "parent_header": {}, "metadata": {}, "content": content, "buffers": []}
        self.channels.send(json.dumps({**message, "channel": "shell"}))
        self.failed, idle = None, False
        while self.failed is None or not idle:
            said = self.channels.recv()
            if isinstance(said, bytes) or not said:
                continue
            said = json.loads(said)
            kind, content = said["msg_type"], said["content"]
            if said["parent_header"].get("msg_id") != number:
                continue
            if kind == "stream":
                shown.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                shown.append(content["data"].get("text/plain", "") + "\n")
            elif kind == "error":
                shown.append("\n".join(content["traceback"]) + "\n")
            elif kind == "status":
                idle = content["execution_state"] == "idle"
            elif kind == "execute_reply":
                self.failed = content["status"] != "ok"
        return "".join(shown)


def cells(notebook: str) -> list[tuple[str, bool]]:
    """The code cells of a solved notebook, and whether each may fail."""
    found = json.loads((ROOT / "notebooks" / "solutions" / f"{notebook}.ipynb").read_text())["cells"]
    return [
        ("".join(cell["source"]), "raises-exception" in cell["metadata"].get("tags", ()))
        for cell in found if cell["cell_type"] == "code"
    ]  # fmt: skip


def run_through(learner: Learner, notebook: str) -> list[str]:
    """All cells of a lesson, by a learner who has the notebook open; what failed."""
    failed = []
    for code, may_fail in cells(notebook):
        shown = learner.runs(code)
        if learner.failed and not may_fail:
            failed.append(f"{learner.name}, {notebook}: {code[:80]!r}: {shown[-1500:]}")
    return failed
