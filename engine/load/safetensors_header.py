"""The header of a safetensors file: what is in it, and whether the file is whole. Stdlib only, so that checking a model
needs no torch. The format: eight bytes of header length, a JSON header, the tensors' bytes."""

import json
import struct
from pathlib import Path
from typing import Any

from engine.errors import CorruptModel, MissingShard

_MOST_HEADER_BYTES = 100 << 20  # the format's own bound


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """name → {dtype, shape, data_offsets}. Raises MissingShard if there is no such file, CorruptModel if it is not
    whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, _MOST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"it has {size} bytes, its header promises {8 + length + end}")
        return header
    except FileNotFoundError as error:
        raise MissingShard(f"weight file {path} is not there", "download the model again") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CorruptModel(f"{path} is damaged: {error}", "download the model again") from error


def read_entries(path: Path) -> list[tuple[str, int, int]]:
    """(dtype, begin, end) of each tensor. Raises as `read_header`."""
    return [(str(e["dtype"]), int(e["data_offsets"][0]), int(e["data_offsets"][1])) for e in read_header(path).values()]
