"""What was computed, as tokens of answers: one measure for prompts and answers, whichever happen to come. Pure.

Within a minute a load changes what it is made of: prompts now, their answers later, short contexts and long. So each
token counts for what it costs, where it stood, and a change is judged by how much of that a second held. What a step
costs in any case belongs to answers, as far as they have steps of their own: a step that carries a prompt is paid by
that. It must not know changes. Enter at `Worth.rate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.costmodel import Demand
from autotune.window import Window
from engine.stepcost import StepCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """`rows` that decode, in steps of which `mixed_share` carry prompts."""

    cost: StepCost
    demand: Demand
    rows: float
    mixed_share: float

    def rate(self, windows: Sequence[Window]) -> float:
        """Output tokens per second that would cost as much as all that was computed, and not thrown away, did."""
        shapes = [sample.shape for window in windows for sample in window.samples]
        prompts, answers = (sum(getattr(s, name) for s in shapes) for name in ("prefill_tokens", "decode_rows"))
        depth = sum(s.prefill_pairs for s in shapes) / prompts if prompts else self.demand.depth_tokens
        context = sum(s.context_tokens for s in shapes) / answers if answers else self.demand.context_tokens
        read = sum(max(0, window.prefill_tokens - window.lost_tokens) for window in windows)
        written = sum(window.output_tokens for window in windows)
        seconds = sum(window.seconds for window in windows)
        worth_s = read * self._prompt_s(depth) + written * self._answer_s(context)
        each_s = self._request_s / max(1.0, self.demand.output_tokens)
        return (worth_s / each_s if each_s > 0 else written) / seconds

    @property
    def _request_s(self) -> float:
        demand = self.demand
        prompt_s = demand.prompt_tokens * self._prompt_s(demand.depth_tokens)
        return prompt_s + max(1.0, demand.output_tokens) * self._answer_s(demand.context_tokens)

    def _prompt_s(self, depth: float) -> float:
        """Of one token of a prompt, with so many before it."""
        return self.cost.prefill_s + self.cost.pair_s * depth

    def _answer_s(self, context: float) -> float:
        """Of one token of an answer, with so many before it."""
        cost = self.cost
        alone_s = (1 - self.mixed_share) * cost.fixed_s / self.rows
        return cost.row_s + cost.crowd_s * self.rows + cost.context_s * context + alone_s
