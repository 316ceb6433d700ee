"""The wall: every learner is shown for what he is, nothing is sent that should not be, and whatever happens to it, no
learner notices."""

import errno
import getpass
import http.server
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError

import pytest

from dtlib.cli import main
from dtlib.lab.checks import judging, quiz
from dtlib.lab.checks.predictions import predict
from dtlib.lab.checks.verdict import Verdict
from dtlib.lab.engines.live_view import LiveView
from dtlib.wall import learner_state, room, secrets_file, server
from dtlib.wall import notebook as reports
from tests.cases import refuses
from tests.conftest import ROOT, make_workshop, wait_until
from tests.test_browser import CONTRAST, SCREENSHOTS, browser  # noqa: F401
from tests.test_engines import ENGINES, opened_in

SCRIPT = "<script>bad=1</script>"


class Wall:
    """``dtlib wall`` in a process of its own, in which this code runs ``before``."""

    def __init__(self, folder, before="", opens=False):
        self.folder, self.before, self.opens = folder, before, opens
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        words = ["wall", "--host=127.0.0.1", f"--port={self.port}"]
        words += ["--no-browser"] * (not self.opens)
        program = f"{self.before}import sys; from dtlib.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", program, *words]
        environment = {**os.environ, "JUPYTER_DATA_DIR": str(self.folder)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        said = "".join(self.process.stdout.readline() for _ in range(3))
        self.code, self.page = re.search(r"(\w+)@127", said)[1], re.search(r"http://\S+#\S+", said)[0]

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        self.process.stdout.close()
        return self.process.wait(30)

    def ask(self, what, body, token=""):
        return reports._asked(self.address, what, body, token)

    def token(self):
        return self.ask("join", {"code": self.code})["token"]

    def room(self):
        connection = HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/room", headers={"Authorization": f"Bearer {self.page.partition('#')[2]}"})
        return json.loads(connection.getresponse().read())

    def kinds(self):
        return {tile["alias"]: tile["kind"] for tile in self.room()["tiles"]}

    def status(self, what, body, token="", **headers):
        """What a request is answered with; 0 where the connection is closed."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("POST", f"/{what}", body, {"Authorization": f"Bearer {token}", **headers})
            return connection.getresponse().status
        except ConnectionError:
            return 0


@pytest.fixture
def wall(tmp_path, request):
    wall = Wall(tmp_path / "wall", getattr(request, "param", ""))
    yield wall
    if wall.process.poll() is None:
        assert wall.end() == 0


@pytest.fixture
def learner(tmp_path, monkeypatch):
    """A learner's folder; what is reported here is his."""
    monkeypatch.chdir(make_workshop(tmp_path / "learner"))
    monkeypatch.setattr(reports, "_beats", False)
    yield tmp_path / "learner"
    reports.leave(quietly=True)
    if reports._thread is not None:
        reports._thread.join(30)


class Learner:
    """As much of a learner as a wall sees: what happened to him, a while ago."""

    def __init__(self, alias, ago=5):
        self.state = {"alias": alias, "last": time.time() - ago}

    def did(self, ago, kind, **fields):
        learner_state.applied(self.state, time.time() - ago, kind, fields, os.getpid())
        return self

    def message(self):
        return learner_state.message(self.state, time.time())


RING = "03_collectives_exercises-12"  # the cell in which ring-build is written


def thirty():
    """Five who hang, three with wrong answers, two idle; twenty who work or are done."""
    for number in range(30):
        learner = Learner(f"learner {number}", 600).did(500, "cell", cell=RING).did(490, "ended", fine=True)
        learner.did(450, "guess", name="tree", guess={"messages": 7 + number % 2}, compared=number < 10)
        learner.did(450, "quiz", quiz="03", number=1, letter="abc"[number % 3])
        if number >= 2:
            learner.did(20, "cell", cell=RING)
        if 2 <= number < 7:
            learner.did(9, "waits", says="ranks 0 and 1 wait for rank 2 (barrier)")
        elif 7 <= number < 10:
            learner.did(8, "verdict", exercise="ring-build", mistake="sent", says="Rank 1: Who sends?")
        elif number >= 20:
            learner.did(8, "verdict", exercise="ring-build", mistake="", says="")
        if number >= 7:
            learner.did(5, "ended", fine=True)
        yield learner


def test_thirty_learners_are_shown_for_what_they_are(wall):
    for learner in thirty():
        wall.ask("tell", learner.message(), wall.token())
    seen = wall.room()
    kinds = ["idle"] * 2 + ["stuck"] * 5 + ["wrong"] * 3 + ["works"] * 10 + ["done"] * 10
    assert wall.kinds() == {f"learner {number}": kind for number, kind in enumerate(kinds)}
    says = {tile["kind"]: tile["says"] for tile in seen["tiles"]}
    assert says == {
        "idle": "", "stuck": "ranks 0 and 1 wait for rank 2 (barrier)", "wrong": "Rank 1: Who sends?",
        "works": "", "done": "",
    }  # fmt: skip
    where = ["03 Collectives: exercises", "Build: an all-reduce of your own", "ring-build"]
    assert all(tile["place"] == where and tile["passed"] == (tile["kind"] == "done") for tile in seen["tiles"])
    ((exercise, seconds, people),) = seen["times"]
    assert (exercise, people) == ("ring-build", 30) and seconds >= 28 * (10 + 300 + 15) + 2 * 310
    assert seen["wrong"] == [["ring-build", "Rank 1: Who sends?", 3]]
    assert seen["guesses"] == {
        "name": "tree", "compared": 10, "of": 30, "bars": {"tree: messages": [["7", 15], ["8", 15]]},
    }  # fmt: skip
    assert seen["quiz"]["name"] == "03, question 2"
    assert [number for _, number in seen["quiz"]["options"]][:3] == [10, 10, 10]


def test_a_learner_s_state_follows_what_happens():
    learner = Learner("a", 100)
    kind = lambda: learner.message()["kind"]  # noqa: E731
    learner.did(90, "verdict", exercise="ring-build", mistake="sent", says="Who sends?")
    learner.did(80, "cell", cell=RING).did(79, "ended", fine=True)
    assert kind() == "wrong", "as long as he works at it"
    learner.did(78, "cell", cell="03_collectives_exercises-17")
    assert kind() == "works" and learner.message()["place"][2] == "hangs"
    learner.did(70, "waits", says="rank 0 waits for rank 1 (recv)")
    assert (kind(), learner.message()["for"]) == ("stuck", 70)
    learner.did(69, "waits", says="ranks 0 and 2 wait for rank 1 (recv)")
    assert learner.message()["for"] == 70, "it is the same wait"
    learner.did(60, "ended", fine=False)
    assert kind() == "stuck", "Stop does not tell why"
    learner.did(59, "cell", cell=None).did(58, "waits", says="x").did(57, "waits", says="")
    assert kind() == "works"
    learner.did(50, "waits", says="x").did(49, "ended", fine=True)
    assert kind() == "works"
    learner.did(48, "waits", says="x").did(47, "started")
    assert kind() == "works", "the kernel was started anew"
    learner.did(40, "guess", name="n", guess=3, compared=False).did(39, "guess", name="n", guess=4, compared=True)
    learner.did(38, "guess", name="n", guess=5, compared=True).did(37, "guess", name="n", guess=None, compared=True)
    assert learner.message()["guesses"] == {"n": [4, True, 39]}, "after the outcome there is no guess any more"
    learner.did(30, "quiz", quiz="03", number=0, letter="b").did(29, "quiz", quiz="03", number=0, letter="a")
    assert learner.message()["quizzes"] == {"03/0": ["b", 30]}
    for number in range(learner_state.MOST + 50):
        learner.did(20, "guess", name=f"{number}", guess="long" * 99, compared=True)
    assert len(json.dumps(learner.message())) < server.MOST_BYTES
    assert room.checked(json.loads(json.dumps(learner.message()))) == learner.message()


def test_histograms_group_neighbours_and_take_words():
    assert room.histogram([3, 3, 1.5, "rows"]) == [["1.5", 1], ["3", 2], ["rows", 1]]
    bars = room.histogram([*range(17), 10**9])
    assert len(bars) <= room.MOST_BARS and sum(number for _, number in bars) == 18
    assert bars[0] == ["0 to 2", 3] and bars[-1] == ["15 to 1,000,000,000", 3]


def test_killed_and_started_again_nobody_notices(wall, learner, monkeypatch, capsys):
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", 0.2)
    monkeypatch.setattr(reports, "BETWEEN_SECONDS", 0.05)
    others = [(each, wall.token()) for each in thirty()]
    reports.join(f"{wall.code}@127.0.0.1:{wall.port}", "heron")
    monkeypatch.setattr(reports, "_beats", True)
    reports.report("verdict", exercise="ring-build", mistake="sent", says="Who sends?")
    wait_until(lambda: wall.kinds() == {"heron": "wrong"})
    before = wall.code, wall.page
    wall.end(signal.SIGKILL)
    capsys.readouterr()
    reports.report("verdict", exercise="ring-build", mistake="", says="")
    wall.start()
    assert (wall.code, wall.page) == before
    for each, token in others:
        wall.ask("tell", each.message(), token)
    wait_until(lambda: wall.kinds().get("heron") == "done")
    assert len(wall.room()["tiles"]) == 31
    assert not any(capsys.readouterr())
    path = wall.folder / "dtlib-wall" / f"{wall.port}.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    reports.leave()
    assert "heron" not in wall.kinds() and len(wall.room()["tiles"]) == 30
    assert not (learner / reports.FILE).exists()


@contextmanager
def spy():
    """A server that takes everybody, and the requests that it gets."""
    got = []

    class Spy(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, dict(self.headers), body.decode()))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"token": "t"}')

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Spy) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield served.server_address[1], got
        finally:
            served.shutdown()
            thread.join()


def test_nothing_is_sent_before_joining_and_neither_names_nor_code_after(learner, monkeypatch, capsys):
    def hangs():
        """What reports, with code, values and paths in what the learner reads himself."""
        waits = ["all_reduce(sum)", [2]]
        view = LiveView(alone=True)
        report = {"waiting": "rank 2 is in `line 3: my_code()`", "line": "line 3: my_code()", "waits": waits}
        view.show([0, 1, 2], [True] * 3, [""] * 3, [report, report, {"line": "my_code()"}])

    def works():
        hints = (f"It happens in line 4, `my_code({learner})`.", "Call it.")
        verdict = Verdict("ring-build", "def my_code():", 3, 1, "raised", "no error", "KeyError: 'my_code'", hints)
        judging._show_verdict(verdict)
        predict("tree-broadcast", {"messages": 7, "rounds": 3})
        quiz.quiz("03", "a" * len(quiz.quizzes()["03"].questions))

    monkeypatch.setattr(reports, "BETWEEN_SECONDS", 0.05)
    monkeypatch.setattr(quiz, "_first", {})
    threads = threading.active_count()
    with spy() as (port, got):
        hangs()
        works()
        assert not got and threading.active_count() == threads + 1, "the spy's thread alone"
        reports.join(f"ABCDEF@127.0.0.1:{port}", "heron")
        said = " ".join(capsys.readouterr().out.split())
        assert "until lab.leave()" in said.lower() and "no name, code or output" in said.lower()
        hangs()
        wait_until(lambda: any("ranks 0 and 1 wait for rank 2 (all_reduce(sum))" in body for _, _, body in got))
        works()
        wait_until(lambda: any('"03/0"' in body for _, _, body in got))
        last = json.loads(got[-1][2])
        assert (last["says"], last["kind"]) == ("Rank 1: KeyError was raised.", "wrong")
        guesses = {name: [guess, compared] for name, (guess, compared, _) in last["guesses"].items()}
        assert guesses == {"tree-broadcast: messages": [7, True], "tree-broadcast: rounds": [3, True]}
        everything = repr(got)
        for private in ("my_code", str(learner), socket.gethostname(), f"/{getpass.getuser()}"):
            assert private not in everything
        reports.leave()
        reports._thread.join(30)
        count = len(got)
        works()
        assert got[-1][0] == "/leave" and len(got) == count
        assert not reports._thread.is_alive()


def test_events_that_cannot_be_written_are_sent_later(learner, monkeypatch):
    """A disk that is full once."""
    written, real = [], reports._write

    def write(note):
        written.append(note["state"])
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(note)

    monkeypatch.setattr(reports, "BETWEEN_SECONDS", 0.05)
    monkeypatch.setattr(reports, "HEARTBEAT_SECONDS", 0.2)
    with spy() as (port, got):
        reports.join(f"ABCDEF@127.0.0.1:{port}", "heron")
        reports._thread.join(30)
        monkeypatch.setattr(reports, "_write", write)
        reports.report("verdict", exercise="ring-build", mistake="sent", says="Who sends?")
        reports._thread.join(30)
        assert len(written) == 2 and json.loads(got[-1][2])["says"] == "Who sends?"


def test_who_joined_yesterday_has_left(learner):
    with spy() as (port, got):
        reports.join(f"ABCDEF@127.0.0.1:{port}", "heron")
        reports._thread.join(30)
        note = json.loads((learner / reports.FILE).read_text())
        (learner / reports.FILE).write_text(json.dumps({**note, "joined": time.time() - reports.JOINED_SECONDS - 1}))
        count = len(got)
        reports.report("started")
        reports._thread.join(30)
        assert len(got) == count and not (learner / reports.FILE).exists()


@pytest.mark.parametrize(
    "where,alias,words",
    [
        ("ABCDEF", "heron", "CODE@ADDRESS"),
        ("ABCDEF@file:///etc", "heron", "CODE@ADDRESS"),
        ("ABCDEF@127.0.0.1:9", "", "1 to 24 letters"),
        ("ABCDEF@127.0.0.1:9", "x" * 25, "1 to 24 letters"),
        ("ABCDEF@127.0.0.1:9", "a\u202eb", "1 to 24 letters"),
        ("ABCDEF@127.0.0.1:9", "heron", "No wall answers at http://127.0.0.1:9"),
        ("ABCDEF@127.0.0.1:99999", "heron", "No wall answers at http://127.0.0.1:99999"),
    ],
)
def test_what_cannot_be_joined_is_refused_with_a_sentence(learner, where, alias, words):
    refuses(re.escape(words), reports.join, where, alias)
    assert not (learner / reports.FILE).exists()


def test_forged_flooded_and_malformed(wall):
    token, other = wall.token(), wall.token()
    wall.ask("tell", Learner("heron").message(), token)
    number, _, seal = token.partition(".")
    others = f"{other.partition('.')[0]}.{seal}"
    for forged in ("", "x", number, f"{number}.", f"{number}.{'0' * 64}", others, "\xe9.x"):
        assert wall.status("tell", Learner("forged").message(), forged) == 403
        assert wall.status("leave", {}, forged) == 403
    good = Learner("bad").message()
    wrong = [
        b"{", b"[]", b"[" * 9999, b"", b'{"kind": NaN}', {**good, "kind": "away"}, {**good, "alias": 5},
        {**good, "for": -1}, {**good, "for": float("nan")}, {**good, "spent": []}, {**good, "wrong": {"a": []}},
        {**good, "guesses": {"a": [{}, True, 0]}}, {**good, "place": ["x"]},
        {**good, "guesses": {"a": [float("inf"), True, 0]}}, {**good, "guesses": {"a": [1, True]}},
        {**good, "guesses": {"a": [1, True, -1]}}, {**good, "quizzes": {"03/0": "b"}},
    ]  # fmt: skip
    assert {wall.status("tell", body, other) for body in wrong} <= {400, 429}
    assert wall.status("tell", b" " * (server.MOST_BYTES + 1), other) in (0, 400, 413)
    assert {wall.status("join", {"code": "WRONG2"}) for _ in range(100)} == {403}
    assert wall.status("join", {"code": wall.code}) == 200, "others of this address do not wait for who guesses codes"
    assert len(wall.code) == 8, "and who guesses 2,000 a second takes years"
    flood = [wall.status("tell", Learner("flood").message(), other) for _ in range(60)]
    assert flood.count(200) <= server.BURST["tell"] + 30 and 429 in flood
    wall.ask("tell", Learner("heron").did(5, "waits", says="x").message(), token)
    assert wall.kinds() == {"heron": "stuck", "flood": "works"}
    wall.ask("leave", {}, token)
    with pytest.raises(HTTPError, match="410"):  # a message that was on its way
        wall.ask("tell", Learner("heron").message(), token)


def test_who_connects_and_says_nothing_fills_no_wall(wall):
    token, silent = wall.token(), []
    for _ in range(server.MOST_CONNECTIONS + 20):
        silent.append(socket.create_connection(("127.0.0.1", wall.port)))
        if len(silent) % 100 == 0:
            assert wall.status("tell", Learner("heron").message(), token) == 200
    assert wall.status("join", {"code": wall.code}) == 200 and wall.kinds() == {"heron": "works"}
    silent[0].settimeout(60)
    assert silent[0].recv(1) == b"", "the oldest has made room for a new one"
    for each in silent:
        each.close()


def test_many_connections_of_one_address_close_none_of_another():
    class Stream:
        open = True

        def close(self):
            self.open = False

        def closed(self):
            return not self.open

    taken, others = server.Connections(), Stream()
    taken.register(others, "10.0.0.1")
    silent = [Stream() for _ in range(2 * server.MOST_CONNECTIONS)]
    for each in silent:
        taken.register(each, "10.0.0.2")
    assert others.open and [each.open for each in silent] == sorted(each.open for each in silent)
    assert sum(each.open for each in silent) == server.MOST_CONNECTIONS - 1


def test_other_users_of_the_machine_do_not_see_the_key(tmp_path):
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"  # noqa: F811
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}.part && mv {seen}.part {seen}\n')
    browser.chmod(0o700)
    wall = Wall(tmp_path / "wall", f"import os; os.environ['BROWSER'] = '{browser} %s'; ", opens=True)
    wait_until(seen.exists)
    arguments, key = seen.read_text(), wall.page.partition("#")[2]
    shown = Path(arguments.strip().removeprefix("file://"))
    assert key not in arguments and key in shown.read_text() and f'url={wall.page}"' in shown.read_text()
    assert shown.stat().st_mode & 0o777 == 0o600 and shown.parent.stat().st_mode & 0o777 == 0o700
    assert wall.end() == 0 and not shown.exists()


def test_invented_names_are_forgotten():
    here, sizes = room.Room(), []
    for minute in range(6):
        for number in range(30):
            message = Learner(f"{number}").message()
            message["guesses"] = {f"guess {number} {minute} {n}": [1, False, 0] for n in range(learner_state.MOST)}
            here.tell(f"{number}", room.checked(message), minute)
            for gone in range(100):
                here.tell(f"{minute} {number} {gone}", message, minute)
                here.leave(f"{minute} {number} {gone}")
        sizes.append(len(pickle.dumps(vars(here))))
    assert sizes[-1] < 1.1 * sizes[1]
    assert re.match(r"guess \d+ 5 ", here.shown(6)["guesses"]["name"]), "what was asked last is shown"


def test_the_question_that_was_answered_last_is_shown():
    here = room.Room()
    asked = [("tree", 90), ("ring", 10), ("tree", 80)]
    for number, (name, ago) in enumerate(asked):
        learner = Learner(f"{number}", 100).did(ago, "guess", name=name, guess={"n": 1}, compared=False)
        learner.did(ago, "quiz", quiz="03", number=int(name == "ring"), letter="a")
        here.tell(f"{number}", room.checked(learner.message()), time.time())
    shown = here.shown(time.time())
    assert (shown["guesses"]["name"], shown["quiz"]["name"]) == ("ring", "03, question 2")


def test_a_room_has_an_end_and_who_is_gone_leaves_it():
    here, message = room.Room(), room.checked(Learner("a").message())
    told = [here.tell(f"{number}", message, 0) for number in range(room.MOST_LEARNERS + 1)]
    assert told == [True] * room.MOST_LEARNERS + [False]
    assert {tile["kind"] for tile in here.shown(room.AWAY_SECONDS + 1)["tiles"]} == {"away"}
    assert here.tell("new", message, room.GONE_SECONDS + 1) and len(here.learners) == 1


def test_a_wall_that_ends_keeps_its_codes_alone(tmp_path, capsys):
    wall = Wall(tmp_path / "wall")
    wall.ask("tell", Learner("heron").message(), wall.token())
    code = wall.code
    assert wall.end() == 0 and b"heron" not in b"".join(path.read_bytes() for path in tmp_path.glob("**/*.json"))
    wall.start()
    assert wall.code == code and not wall.kinds()
    assert main(["wall", "--host=127.0.0.1", f"--port={wall.port}", "--no-browser"]) == 2
    assert "cannot be listened on" in capsys.readouterr().err
    assert main(["wall", "--host=no..name", "--port=0", "--no-browser"]) == 2
    assert "no..name:0 cannot be listened on" in capsys.readouterr().err
    assert wall.end() == 0


@pytest.mark.parametrize("codes", [b"", b"[]", b"3", b"null", b"{}", b"[" * 10**5, b"\xff", b"1" * 5000, "pipe",
    b'{"made": 1e18}', b'{"made": "now"}', b'{"made": NaN}', b'{"made": 1%s}' % (b"0" * 400),
    b'{"made": NOW, "code": 3, "key": "k", "secret": "s"}', b'{"made": NOW, "key": "k", "secret": "s"}',
    b'{"made": NOW, "code": "c", "key": [], "secret": "s"}',
])  # fmt: skip
def test_damaged_codes_are_made_again(codes, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    path = secrets_file.folder() / "8790.json"
    if codes == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(codes.replace(b"NOW", str(time.time()).encode()))
    made = secrets_file.secret_of(8790)
    assert len(made["code"]) == 8 and secrets_file.secret_of(8790) == made


@pytest.mark.parametrize("port", ["-1", "65536", "99999", "1.5", "x", "1" * 400])
def test_a_port_that_there_is_not_is_refused(port, capsys):
    assert main(["wall", f"--port={port}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--port" in said and "0 to 65,535" in said


@pytest.mark.slow
def test_the_page_shows_texts_as_texts_and_can_be_read_from_the_last_row(wall, browser, tmp_path):  # noqa: F811
    tokens = {}
    for learner in thirty():
        tokens[learner.state["alias"]] = wall.token()
        wall.ask("tell", learner.message(), tokens[learner.state["alias"]])
    bad = Learner(SCRIPT).did(
        3, "verdict", exercise="ring-build", mistake="x", says=f"<img src=x onerror=bad=1>{SCRIPT}"
    )
    bad.did(2, "guess", name="<b>bold</b>", guess=SCRIPT, compared=False)
    wall.ask("tell", bad.message(), wall.token())
    page, problems = browser.new_page(viewport={"width": 1920, "height": 1080}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    policy = page.goto(wall.page).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    wait_until(lambda: page.locator("#tiles li").count() == 31)
    assert page.locator("#tiles .wrong", has_text=SCRIPT).count() == 1
    assert not page.evaluate("'bad' in window") and not page.locator("#tiles script, aside b, #tiles img").count()
    assert page.locator("#guesses", has_text=SCRIPT).count() == 1
    shown = [page.locator(f"#tiles .{kind}").count() for kind in ("stuck", "wrong", "idle", "works", "done")]
    assert shown == [5, 4, 2, 10, 10]
    assert wall.code in page.locator("#join").inner_text()
    # All is on the page, nobody has to scroll.
    seen = "[...document.querySelectorAll('#tiles li, aside section')].map(e => e.getBoundingClientRect().bottom)"
    assert max(page.evaluate(seen)) <= 1080
    for theme in ("light", "dark"):
        page.evaluate("theme => document.documentElement.dataset.theme === theme || at('theme').click()", theme)
        looked, low = page.evaluate(CONTRAST.replace(".jp-OutputArea-output, #jp-right-stack", "body"), False)
        assert looked > 30 and not low, (theme, low)
        page.screenshot(path=f"{SCREENSHOTS or tmp_path}/wall-{theme}.png")
    wall.ask("tell", Learner("learner 3").did(1, "cell", cell=RING).message(), tokens["learner 3"])
    wait_until(lambda: page.locator("#tiles .stuck").count() == 4)
    page.goto(wall.page.partition("#")[0] + "#wrong")
    page.reload()
    page.get_by_text("needs the whole address").wait_for()
    assert not page.locator("#tiles li").count() and not problems
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wall", ["from dtlib.wall import room; room.IDLE_SECONDS, room.AWAY_SECONDS = 6, 12; "], indirect=True, ids=["soon"]
)
def test_real_kernels_and_ranks_tell_who_is_stuck_wrong_done_idle_and_away(wall, tmp_path):
    def until(alias, kind):
        wait_until(lambda: wall.kinds().get(alias) == kind)
        return next(tile for tile in wall.room()["tiles"] if tile["alias"] == alias)

    join = f'from dtlib import lab; lab.join("{wall.code}@127.0.0.1:{wall.port}", "{{}}")'
    with opened_in(make_workshop(tmp_path / "a")) as open_a, opened_in(make_workshop(tmp_path / "b")) as open_b:
        heron, fox = open_a(), open_b()
        for notebook, alias in ((heron, "heron"), (fox, "fox")):
            assert f"You are '{alias}' on the wall" in notebook.run(join.format(alias))
            until(alias, "works")
        heron.run(ENGINES.format(3))
        assert until("fox", "idle")["says"] == ""
        assert "Not yet" in fox.run('lab.check("format-budget")')
        assert until("fox", "wrong")["says"].startswith("Define `epoch_seconds`")
        fox.kill()
        heron.run("%px import dtlib, torch; world = dtlib.init()")
        says = "ranks 0 and 1 wait for rank 2 (barrier)"  # as soon as both have waited for long enough
        stops = threading.Thread(target=lambda: (wait_until(lambda: says in str(wall.room())), heron.stop_button()))
        stops.start()
        heron.run("%%px\nworld.comm.barrier()\nif world.rank != 2: world.comm.barrier()")
        stops.join()
        assert until("heron", "stuck")["says"] == says
        heron.run("%px dtlib.reset()")
        until("heron", "works")
        heron.run("%%px\ntotal = torch.tensor(world.rank)")
        assert "Not yet" in heron.run('lab.check("first-sum")')
        tile = until("heron", "wrong")
        assert tile["place"][2] == "first-sum" and "This rank still has its own number" in tile["says"]
        assert "Passed" in heron.run('%px from dtlib import lab; world.comm.all_reduce(total); lab.check("first-sum")')
        assert until("heron", "done")["passed"] == 1
        until("fox", "away")
        heron.run("lab.leave()")
        assert list(wall.kinds()) == ["fox"]


def test_the_guide_says_what_is_sent_and_how_to_leave():
    guide = " ".join((ROOT / "docs" / "how-to" / "see_who_is_stuck.md").read_text().split())
    for word in ("dtlib wall", "lab.join(", "lab.leave()", reports.FILE, "services/wall"):
        assert word in guide, word
    assert secrets_file.SECRET_SECONDS == 24 * 3600 and "for a day" in guide
    assert reports.JOINED_SECONDS == 12 * 3600 and "twelve hours" in guide
