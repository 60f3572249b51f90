"""kill -9 of any ranks, at any moment: all go on from one step that was saved whole."""

import json
import random
import signal
import time

from ranks import Ranks
from test_rank_use import START

RANKS, STEPS = 4, 12

BODY = """
import glob, time
folder = sys.argv[1]
engine, model, optimizer = start(update="backward")
saved = sorted(glob.glob(f"{folder}/step-??"))
begin = engine.load(saved[-1])[1]["step"] if saved else 0
say("begin", begin)
for step in range(begin, int(sys.argv[2])):
    train(model, optimizer, [step])
    engine.save(f"{folder}/step-{step + 1:02d}", extra={"step": step + 1})
    time.sleep(0.05)
say("end", digest(model))
"""


def rows_of(text):
    return dict(json.loads(line) for line in text.splitlines() if line.startswith('["'))


def test_all_ranks_resume_at_one_common_step(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    with Ranks(RANKS, START + BODY, straight, STEPS) as ranks:
        expected = {rows_of(text)["end"] for _, text in ranks.outputs()}
    assert len(expected) == 1

    chosen = random.Random(7)
    begins = []
    for attempt in range(4):
        last = attempt == 3
        done = len(list(killed.glob("step-??")))
        with Ranks(RANKS, START + BODY, killed, STEPS) as ranks:
            if not last:
                while len(list(killed.glob("step-??"))) < min(STEPS - 1, done + 2):
                    assert all(process.poll() is None for process in ranks.processes)
                    time.sleep(0.01)
                time.sleep(chosen.uniform(0, 0.15))  # in a step, or in a save
                for victim in chosen.sample(ranks.processes, chosen.randint(1, RANKS)):
                    victim.send_signal(signal.SIGKILL)
            ends = ranks.outputs()
        begin = {rows_of(text)["begin"] for _, text in ends}
        assert len(begin) == 1, ends
        begins.append(begin.pop())
        if not last:
            assert all(code != 0 for code, _ in ends)
    assert begins == sorted(set(begins))  # each went on from where the one before had come
    assert {rows_of(text)["end"] for _, text in ends} == expected
