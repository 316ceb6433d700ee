"""A plugin of pytest: the run ends with its skipped tests by reason, each test with its number of cases."""

from collections import Counter, defaultdict


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.stats.get("skipped", [])
    if not reports:
        return
    by_reason = defaultdict(Counter)
    for report in reports:
        _, _, reason = report.longrepr
        by_reason[reason.removeprefix("Skipped: ")][report.nodeid.partition("[")[0]] += 1
    terminalreporter.section(f"{len(reports)} skipped")
    for reason, tests in sorted(by_reason.items()):
        terminalreporter.line(f"{sum(tests.values())} skipped: {reason}")
        for test, cases in tests.items():
            terminalreporter.line(f"    {test}" + f"  ({cases} cases)" * (cases > 1))
