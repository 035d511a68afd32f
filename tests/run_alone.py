"""Runs the tests again that have failed, one at a time.

The long tests run eight at a time, and each of them starts servers and worker processes. Some of them wait for a time
that a busy machine exceeds. A test that fails beside other tests and passes alone does not fail ``make test-long``, but
its name is printed, because the cause may also be a race in multiq.

Usage: ``run_alone.py CODE``. *CODE* is the exit code of the pytest that has run all tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
FAILED = 1  # the exit code of pytest if tests have failed
MOST = 5  # if more tests have failed, the machine's load is not the cause


def main(code: int) -> int:
    if code != FAILED:
        return code
    failed = sorted(json.loads(LAST_FAILED.read_text()))
    if not 0 < len(failed) <= MOST:
        print(f"{len(failed)} tests have failed: more than {MOST} are not run again")
        return code
    print("\nThese tests have failed beside other tests, and run again alone:", *failed, sep="\n  ", flush=True)
    # alone, the row of a test with the mark one_row is its first row, which is not long
    alone = [
        subprocess.run([sys.executable, "-m", "pytest", "-m", "long or not long", test], check=False) for test in failed
    ]
    passed = [test for test, done in zip(failed, alone, strict=True) if done.returncode == 0]
    if passed:
        print("\nfailed beside other tests, passed alone:", *passed, sep="\n  ")
    return 0 if len(passed) == len(failed) else FAILED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
