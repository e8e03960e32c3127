"""Sampling: from logits to tokens, each row by its own parameters and independent of who shares the batch.

The draw of a row depends on its seed and the position alone: one uniform number from a counter-based generator, and
the inverse of the cumulative distribution. Every row's arithmetic is its own, so the same seed gives the same text in
any company (up to what the logits themselves differ by). Order: penalties and bias, minimum length, temperature, top-k,
top-p, min-p. It owns the penalties' counts; it must not know the model or the plan. Enter at `Sampler.sample`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.plan import RowInit
from engine.request import SamplingParams, TokenLogprob

_MASK = (1 << 64) - 1
_LARGEST = torch.finfo(torch.float32).max
_COLDEST = 1e-30  # as a float32, 1e-300 is 0
_FIRST_CANDIDATES = 512  # sorting the whole vocabulary is seldom needed: the nucleus is among the best few


def uniform(seed: int, position: int) -> float:
    """In [0, 1): the SplitMix64 output function (Steele, Lea, Flood 2014) over seed and position."""
    state = _mixed(_mixed(seed & _MASK) + position)
    return (state >> 11) / (1 << 53)


def _mixed(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True)
class _Counts:
    """[vocabulary]: whether a token occurred in prompt or output, and how often in the output."""

    seen: Tensor
    output: Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """One row that samples: `position` is where the new token will stand, `prompt_len` tells output from prompt."""

    row: int
    position: int
    prompt_len: int
    params: SamplingParams


class Sampler:
    """Rows begin and end with the device's rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._counts: dict[int, _Counts] = {}

    def begin(self, init: RowInit) -> None:
        """Row `init.row` is a new sequence; its generated tokens so far count as output."""
        self.end(init.row)
        params = init.sampling
        if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
            return
        known = torch.tensor(init.tokens, dtype=torch.int64, device=self._device)
        seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        seen[known] = True
        output = torch.bincount(known[init.prompt_len :], minlength=self._vocab_size).float()
        self._counts[init.row] = _Counts(seen, output)

    def end(self, row: int) -> None:
        self._counts.pop(row, None)

    def sample(self, logits: Tensor, draws: list[Draw]) -> tuple[list[int], list[TokenLogprob | None]]:
        """logits [S, vocabulary] fp32, one row a draw → tokens and, where asked for, their log-probabilities (of the
        model's own distribution: before penalties and temperature, as the OpenAI API reports them)."""
        if all(self._plain(draw) for draw in draws):
            return logits.argmax(-1).tolist(), [None] * len(draws)
        tokens: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        for index, draw in enumerate(draws):
            token = self._choose(logits[index], draw)
            tokens.append(token)
            wanted = draw.params.logprobs
            logprobs.append(None if wanted is None else logprob_of(logits[index], token, wanted))
        for draw, token in zip(draws, tokens, strict=True):  # only now that nothing can fail any more
            self._count(draw.row, token)
        return tokens, logprobs

    def _plain(self, draw: Draw) -> bool:
        params = draw.params
        return (
            params.greedy
            and params.logprobs is None
            and not params.logit_bias
            and draw.row not in self._counts
            and draw.position - draw.prompt_len >= params.min_tokens
        )

    def _choose(self, logits: Tensor, draw: Draw) -> int:
        params = draw.params
        logits = self._adjusted(logits, draw)
        if params.greedy:
            return int(logits.argmax())
        return drawn(logits, params, uniform(params.seed, draw.position))

    def _adjusted(self, logits: Tensor, draw: Draw) -> Tensor:
        """Penalties, bias, and no end before the minimum length. A new tensor if anything changes."""
        params = draw.params
        counts = self._counts.get(draw.row)
        if counts is not None:
            less = min(1 / params.repetition_penalty, _LARGEST)
            factor = torch.where(logits > 0, less, params.repetition_penalty)
            penalized = (logits * factor).clamp(-_LARGEST, _LARGEST)  # any penalty above 0 is legal: 1e-38 too
            logits = torch.where(counts.seen, penalized, logits)
            logits -= params.frequency_penalty * counts.output + params.presence_penalty * (counts.output > 0)
        early = draw.position - draw.prompt_len < params.min_tokens
        if params.logit_bias or early:
            logits = logits.clone()
        if params.logit_bias:
            index = torch.tensor([token for token, _ in params.logit_bias], device=logits.device)
            logits.index_add_(0, index, torch.tensor([bias for _, bias in params.logit_bias], device=logits.device))
        if early and params.stop_token_ids:
            logits[list(params.stop_token_ids)] = float("-inf")
        return logits

    def _count(self, row: int, token: int) -> None:
        counts = self._counts.get(row)
        if counts is not None:
            counts.seen[token] = True
            counts.output[token] += 1


def drawn(logits: Tensor, params: SamplingParams, u: float) -> int:
    """The token at quantile `u` of the filtered distribution of logits [vocabulary]. Where they are none (a model that
    computes NaN or infinity, every token forbidden), the best there is: one request must not end the others'."""
    best = logits.max()
    if not bool(best.isfinite()):
        return int(logits.nan_to_num(nan=-_LARGEST).argmax())
    scaled = (logits - best) / max(params.temperature, _COLDEST)  # nothing is above 0, so that nothing overflows
    if not params.top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        cumulative = torch.softmax(scaled, -1, dtype=torch.float64).cumsum(-1)
        return _quantile(cumulative, u)
    most = min(params.top_k or scaled.shape[-1], scaled.shape[-1])
    count = min(most, _FIRST_CANDIDATES)
    total = torch.logsumexp(torch.topk(scaled, most).values if params.top_k else scaled, -1)
    while True:
        values, indices = torch.topk(scaled, count)
        probabilities = torch.exp((values - total).double())
        keep = (probabilities.cumsum(-1) - probabilities < params.top_p) & (
            probabilities >= params.min_p * probabilities[0]
        )
        keep[0] = True  # whatever the parameters, the best token stays
        if count == most or not bool(keep[-1]):
            return int(indices[_quantile((probabilities * keep).cumsum(-1), u)])
        count = min(most, 8 * count)


def _quantile(cumulative: Tensor, u: float) -> int:
    """The first index whose cumulative weight exceeds u x the total; never one of weight zero."""
    target = torch.tensor(u * float(cumulative[-1]), dtype=cumulative.dtype, device=cumulative.device)
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, int(torch.searchsorted(cumulative, cumulative[-1])))


def logprob_of(logits: Tensor, token: int, best: int) -> TokenLogprob:
    """`token`'s log-probability under logits [vocabulary], its rank, and the `best` alternatives."""
    logprobs = torch.log_softmax(logits, -1)
    own = logprobs[token]
    rank = int((logprobs > own).sum()) + 1
    top = torch.topk(logprobs, best) if best else None
    pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
    return TokenLogprob(token=token, logprob=float(own), rank=rank, top=pairs)
