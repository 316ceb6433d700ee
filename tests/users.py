"""Users of their own on the hosts of tests/hosts.py, with homes and a /tmp that nobody else sees. Needs root.

They stand in copies of /etc/passwd, /etc/group and /etc/shadow, which the hosts alone have: nothing is left of them.
Programs of this environment run there, even where it lies in a folder that only root may enter.
"""

import os
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.hosts import Hosts

FIRST_ID = 61_001
PASSWORD = "four-ranks"
HASHED = "$6$dtlib$1zSv/EwrQ2Ky7RXbJVfu9DOxg.pJhS0nOtLPWNEMv0fzz.W6rBfTXvMtPjANxPErgSf5BnIaGogk8Ftkw98.s1"
OTHERS_MAY_ENTER = 0o001
TMP = Path("/tmp")


class Users:
    """``users = Users(hosts, "ada", "bob"); hosts.start("h1", users.as_user("ada", command))``.

    ``exercise_files`` are seen from outside under ``users.home("ada")``.
    """

    def __init__(self, hosts: Hosts, *names: str):
        self.ids = {name: FIRST_ID + at for at, name in enumerate(names)}
        self.tmp, etc = hosts.folder / "tmp", hosts.folder / "etc"
        etc.mkdir()
        self.tmp.mkdir()
        self.tmp.chmod(0o1777)
        lines = {
            "passwd": f"{{name}}:x:{{id}}:{{id}}::{TMP}/home/{{name}}:/bin/bash\n", "group": "{name}:x:{id}:\n",
            "shadow": "{name}:" + HASHED + ":20000:0:99999:7:::\n",
        }  # fmt: skip
        for file, line in lines.items():
            text = Path("/etc", file).read_text()
            (etc / file).write_text(text + "".join(line.format(name=name, id=id) for name, id in self.ids.items()))
        (etc / "shadow").chmod(0o600)
        for name, number in self.ids.items():
            self.home(name).mkdir(parents=True)  # open to others, as Debian's useradd leaves it
            os.chown(self.home(name), number, number)
        for host in hosts.names:
            hosts.run(host, ["sh", "-ec", "\n".join(self._moves(hosts, etc))])

    def home(self, name: str) -> Path:
        return self.tmp / "home" / name

    def as_user(self, name: str, command: list[str], **settings: str) -> list[str]:
        """``command`` as this user runs it in the home folder, with a plain environment and these settings."""
        home, number = f"{TMP}/home/{name}", self.ids[name]
        told = {"HOME": home, "USER": name, "LOGNAME": name, "PATH": os.environ["PATH"], "LANG": "C.UTF-8", **settings}
        become = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups"]
        return [*become, "env", "-i", f"--chdir={home}", *(f"{key}={value}" for key, value in told.items()), *command]

    def _moves(self, hosts: Hosts, etc: Path) -> list[str]:
        """The old tree is kept at /mnt meanwhile: what is needed of folders that are replaced is shown there again."""
        needed = {ROOT, Path(sys.prefix), Path(sys.base_prefix), hosts.folder}
        replaced = {TMP, *filter(None, map(_closed_above, needed - {hosts.folder}))}
        lines = ["mount --rbind / /mnt"]
        for folder in sorted(replaced):
            what = f"--bind /mnt{self.tmp}" if folder == TMP else "-t tmpfs -o mode=755 tmpfs"
            lines.append(f"mount {what} {folder}")
        for path in sorted(needed):
            if any(folder in path.parents for folder in replaced):
                lines += [f"mkdir -p {path}", f"mount --bind /mnt{path} {path}"]
        lines += [f"mount --bind {etc / file} /etc/{file}" for file in ("passwd", "group", "shadow")]
        return [*lines, "umount -l /mnt"]


def _closed_above(path: Path) -> Path | None:
    """The first folder above this one into which only its owner may go."""
    above = reversed(path.parents)
    return next((folder for folder in above if not folder.stat().st_mode & OTHERS_MAY_ENTER), None)
