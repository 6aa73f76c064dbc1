"""A pytest plugin that reports every test as a line of JSON, for gpu_check.py.

Lines begin with ``@json``: the collected tests, then the start and the end of each, so that a test
that ends or hangs the process is known by name. A CUDA fault stays in its process and fails every
later test there, so the session stops after the first one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

FAULT = re.compile(
    r"CUDA error|illegal memory access|unspecified launch failure|device-side assert|"
    r"misaligned address"
)


class Outcomes:
    """Writes the lines.

    Args:
        config: pytest's configuration, for its terminal.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._session: pytest.Session | None = None
        self._reports: list[pytest.TestReport] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Report the tests that will run, in order."""
        self._session = session
        self._write(event="collected", tests=[item.nodeid for item in session.items])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Report the start of a test, and its end from the outcomes of its phases."""
        self._reports = []
        self._write(event="start", test=item.nodeid)
        result = yield
        bad = [report for report in self._reports if report.failed]
        skipped = any(report.skipped for report in self._reports)
        text = bad[0].longreprtext if bad else ""
        self._write(
            event="end",
            test=item.nodeid,
            outcome="failed" if bad else "skipped" if skipped else "passed",
            seconds=round(sum(report.duration for report in self._reports), 2),
            **({"text": text[-2000:]} if bad else {}),
        )
        if FAULT.search(text) and self._session is not None:
            self._session.shouldstop = "a CUDA fault"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the phases of a test."""
        self._reports.append(report)

    def _write(self, **event: Any) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        terminal.write_line("@json " + json.dumps(event))
        terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter."""
    config.pluginmanager.register(Outcomes(config))
