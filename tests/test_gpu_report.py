import pytest

from benchmarks import gpu_report


def test_what_is_missing_is_named_and_nothing_else_happens(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    monkeypatch.setattr(gpu_report, "graphics_cards", lambda: "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mpi4py" else name)
    monkeypatch.setattr(
        gpu_report, "run", lambda arguments, seconds, env: f"ran {arguments[2]} for {seconds:.0f} seconds"
    )
    assert gpu_report.main() == 0
    page = gpu_report.FILE.read_text()
    assert page.count("Skipped: there is no NVIDIA GPU here.") == 7
    assert "ran strategies for" in page and "has no mpi4py." in page
    assert "| no NVIDIA GPU, torch" in page and "1 of 11 parts; tests: none; not: GPU, driver and NCCL (skipped" in page
    monkeypatch.setattr(gpu_report, "graphics_cards", lambda: "GPU 0: one")
    monkeypatch.setattr(gpu_report, "SECONDS", 0)
    assert gpu_report.main() == 0
    page = gpu_report.FILE.read_text()
    assert "| GPU | GPU 0: one |" in page and page.count("has no mpi4py.") == 9
    assert page.count("Skipped: the other parts took 0 seconds.") == 2


@pytest.mark.parametrize(
    "program, seconds, said",
    [
        ("print('| a |')", 60, "| a |\n\nIn "),
        ("print('words')", 60, "```\nwords\n```"),
        ("raise SystemExit('no such thing')", 60, "Ended with status 1.\n\n```\nno such thing\n```"),
        ("from signal import *; signal(SIGINT, default_int_handler); pause()", 0.5, "Stopped after "),
    ],
)
def test_a_part_prints_or_says_why_not(program, seconds, said):
    assert gpu_report.run(["-c", program], seconds).startswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["collectives", "strategies"])
def test_each_part_runs_on_a_fake_gpu(name):
    """What a part computes and prints, on one rank."""
    program = (
        "import dtlib; from benchmarks import gpu_report; from dtlib.comm import types\n"
        "from tests.fake_gpu import GPU, fake_gpu; types.STAGED = (GPU.type,)\n"
        "world = dtlib.init(); world.__dict__['device'] = GPU\n"
        "gpu_report.REPEATS, gpu_report.WIDTH, gpu_report._device = 1, 8, lambda: GPU\n"
        f"with fake_gpu(): print(gpu_report.{name}(world.comm, world))"
    )
    said = gpu_report.run(["-c", program], 120)
    assert said.startswith("| case |"), said
    words = {"collectives": "Through host memory: torch has no NCCL here.", "strategies": "fakegpu:0 | bare torch"}
    assert words[name] in said


MEMORY = pytest.param("memory 2", "| case | states | formula |", marks=pytest.mark.slow)


@pytest.mark.parametrize("words, begins", [("device", "| what | from |"), MEMORY])
def test_parts_that_need_no_gpu(words, begins):
    said = gpu_report.run([*gpu_report.ME, *words.split()], 120)
    assert said.startswith(begins), said
