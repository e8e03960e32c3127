"""Request records as a journal has them."""

from telemetry.events import RequestRecord


def record(
    number: int, *, arrival_s: float, prompt: int = 10, output: int = 5, cached: int = 0, ttft_s: float = 0.1,
    gap_s: float = 0.02,
) -> RequestRecord:  # fmt: skip
    """One that was served, if it has output: first token after `ttft_s`, then one every `gap_s`."""
    arrival = int(arrival_s * 1e9)
    first = arrival + int(ttft_s * 1e9)
    last = first + int(gap_s * 1e9) * max(0, output - 1)
    return RequestRecord(
        at_ns=last,
        request_id=f"r{number}",
        group_id=f"g{number}",
        index=0,
        model="m",
        operation="chat",
        stream=True,
        arrival_ns=arrival,
        stages={"decode": max(1, last - arrival)},
        reason="length" if output else "abort",
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        first_token_ns=first if output else 0,
        last_token_ns=last if output else 0,
    )
