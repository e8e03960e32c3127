"""Every drill again and again, in random order, under mixed traffic of other sizes each round. It
takes about forty minutes."""

import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from daemon.drills import DRILLS
from tests.drilling import PATIENCE_S, Load, Range, mixed, run_one
from tests.perf.harness import Findings
from tests.served import wait_for

TITLE = "Fault drills, again and again (tiny model, mixed traffic)"
PROMISE = "the cause is right every time, and none but the kills ends a request that was not its victim"
ROUNDS = 20
SECONDS = 3600.0
DEADLINE_S = 3
SEED = 3
QUICK = ("spike", "wedge", "kill_engine")


def run(quick: bool) -> Findings:
    """Up to 20 rounds of all drills, as many as fit; the first that is not as stated ends it, and is what was found."""
    order = random.Random(SEED)
    runs: list[dict[str, Any]] = []
    right: Counter[str] = Counter()
    wrong = ""
    until_s = time.perf_counter() + SECONDS
    with tempfile.TemporaryDirectory(prefix="inferd-drills-") as folder, Range(Path(folder), DEADLINE_S) as served:
        for round_ in range(1 if quick else ROUNDS):
            names = _order(order, quick)
            streams = order.randrange(3, 7)
            load = Load(served, streams, mixed, seed=1000 * round_)
            try:
                for name in names:
                    if time.perf_counter() > until_s:
                        break
                    amount, began = _amount(order, name), time.perf_counter()
                    _one(served, load, name, amount)
                    right[name] += 1
                    seconds = round(time.perf_counter() - began, 2)
                    runs.append({"round": round_, "drill": name, "amount": amount, "streams": streams, "s": seconds})
            except AssertionError as error:
                wrong = f"{name}, round {round_}: {str(error)[:2000]}"
                break
            finally:
                load.stop()
            if time.perf_counter() > until_s:
                break
    done = [right[name] for name in (QUICK if quick else _all())]
    return Findings(
        runs=runs,
        summary={"drills": sum(done), "times each (least)": min(done), "of kinds": len(done), "wrong": wrong or "none"},
        met=not wrong,
        seeds=[SEED],
        notes=["20 rounds were meant; as many were done as fit into the time"] if min(done) < ROUNDS else [],
    )


def _all() -> list[str]:
    return [name for name in DRILLS if name != "collector_down"]  # it lasts from the start: traces go nowhere


def _order(chance: random.Random, quick: bool) -> list[str]:
    """Random, but a heap that was left in pieces gets a new engine."""
    if quick:
        return list(QUICK)
    names = _all()
    chance.shuffle(names)
    names.remove("kill_engine")
    names.insert(names.index("fragmentation") + 1, "kill_engine")
    return names


def _amount(chance: random.Random, name: str) -> int:
    """Another size each time, where a drill has one; 0: as the drill chooses."""
    sizes = {
        "leak": chance.randrange(64 << 10, 1 << 20),
        "wedge": chance.randrange(int(1100 * DEADLINE_S), int(1700 * DEADLINE_S)),
        "slow_client": chance.randrange(30_000, 60_000),
        "full_disk": chance.randrange(1000, 4000),
    }
    return sizes.get(name, 0)


def _one(served: Range, load: Load, name: str, amount: int) -> None:
    if name != "kill_both":
        run_one(served, load, name, amount)
        return
    load.wait_calm()
    served.kill_both()
    served.start()
    found = wait_for(lambda: served.since({}, "killed"), PATIENCE_S, "the incident of the previous life")
    assert found[0]["cause"] == "killed"
    wait_for(lambda: served.report(found[0]), PATIENCE_S, "its bundle")
    load.wait_calm()
    load.take_errors()
