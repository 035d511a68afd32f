"""The frames that threads execute."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, threading, time
from multiq.driverkit.thread_frames import thread_frames

class Garbage:
    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)  # lets another thread run

def look():
    for _ in range(400):
        Garbage()
        assert threading.get_ident() in thread_frames()

def start():
    for _ in range(400):
        thread = threading.Thread(target=Garbage)
        thread.start()
        thread.join()

gc.set_threshold(1)
threads = [threading.Thread(target=target) for target in (look, look, look, start, start)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(gc.isenabled())
"""


def test_a_thread_that_starts_while_another_reads_the_frames_does_not_hang_the_process() -> None:
    # Given threads that read frames, threads that start, and garbage whose finalizers let other threads run
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    # Then the process ends, and collects garbage as before
    assert (ended.stdout, ended.stderr) == ("True\n", "")
