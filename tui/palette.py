"""Style names and what they look like, with colour and without.

Owns the palette: Okabe and Ito's colours (jfly.uni-koeln.de/color), which people with any kind of colour blindness can
tell apart; and nothing is said by colour alone. It must not know what is shown. Enter at `Palette`.
"""

from typing import Final

from rich.style import Style

_COLOURS: Final = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#3A8FD0",
    "red": "#E8702A",
    "pink": "#CC79A7",
    "grey": "#9A9A9A",
}
_FILLS: Final = ("sky", "orange", "green", "pink", "yellow", "blue", "red", "grey")

_COLOURED: Final = {
    "": Style(),
    "dim": Style(color="#8A8F98"),
    "rule": Style(color="#4C525C"),
    "title": Style(bold=True, color="#C9D1D9"),
    "label": Style(color="#8A8F98"),
    "strong": Style(bold=True),
    "good": Style(color=_COLOURS["green"]),
    "warning": Style(bold=True, color=_COLOURS["orange"]),
    "critical": Style(bold=True, color="#FFFFFF", bgcolor="#B23A00"),
    "info": Style(color=_COLOURS["sky"]),
    "cursor": Style(bold=True, color="#0D1117", bgcolor=_COLOURS["sky"]),
    "key": Style(bold=True, color=_COLOURS["sky"]),
    "tab": Style(bold=True, color="#0D1117", bgcolor="#C9D1D9"),
    "p50": Style(color=_COLOURS["green"]),
    "p95": Style(color=_COLOURS["sky"]),
    "p99": Style(color=_COLOURS["orange"]),
    **{f"fill{index}": Style(color="#0D1117", bgcolor=_COLOURS[name]) for index, name in enumerate(_FILLS)},
    **{f"ink{index}": Style(color=_COLOURS[name]) for index, name in enumerate(_FILLS)},
    "spare": Style(color="#8A8F98", bgcolor="#22272E"),
}
_PLAIN: Final = {
    "": Style(),
    "dim": Style(),
    "rule": Style(),
    "title": Style(bold=True),
    "label": Style(),
    "strong": Style(bold=True),
    "good": Style(),
    "warning": Style(bold=True),
    "critical": Style(bold=True, reverse=True),
    "info": Style(),
    "cursor": Style(reverse=True),
    "key": Style(bold=True),
    "tab": Style(reverse=True),
    "p50": Style(),
    "p95": Style(bold=True),
    "p99": Style(underline=True),
    **{f"fill{index}": Style(reverse=index % 2 == 0) for index in range(len(_FILLS))},
    **{f"ink{index}": Style() for index in range(len(_FILLS))},
    "spare": Style(),
}

FILLS: Final = len(_FILLS)


class Palette:
    """Style names → Rich styles. Without colour, neighbours in a bar alternate between plain and reversed."""

    def __init__(self, colour: bool) -> None:
        self.colour = colour
        self._styles = _COLOURED if colour else _PLAIN

    def __getitem__(self, name: str) -> Style:
        return self._styles[name]
