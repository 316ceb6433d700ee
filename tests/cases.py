"""Run one test on many values: ``@for_each(op=["sum", "max"], count=[0, 7])`` above a test with these arguments.

All cases run as one test, and the test reports every case that fails. Below ``@on_ranks`` they run in one world.
"""

import functools
import inspect
import itertools
import os
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtlib.errors import DtlibError

MOST_FAILURES = 5


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
    """Call ``run(case)`` for each case; fail with the values and the traceback of every case that failed.

    The fifth failure ends the test: in a world of ranks each may be a hang.
    """
    failed = []
    for at, case in enumerate(cases):
        if len(failed) == MOST_FAILURES:
            failed.append((case, f"this case and {len(cases) - at - 1} others were not run"))
            break
        try:
            run(case)
        except pytest.fail.Exception as failure:
            failed.append((case, failure.msg))
        except Exception:
            failed.append((case, traceback.format_exc()))
    if failed:
        said = [f"{', '.join(f'{name}={value!r}' for name, value in case.items())}\n{why}" for case, why in failed]
        pytest.fail("\n".join([f"{len(failed)} of {len(cases)} cases failed:", *said]), pytrace=False)


@contextmanager
def all_cases():
    """Run many cases in one test: ``with all_cases() as case``, and in it ``with case(name)`` for each of them.

    At the end the test fails with the names of all cases that failed. Another error than a failed assertion ends the
    loop, because ranks may be out of step after it; the report has the cases that failed before."""
    failed = []

    @contextmanager
    def case(*name):
        try:
            yield
        except (AssertionError, pytest.fail.Exception) as error:
            failed.append(f"{' '.join(map(str, name))}: {error}")
        except Exception:
            failed.append(f"{' '.join(map(str, name))} ended the loop")
            raise

    try:
        yield case
    except Exception as error:
        raise AssertionError("\n".join([*failed, repr(error)])) from error
    assert not failed, f"{len(failed)} cases failed\n" + "\n".join(failed)


def in_processes(values, run) -> list[int]:
    """The exit statuses of forked processes that do ``run(value)`` at once: what it returns, 1 for an error."""
    children = []
    for value in values:
        child = os.fork()
        if not child:
            status = 1
            try:
                status = int(run(value) or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def broken_modules(module, mistakes: dict):
    """For each ``mistake: (right, wrong, what is kept)`` its name, the names of the module with it, and the last."""
    source = Path(module.__file__).read_text()
    for mistake, (right, wrong, kept) in mistakes.items():
        assert source.count(right) == 1, right
        broken = {"__name__": "broken"}
        exec(compile(source.replace(right, wrong), mistake, "exec"), broken)
        yield mistake, broken, kept


def refuses(words: str, call, *arguments, error=DtlibError, **settings) -> None:
    """``call`` raises a DtlibError whose message has ``words``."""
    with pytest.raises(error, match=words):
        call(*arguments, **settings)
