import pytest

from benchmarks import gpu_report


def test_what_is_missing_is_named_and_nothing_else_happens(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gpu_report"])
    monkeypatch.setattr(gpu_report, "graphics_cards", lambda: "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mpi4py" else name)
    monkeypatch.setattr(gpu_report, "run", lambda arguments, seconds: f"ran {arguments[2]} for {seconds:.0f} seconds")
    assert gpu_report.main() == 0
    page = gpu_report.FILE.read_text()
    assert page.count("Skipped: there is no NVIDIA GPU here.") == 4
    assert "ran strategies for" in page and "has no mpi4py." in page
    monkeypatch.setattr(gpu_report, "graphics_cards", lambda: "GPU 0: one")
    monkeypatch.setattr(gpu_report, "SECONDS", 0)
    assert gpu_report.main() == 0
    page = gpu_report.FILE.read_text()
    assert "| GPU | GPU 0: one |" in page and page.count("has no mpi4py.") == 5
    assert page.count("Skipped: the other parts took 0 seconds.") == 1


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
