"""Random ids: unlike each other, in a forked process too."""

import subprocess
import sys

from kvrouter.core.ids import RandomHex, new_request_id


def test_random_texts_have_their_length_and_differ() -> None:
    texts = RandomHex(16, at_once=4)
    taken = [texts.take() for _ in range(1000)]
    assert len(set(taken)) == 1000
    assert all(len(text) == 16 and int(text, 16) >= 0 for text in taken)
    assert len(new_request_id()) == 32


FORKING = """
import os
from kvrouter.core.ids import RandomHex

texts = RandomHex(16)
print(texts.take(), flush=True)
child = os.fork()
if child:
    os.waitpid(child, 0)
for _ in range(200):
    print(texts.take(), flush=True)
"""
"""It runs in a process without threads: only such a one forks safely."""


def test_a_forked_process_repeats_no_random_text_of_its_parent() -> None:
    printed = subprocess.run([sys.executable, "-c", FORKING], check=True, capture_output=True, text=True)
    taken = printed.stdout.split()
    assert len(taken) == len(set(taken)) == 1 + 2 * 200
