"""The online tuner: watch → at most one Change → settle → verify against the prediction → keep or roll back.

Owns the order of the rules, the trial under way, back-off, the budget of changes, freeze and pins, and what was
learned. It must not know how windows are measured or limits applied, and reads no clock: a daemon and the simulator
both call `Tuner.steer` once per control period. Enter there; `Decision` events come out by `publish`.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import ModuleType
from typing import Any

from autotune.change import Change, Known, name_of
from autotune.learning import Learning
from autotune.memory import Learned
from autotune.missed import Missed
from autotune.objective import Targets
from autotune.rules import chunk, growth, hard_line, inter_token, knee, long_requests, slow_start, thrash, watermark
from autotune.space import Space
from autotune.verify import verdict
from autotune.window import Window
from engine.budget import Limits
from telemetry.events import Decision

log = logging.getLogger("inferd.tuner")

RULES = (
    hard_line,
    long_requests,
    watermark,
    thrash,
    inter_token,
    chunk,
    knee,
    slow_start,
    growth,
)  # the first that has something


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the tuner may move. Windows are control periods with work in them."""

    settle: int = 1  # windows that are not looked at after a change
    verify: int = 4  # windows that decide, and that are remembered of the time before
    steady: int = 2  # windows in a row that must propose the same, unless it is urgent
    hourly: float = 6.0  # changes that are earned in an hour
    burst: float = 12.0  # and how many may be saved up
    back_off_s: float = 300.0  # after a rollback; doubles each time
    back_off_most_s: float = 3600.0
    give_up: int = 12  # windows without work until a trial is no longer judged


@dataclass(slots=True)
class _Trial:
    number: int
    rule: str
    change: Change
    before: dict[str, int]
    baseline: list[Window]
    windows: list[Window] = field(default_factory=list)
    settling: int = 0
    idle: int = 0
    measured: dict[str, float] = field(default_factory=dict)


class Tuner:
    """One engine's. `learned` is what an earlier life left behind."""

    def __init__(
        self,
        space: Space,
        targets: Targets | None = None,
        publish: Callable[[Decision], None] = lambda _: None,
        *,
        pace: Pace | None = None,
        rules: Sequence[ModuleType] = RULES,
        learned: Learned | None = None,
    ) -> None:
        self._learning = Learning(learned)
        self.space = self._learning.measured(space)
        self.targets = targets or Targets()
        self.frozen = bool(learned and learned.frozen)
        self.disabled: dict[str, str] = {}  # rules that raised → what
        self.missed = Missed()
        self.changes = 0
        self._settled = 0
        self._publish = publish
        self._pace = pace or Pace()
        self._rules = tuple(rules)
        self._recent: deque[Window] = deque(maxlen=self._pace.verify)
        self._trial: _Trial | None = None
        self._taken_back: _Trial | None = None  # until it was compared with the time after it, too
        self._wish: tuple[str, tuple[tuple[str, bool], ...]] | None = None
        self._wished = 0
        self._kept: dict[str, int] = dict(learned.limits) if learned else {}
        self._numbers = learned.decisions if learned else 0
        self._budget = self._pace.burst
        self._then_s: float | None = None
        self._barred: dict[tuple[str, bool], tuple[float, float]] = {}  # (knob, up) → until when, how long next time
        if learned and learned.pinned:
            self.pin(learned.pinned)

    # -- what people and the daemon do

    def pin(self, names: Sequence[str]) -> None:
        """Leave these limits alone until `release`. A trial of one of them is not judged any more."""
        self.space = replace(self.space, pinned=self.space.pinned | set(names))
        if self._trial and set(names) & set(self._trial.change.changes):
            self._trial = None

    def freeze(self) -> None:
        """Change nothing, keep what is in force."""
        self.frozen, self._trial, self._taken_back = True, None, None

    def release(self) -> None:
        """Go on, pins included."""
        self.frozen = False
        self.space = replace(self.space, pinned=frozenset())

    def abandon(self) -> None:
        """What was proposed could not be applied: there is nothing to judge."""
        self._trial = None

    @property
    def settled_changes(self) -> int:
        """Grows whenever a trial is over: then there is something new to keep."""
        return self._settled

    @property
    def has_learned(self) -> bool:
        return bool(self._kept or self.frozen or self.space.pinned or self._learning.fit.cost())

    def status(self) -> dict[str, Any]:
        """For people: what it is doing, and what it knows."""
        trial = self._trial
        known = self._known()
        return {
            "state": "frozen" if self.frozen else "trying" if trial else "watching",
            "trying": {"rule": trial.rule, "changes": trial.change.changes, "why": trial.change.why} if trial else None,
            "pinned": sorted(self.space.pinned),
            "disabled": dict(self.disabled),
            "targets": asdict(self.targets),
            "unmet": dict(self.missed.now),
            "memory": self.space.unreachable() or None,
            "watermark_blocks": self.space.watermark_blocks,
            "memory_rows": known.memory_rows,
            "step_cost": asdict(known.cost) if known.cost else None,
            "step_cost_error": round(self._learning.fit.error_ratio, 4),
        }

    def learned(self) -> Learned:
        """To be kept for the next life: limits that proved themselves, never those of a trial."""
        entry = self._learning.learned(self.space)
        entry.limits = dict(self._kept)
        entry.frozen, entry.pinned, entry.decisions = self.frozen, sorted(self.space.pinned), self._numbers
        return entry

    def first_limits(self, limits: Limits) -> Limits:
        """The limits to start an engine with: what proved itself before, and the lines of memory where they are now."""
        known = {name: value for name, value in self._kept.items() if name not in ("kv_blocks", "watermark_blocks")}
        return self.space.start(limits.replaced(self.space.clamped(known)))

    # -- the loop

    def steer(self, window: Window, limits: Limits, now_s: float) -> Limits:
        """One control period has passed. Returns the limits for the next."""
        self._earn(now_s)
        self._learning.take(window)
        self.space = self._learning.measured(self.space)
        self.missed.look(window, limits, self._known(), self._trial.change.why if self._trial else "")
        if self.frozen:
            return limits
        trial = self._trial
        if trial is not None:
            pressing = None if trial.change.urgent else self._proposal(window, limits, now_s, urgent=True)
            if pressing is None:
                return self._judge(trial, window, limits, now_s)
            if not pressing[1].goal:
                return self._judge(trial, window, self._follow(*pressing, limits, now_s), now_s)
            limits = self._roll_back(trial, f"not judged, {pressing[0]} had to act", limits, now_s, bar=False)
            return self._try(*pressing, limits, now_s)
        if window.idle:
            self._recent.clear()
            self._wish = self._taken_back = None
            return limits
        self._recent.append(window)
        self._look_again(limits, now_s)
        found = self._proposal(window, limits, now_s)
        if found is None:
            return limits
        return (self._try if found[1].goal else self._follow)(*found, limits, now_s)

    def _known(self) -> Known:
        learning = self._learning
        return Known(
            space=self.space,
            targets=self.targets,
            cost=learning.fit.cost(),
            cost_error=learning.fit.error_ratio,
            demand=learning.demand,
            memory_rows=learning.memory_rows(self.space),
            charge_tokens=int(learning.output_quantile()),
            ended=learning.ended,
        )

    def _proposal(
        self, window: Window, limits: Limits, now_s: float, urgent: bool = False
    ) -> tuple[str, Change] | None:
        """What the first rule with a legal, allowed and lasting wish proposes; if `urgent`, one that cannot wait."""
        known = self._known()
        for rule in self._rules:
            name = name_of(rule)
            if name in self.disabled:
                continue
            try:
                change: Change | None = rule.propose(window, limits, known)
            except Exception as error:
                log.exception("the rule %s failed and is disabled; the other rules go on", name)
                self.disabled[name] = f"{type(error).__name__}: {error}"
                continue
            change = self._legal(change, limits, now_s)
            if urgent and not (change and change.urgent):
                continue
            if change is not None and (change.urgent or self._lasting(name, change, limits)):
                return name, change
            if change is not None:
                return None  # wait and see whether it goes on saying so
        if not urgent:
            self._wish = None
        return None

    def _legal(self, change: Change | None, limits: Limits, now_s: float) -> Change | None:
        if change is None or (not change.urgent and self._budget < 2):  # one for it, one to take it back
            return None
        space = self.space
        wished = space.clamped(change.changes)
        legal = {n: v for n, v in wished.items() if v != getattr(limits, n)}
        barred = any(now_s < self._barred.get((n, v > getattr(limits, n)), (0.0, 0.0))[0] for n, v in legal.items())
        return replace(change, changes=legal) if legal and (change.urgent or not barred) else None

    def _lasting(self, name: str, change: Change, limits: Limits) -> bool:
        wish = name, tuple(sorted((n, v > getattr(limits, n)) for n, v in change.changes.items()))
        self._wished = self._wished + 1 if wish == self._wish else 1
        self._wish = wish
        return self._wished >= self._pace.steady

    def _try(self, rule: str, change: Change, limits: Limits, now_s: float) -> Limits:
        self._trial = self._made(rule, change, limits, now_s)
        self._say(self._trial, "", now_s)
        return limits.replaced(change.changes)

    def _follow(self, rule: str, change: Change, limits: Limits, now_s: float) -> Limits:
        """A line is put where it was measured to be: nothing is tried, so a trial under way goes on."""
        made = self._made(rule, change, limits, now_s)
        if self._trial:  # which does not take it back
            self._trial.before = {n: v for n, v in self._trial.before.items() if n not in change.changes}
        self._settled += 1
        self._kept.update(change.changes)
        self._say(made, "kept: it follows what was measured", now_s)
        return limits.replaced(change.changes)

    def _made(self, rule: str, change: Change, limits: Limits, now_s: float) -> _Trial:
        self._numbers += 1
        before = {name: getattr(limits, name) for name in change.changes}
        self._spend()
        self._wish = None
        if change.goal:  # from here on it is another time
            self._taken_back = None
        if change.urgent:  # what had to be taken back at once is not tried again soon
            for name, value in change.changes.items():
                if value < before[name]:
                    self._bar(name, True, now_s)
        return _Trial(self._numbers, rule, change, before, list(self._recent))

    def _judge(self, trial: _Trial, window: Window, limits: Limits, now_s: float) -> Limits:
        if window.idle:
            trial.idle += 1
            if trial.idle >= self._pace.give_up:
                self._close(trial, "kept: the load went away before it could be judged", limits, now_s)
            return limits
        if trial.settling < self._pace.settle:
            trial.settling += 1
            return limits
        trial.windows.append(window)
        if len(trial.windows) < (1 if trial.change.urgent else self._pace.verify):
            return limits
        found = verdict(trial.change, trial.baseline, trial.windows, trial.before, limits, self._known())
        trial.measured = found.measured
        if found.better or trial.change.urgent:
            self._close(trial, f"kept: {found.why}", limits, now_s)
            return limits
        limits = self._roll_back(trial, found.why, limits, now_s)
        self._taken_back, trial.settling = trial, 0
        return limits

    def _look_again(self, limits: Limits, now_s: float) -> None:
        """What was taken back, against the time after it: if that is no better, it was the machine or the load that had
        changed, and the change may be tried again. Where it is taken back again, the pause is the longer one still."""
        trial = self._taken_back
        if trial is None:
            return
        if trial.settling < self._pace.settle:
            trial.settling += 1
            self._recent.clear()
        if len(self._recent) < self._pace.verify:
            return
        self._taken_back, tried = None, limits.replaced(trial.change.changes)
        found = verdict(trial.change, list(self._recent), trial.windows, trial.before, tried, self._known())
        if not found.better:
            return
        for name, value in trial.change.changes.items():
            key = name, value > trial.before[name]
            self._barred[key] = (now_s, self._barred[key][1])
        trial.measured = found.measured
        self._say(trial, f"rolled back, but may be tried again: against the time after it, {found.why}", now_s)

    def _close(self, trial: _Trial, said: str, limits: Limits, now_s: float) -> None:
        self._trial = None
        self._settled += 1
        self._kept.update({name: getattr(limits, name) for name in trial.change.changes})
        self._recent.clear()
        self._say(trial, said, now_s)

    def _roll_back(self, trial: _Trial, got: str, limits: Limits, now_s: float, bar: bool = True) -> Limits:
        self._trial = None
        self._recent.clear()
        self._spend()
        for name, value in trial.change.changes.items() if bar else ():
            self._bar(name, value > trial.before[name], now_s)
        self._say(trial, f"rolled back: {got}", now_s)
        self._numbers += 1
        undo = Change(changes=trial.before, why=f"{trial.rule} did not bring what it promised: {got}")
        self._say(_Trial(self._numbers, trial.rule, undo, trial.change.changes, []), "done", now_s, "rollback")
        return limits.replaced(trial.before)

    # -- accounts

    def _earn(self, now_s: float) -> None:
        if self._then_s is not None:
            earned = (now_s - self._then_s) / 3600 * self._pace.hourly
            self._budget = min(self._pace.burst, self._budget + max(0.0, earned))
        self._then_s = now_s

    def _spend(self) -> None:
        self.changes += 1
        self._budget -= 1

    def _bar(self, name: str, up: bool, now_s: float) -> None:
        until_s, length_s = self._barred.get((name, up), (0.0, self._pace.back_off_s))
        if now_s < until_s:
            return
        longer_s = min(self._pace.back_off_most_s, 2 * length_s)
        self._barred[name, up] = (now_s + length_s, longer_s)

    def _say(self, trial: _Trial, said: str, now_s: float, direction: str = "") -> None:
        name = next(iter(trial.change.changes))
        before, after = trial.before[name], trial.change.changes[name]
        self._publish(
            Decision(
                at_ns=int(now_s * 1e9),
                number=trial.number,
                rule=trial.rule,
                knob=name,
                direction=direction or ("up" if after > before else "down"),
                before=before,
                after=after,
                also={n: v for n, v in trial.change.changes.items() if n != name},
                why=trial.change.why,
                evidence={n: float(v) for n, v in trial.change.evidence.items()},
                predicted=trial.change.predicted,
                verdict=said,
                measured=trial.measured,
            )
        )
