"""`inferd tune search`: start-up settings tried on daemons of its own, worse ones stopped early, resumed where it was.

Owns the study and its journal, the budget, and the profile it ends in. One trial is measured as trial.py says; the
knobs are knobs.py's. Enter at `searched`. Everything that was found lies in the journal file, so whatever ends this
process, the same command goes on: a trial that was cut off is tried again.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from daemon.lab import knobs, record, stats
from daemon.lab.record import Effect, Report, Run
from daemon.lab.side import SideFailed, toml
from daemon.lab.trial import OBJECTIVES, Load, Objective, measured
from engine.errors import ConfigError

if TYPE_CHECKING:
    from optuna import Study, Trial

DEFAULTS, BEST = "defaults", "best"
_SEARCH: Final = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The flags. `trials` and `budget_s` count what the journal has already."""

    model: str
    objective: str
    knobs: tuple[str, ...]
    budget_s: float
    trials: int
    confirm: int
    store: Path
    memory_limit: str
    load: Load

    @property
    def base(self) -> dict[str, Any]:
        """What every trial has in common."""
        limit = {"memory_limit": self.memory_limit} if self.memory_limit else {}
        return {"tuner": False, "max_model_len": self.load.longest, **limit}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in knobs.NAMES if not self.knobs or name in self.knobs)

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for results to belong together."""
        return {
            "model": self.model,
            "objective": self.objective,
            "knobs": list(self.names),
            "memory_limit": self.memory_limit,
            "load": msgspec.to_builtins(self.load),
        }


def searched(asked: Search) -> tuple[Report, dict[str, Any]]:
    """The report and the settings of the profile. Raises ConfigError (no Optuna, a journal of or in use by another
    search), SideFailed if not even the defaults can be served."""
    with _alone(asked.store):
        return _searched(asked)


def _searched(asked: Search) -> tuple[Report, dict[str, Any]]:
    started_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    study = _opened(asked)
    objective = OBJECTIVES[asked.objective]
    if "ceilings" not in study.user_attrs:
        _measure_defaults(asked, study, objective)
    _put_back(study)
    while len(_ended(study)) < asked.trials and (left := asked.budget_s - _spent_s(study)) > 0:
        _say(asked, study, left)
        trial = study.ask()
        with _told(study, trial):
            _try(asked, study, trial, objective)
    best = study.best_trial
    runs = [_run(trial) for trial in _ended(study)]
    profile = {name: value for name, value in best.params.items() if value != _own(asked, study)[name]}
    effects: tuple[Effect, ...] = ()
    if profile and asked.confirm:
        again = list(_confirmed(asked, profile))
        runs += again
        effects = _effects(again)
    return (
        Report(
            kind=_SEARCH,
            title=f"Search: {asked.objective} over {', '.join(asked.names)}, {len(_ended(study))} trials",
            started_at=started_at,
            model=asked.model,
            settings=asked.base,
            seeds=(asked.load.seed,),
            versions=study.user_attrs.get("versions", {}),
            machine=record.machine(),
            runs=tuple(runs),
            effects=effects,
            notes=tuple(_conclusion(asked, study, profile, objective)),
        ),
        profile,
    )


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Hold the journal for this process: two searches at once would take each other's trials for ones cut off."""
    try:
        journal = store.open("ab")
    except OSError as error:
        raise ConfigError(f"{store} cannot be written: {error.strerror}", "give another --store") from None
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another search is using {store}", "wait for its end, or give another --store") from None
        yield


def _opened(asked: Search) -> "Study":
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError:
        raise ConfigError("the search needs Optuna, which is not installed", "pip install 'inferd[bench]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    fresh = not asked.store.stat().st_size
    try:
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(asked.store))),
            study_name=_SEARCH,
            direction="maximize" if OBJECTIVES[asked.objective].most else "minimize",
            sampler=optuna.samplers.TPESampler(seed=asked.load.seed, n_startup_trials=6),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=0),
            load_if_exists=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{asked.store} is no journal of a search: {error}", "give another --store") from None
    if fresh or "asked" not in study.user_attrs:
        study.set_user_attr("asked", asked.identity)
    known = study.user_attrs["asked"]
    differs = [name for name, value in asked.identity.items() if known.get(name) != value]
    if differs:
        was = ", ".join(f"{name} {known.get(name)}" for name in differs)
        raise ConfigError(f"{asked.store} is the journal of another search, with {was}", "give another --store")
    if not fresh:
        click.echo(f"going on with {len(_ended(study))} trials of {asked.store}", err=True)
    return study


def _measure_defaults(asked: Search, study: "Study", objective: Objective) -> None:
    """The first trial: what the machine decides by itself. The values to try lie around it."""
    from optuna.trial import create_trial

    click.echo("the defaults first", err=True)
    run, ceilings, versions = measured(asked.model, asked.base, asked.load, DEFAULTS, lambda _: False)
    space = knobs.choices(ceilings, asked.names)
    value = objective.value(run)
    study.set_user_attr("space", space)
    study.set_user_attr("versions", versions)
    study.add_trial(
        create_trial(
            params=knobs.resolved(ceilings, asked.names),
            distributions=_distributions(space),
            value=value,
            user_attrs={"run": msgspec.to_builtins(run)},
        )
    )
    study.set_user_attr("ceilings", ceilings)  # last: without it the defaults are measured again


def _distributions(space: dict[str, list[Any]]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution

    return {name: CategoricalDistribution(values) for name, values in space.items()}


def _put_back(study: "Study") -> None:
    """Trials that were cut off when the last search was: their settings come first now."""
    from optuna.trial import TrialState

    for trial in study.get_trials(states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)


def _try(asked: Search, study: "Study", trial: "Trial", objective: Objective) -> None:
    """One trial, to its end or until it is clearly worse than the median so far."""
    from optuna import TrialPruned

    settings = {name: trial.suggest_categorical(name, values) for name, values in study.user_attrs["space"].items()}
    step = 0

    def hopeless(run: Run) -> bool:
        nonlocal step
        trial.report(objective.value(run), step)
        step += 1
        return bool(trial.should_prune())

    run, _, _ = measured(asked.model, {**asked.base, **settings}, asked.load, f"trial {trial.number}", hopeless)
    trial.set_user_attr("run", msgspec.to_builtins(msgspec.structs.replace(run, settings=settings)))
    if "stopped early" in run.notes:
        raise TrialPruned
    study.tell(trial, objective.value(run))


@contextmanager
def _told(study: "Study", trial: "Trial") -> Iterator[None]:
    """A side that cannot start and one that was stopped early are results too."""
    from optuna import TrialPruned
    from optuna.trial import TrialState

    try:
        yield
    except SideFailed as error:
        trial.set_user_attr("why", error.message)
        study.tell(trial, state=TrialState.FAIL)
    except TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)


def _ended(study: "Study") -> list[Any]:
    """Trials that say something: measured, stopped early, or refused by the daemon."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state.is_finished() and ("run" in trial.user_attrs or "why" in trial.user_attrs)
    ]


def _spent_s(study: "Study") -> float:
    ended = [t for t in _ended(study) if t.datetime_start and t.datetime_complete]
    return float(sum((t.datetime_complete - t.datetime_start).total_seconds() for t in ended))


def _own(asked: Search, study: "Study") -> dict[str, Any]:
    return knobs.resolved(study.user_attrs["ceilings"], asked.names)


def _run(trial: Any) -> Run:
    """A trial as a run of the report."""
    if "run" not in trial.user_attrs:
        why = (f"could not be started: {trial.user_attrs['why']}",)
        return Run(side=f"trial {trial.number}", seconds=0.0, settings=trial.params, notes=why)
    run = msgspec.convert(trial.user_attrs["run"], Run)
    return msgspec.structs.replace(run, settings=trial.params)


def _confirmed(asked: Search, profile: dict[str, Any]) -> Iterator[Run]:
    """The best of many single runs is flattered: it and the defaults again, in turns."""
    for repeat in range(asked.confirm):
        for side, settings in ((DEFAULTS, {}), (BEST, profile)):
            click.echo(f"confirming, repetition {repeat + 1} of {asked.confirm}: {side}", err=True)
            name = f"{side}, confirmed"
            run, _, _ = measured(asked.model, {**asked.base, **settings}, asked.load, name, lambda _: False)
            yield msgspec.structs.replace(run, repeat=repeat, settings=settings)


def _effects(runs: list[Run]) -> tuple[Effect, ...]:
    found = []
    best, own = f"{BEST}, confirmed", f"{DEFAULTS}, confirmed"
    for figure in runs[0].figures:
        new, old = ([r.figures[figure] for r in runs if r.side == side and figure in r.figures] for side in (best, own))
        ratio = stats.ratio(new, old, paired=True)
        if ratio:
            found.append(
                Effect(
                    figure=figure,
                    side=best,
                    against=own,
                    ratio=round(ratio.middle, 4),
                    low=ratio.low,
                    high=ratio.high,
                    noise=ratio.noise,
                )
            )
    return tuple(found)


def _conclusion(asked: Search, study: "Study", profile: dict[str, Any], objective: Objective) -> list[str]:
    own, best = _ended(study)[0].value, study.best_value
    if not profile:
        return [f"Of {len(_ended(study))} trials none was better than the defaults: {objective.said(own)}."]
    chosen = ", ".join(f"{name} {value}" for name, value in profile.items())
    notes = [
        f"The best of {len(_ended(study))} trials: {chosen}: {objective.said(best)}; defaults: {objective.said(own)}."
    ]
    if not asked.confirm:
        notes.append("Each was measured once, so the best is flattered: --confirm measures it again in turns.")
    return notes


def _say(asked: Search, study: "Study", left_s: float) -> None:
    ended = _ended(study)
    objective = OBJECTIVES[asked.objective]
    click.echo(
        f"trial {len(ended) + 1} of at most {asked.trials}, {left_s:.0f} s of the budget left; "
        f"best so far {objective.said(study.best_value)} (defaults {objective.said(ended[0].value)})",
        err=True,
    )


def profile_text(report: Report, profile: dict[str, Any]) -> str:
    """The profile as TOML, with where it came from."""
    about = [report.title, f"{report.model}, {report.started_at}, {report.machine.get('cpu')}", *report.notes]
    about.append("Serve with it: inferd serve MODEL --profile THIS_FILE")
    return "".join(f"# {line}\n" for line in about) + toml(profile)
