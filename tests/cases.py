"""Run one test on many values: ``@for_each(op=["sum", "max"], count=[0, 7])`` above a test with these arguments.

All cases run as one test, and the test reports every case that fails. Below ``@on_ranks`` they run in one world.
"""

import functools
import inspect
import itertools
import traceback

import pytest


def for_each(**values):
    """Run a test once for each combination of these values, the last name varying fastest."""
    cases = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]

    def decorate(body):
        @functools.wraps(body)
        def test(**fixtures):
            run_cases(cases, lambda case: body(**fixtures, **case))

        test.__signature__ = without(inspect.signature(body), values)
        test.body, test.cases = body, cases
        return test

    return decorate


def without(signature: inspect.Signature, names) -> inspect.Signature:
    """The signature without these parameters; the others are fixtures."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    left = [parameter.replace(kind=keyword) for name, parameter in signature.parameters.items() if name not in names]
    return signature.replace(parameters=left)


def run_cases(cases: list[dict], run) -> None:
    """Call ``run(case)`` for each case; fail with the values and the traceback of every case that failed."""
    failed = []
    for case in cases:
        try:
            run(case)
        except pytest.fail.Exception as failure:
            failed.append((case, failure.msg))
        except Exception:
            failed.append((case, traceback.format_exc()))
    if failed:
        said = [f"{', '.join(f'{name}={value!r}' for name, value in case.items())}\n{why}" for case, why in failed]
        pytest.fail("\n".join([f"{len(failed)} of {len(cases)} cases failed:", *said]), pytrace=False)
