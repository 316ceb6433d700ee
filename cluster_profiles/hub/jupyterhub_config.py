"""A hub on one machine, for people who have an account there: `jupyterhub -f jupyterhub_config.py`, as root.

Each learner's server is `dtlib lab --hub`, a process of that user: the course in ~/course, kernels, ranks. What a site
changes stands in ../site.toml, under [hub]. docs/how-to/run_a_hub.md goes through it step by step.
"""

import importlib.util
import sys
from pathlib import Path
from runpy import run_path

c = get_config()  # noqa: F821
hub = run_path(str(Path(__file__).parents[1] / "render.py"))["read_site"]()["hub"]

c.JupyterHub.bind_url = "http://:8000"  # learners' browsers; docs/how-to/run_a_hub.md says how it becomes https
c.JupyterHub.authenticator_class = "pam"
c.Authenticator.allowed_users = set(hub["learners"])
c.Authenticator.allow_all = not hub["learners"]
c.Authenticator.admin_users = set(hub["teachers"])

c.Spawner.cmd = [str(Path(sys.executable).with_name("dtlib")), "lab", "--hub"]
c.Spawner.environment = {"OMP_NUM_THREADS": "1"}  # a rank's: all learners share the cores
c.Spawner.start_timeout = c.Spawner.http_timeout = 300  # thirty log in at once
c.Spawner.mem_limit, c.Spawner.cpu_limit = hub["memory"], hub["cores"]
if Path("/run/systemd/system").is_dir() and importlib.util.find_spec("systemdspawner"):
    c.JupyterHub.spawner_class = "systemdspawner.SystemdSpawner"
    c.SystemdSpawner.isolate_tmp = True
else:
    c.JupyterHub.spawner_class = "localprocess"
    print(
        "Learners have no limits of memory and cores: these need systemd, and `pip install jupyterhub-systemdspawner`.",
        file=sys.stderr,
    )

c.JupyterHub.load_roles = [
    {
        "name": "culler",
        "services": ["culler"],
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
    }
]
idle = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={60 * hub['idle_minutes']}"]
c.JupyterHub.services = [{"name": "culler", "command": idle}]
if hub["wall"]:  # for teachers, at /services/wall/
    wall = {"name": "wall", "url": "http://127.0.0.1:8790", "user": hub["wall"], "oauth_no_confirm": True}
    wall["command"] = [str(Path(sys.executable).with_name("dtlib")), "wall", "--no-browser"]
    c.JupyterHub.services.append(wall)
