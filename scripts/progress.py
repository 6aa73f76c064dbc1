#!/usr/bin/env python3
"""Run a command of the build with one line of progress and its output in a log.

    scripts/progress.py TITLE LOG COMMAND...

Counts the steps of Ninja and CTest, repeats what CMake left out, and prints the end of the log if
the command fails. Needs only the standard library: it runs before anything is installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

STEP = re.compile(r"(\d+)/(\d+)\]? (?:Building|Linking|Test )")
NOTICE = re.compile(r"(CUDA kernels left out.*)")
LINES_OF_FAILURE = 60


def main() -> int:
    """Return the command's exit status."""
    title, log, *command = sys.argv[1:]
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    live = sys.stdout.isatty()
    start = time.monotonic()
    print(f"{title} ...", end="" if live else "\n", flush=True)
    count, notices = "", []
    with path.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            file.flush()
            if match := NOTICE.search(line):
                notices.append(match[1])
            if match := STEP.search(line):
                done, total = int(match[1]), int(match[2])
                count = f", {total} steps"
                if live:
                    print(f"\r{title} ... {done} of {total}", end="", flush=True)
                elif done % max(1, total // 5) == 0 and done < total:
                    print(f"  {done} of {total}", flush=True)
    status = process.wait()
    seconds = time.monotonic() - start
    if status != 0:
        tail = path.read_text(errors="replace").splitlines()[-LINES_OF_FAILURE:]
        print(f"\n{title}: failed with status {status}; the end of {path}:", *tail, sep="\n")
        return status
    print(("\r" if live else "") + f"{title}: {seconds:.0f} s{count}")
    for notice in notices:
        print(f"  {notice}")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:  # the command has received the signal, too
        raise SystemExit(130) from None
