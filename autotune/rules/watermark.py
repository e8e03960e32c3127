"""The watermark is kept by admission: the line moves with what is measured to be in use beside KV, and what newcomers
are charged with what answers come to. Those who are active above it were let in under another line, or for less: while
they come to their ends nobody is let in, so fewer rows would help no sooner, and hurt long after."""

from autotune.change import Change, Known
from autotune.window import Window
from engine.budget import Limits

_WORTH = 1.1  # a line that could lie so much higher is moved, if somebody waits for it
_IDLE = 0.8  # of the line is filled while others wait: they are charged too much
_TURNS = 4  # times as many as ran at once have ended: of the first that end, all are short


def propose(window: Window, limits: Limits, known: Known) -> Change | None:
    return _line(window, limits, known) or _charge(window, limits, known)


def _line(window: Window, limits: Limits, known: Known) -> Change | None:
    now, right = limits.watermark_blocks, known.space.admission_blocks
    evidence: dict[str, float] = {"watermark_blocks": now, "fixed_bytes": known.space.fixed_bytes}
    if right and (now > right or not now):
        why = f"what is in use beside KV leaves {right} blocks below the watermark"
        return Change(changes={"watermark_blocks": right}, why=why, goal="", evidence=evidence, urgent=True)
    if now and not right:
        why = "what is in use beside KV leaves hardly anything below the watermark: the hard line alone holds"
        return Change(changes={"watermark_blocks": 0}, why=why, goal="", evidence=evidence, urgent=True)
    if right > _WORTH * now and window.waiting_kv >= 1:
        why = f"{window.waiting_kv:.0f} wait for blocks, and the watermark allows {right} of them"
        evidence["waiting"] = window.waiting_kv
        return Change(changes={"watermark_blocks": right}, why=why, goal="", evidence=evidence)
    return None


def _charge(window: Window, limits: Limits, known: Known) -> Change | None:
    line, now, right = limits.watermark_blocks, limits.charge_tokens, known.charge_tokens
    if not line or not right:
        return None
    evidence: dict[str, float] = {"kv_peak": window.kv_peak, "watermark_blocks": line, "answers_tokens": right}
    if window.kv_peak > line and right > now:
        why = f"{window.kv_peak} blocks were active above the watermark at {line}: answers come to {right} tokens"
        return Change(changes={"charge_tokens": right}, why=why, goal="", evidence=evidence, urgent=True)
    sure = known.ended >= _TURNS * window.running_peak
    if window.kv_peak < _IDLE * line and window.waiting_kv >= 1 and right < _IDLE * now and sure:
        why = f"{window.waiting_kv:.0f} wait while only {window.kv_peak} of {line} blocks are active: answers are short"
        return Change(changes={"charge_tokens": right}, why=why, goal="", evidence=evidence)
    return None
