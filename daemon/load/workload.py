"""What a load test asks for: the jobs of autotune/workload.py as text. Pure and seeded.

Owns how a job's streams become words; what arrives when, and how long it is, are the traffic's. It must not know HTTP,
clocks or results. Enter at `Workload.of(job)`; the same seed and sizes give the same requests on any machine.
"""

import random
from dataclasses import dataclass
from typing import Final

from autotune.workload import UNBOUNDED, Job, Mix, Synthetic

# Common words that most tokenizers hold as one token each with their leading space.
_TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education river stone light music paper summer garden bridge"
)
WORDS: Final = tuple(_TEXT.split())
_OPENING: Final = "Continue this list of words with other words, and do not stop:"


@dataclass(frozen=True, slots=True)
class Sizer:
    """How many words make a prompt of so many tokens. `source` says where the figures come from."""

    tokens_per_word: float = 1.0
    overhead_tokens: int = 0
    source: str = "words"

    def words(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead_tokens) / self.tokens_per_word))


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request to send. `prompt_tokens` is what was aimed at; what the server counted is in its usage."""

    index: int
    kind: str
    prompt: str
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The text of jobs. Two jobs whose streams agree have just as many first words in common."""

    mix: Mix
    seed: int
    sizer: Sizer = Sizer()
    longest: int = UNBOUNDED  # prompt and answer in tokens

    def of(self, job: Job) -> LoadRequest:
        """The request of a job: the opening, the first words of the system prompt's stream if it has one, and the
        first ones of its own."""
        words = self.sizer.words(job.prompt_tokens)
        shared = min(words, round(job.system_tokens / self.sizer.tokens_per_word)) if job.system else 0
        parts = [_OPENING, self._stream(f"system {job.system}", shared), self._stream(f"{job.stream}", words - shared)]
        sampling = random.Random(f"{self.seed}:sampling:{job.serial}").randrange(2**31)
        text = " ".join(part for part in parts if part)
        return LoadRequest(job.serial, job.kind, text, job.prompt_tokens, job.output_tokens, sampling)

    def request(self, index: int) -> LoadRequest:
        """The request of the mix's job number `index`, whatever came before it."""
        return self.of(Synthetic(self.mix, self.seed, users=1, serial=index, longest=self.longest).next_job(0.0))

    def _stream(self, name: str, words: int) -> str:
        return sentence(random.Random(f"{self.seed}:{name}"), words)


def sentence(rng: random.Random, words: int) -> str:
    """So many seeded words: past the opening no two requests share a beginning that a prefix cache could serve."""
    return " ".join(rng.choices(WORDS, k=words))


def calibration(words: int = 2000) -> tuple[str, str]:
    """Two texts to count with the server's tokenizer: the fixed opening, and the opening with `words` words."""
    return _OPENING, f"{_OPENING} {sentence(random.Random('calibration'), words)}"


def sized(opening_tokens: int, sample_tokens: int, words: int = 2000) -> Sizer:
    """The sizer that `calibration`'s two counts give."""
    return Sizer(max(0.1, (sample_tokens - opening_tokens) / words), opening_tokens, "tokenize")
