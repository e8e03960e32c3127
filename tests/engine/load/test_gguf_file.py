"""GGUF files: what is read is what was written; what is damaged is refused before anything is allocated."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import CorruptModel, UnknownArchitecture
from engine.load.gguf import TYPES, Gguf
from engine.quant.blocks import Blocks

COLUMNS = 256


def one_tensor(path: Path, data: np.ndarray, kind: Type) -> Gguf:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("a.list", ["x", "é", ""])
    writer.add_array("a.numbers", [1.5, 2.5])
    writer.add_bool("a.truth", True)
    writer.add_tensor("t", data, raw_dtype=None if kind in (Type.F32, Type.F16) else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Gguf.open(path)


def read(file: Gguf, dtype: type = np.float32) -> np.ndarray:
    data, tensor = b"".join(file.pieces("t")), file.tensors["t"]
    if not tensor.kept:
        return np.frombuffer(data, dtype).reshape(tensor.shape)
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.stored.shape)
    return Blocks(rows, tensor.kept).plain().numpy()


def test_block_sizes_are_ggmls() -> None:
    for number, (name, items, size) in TYPES.items():
        assert Type(number).name == name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (items, size)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_a_quantized_tensor_reads_back_within_its_precision(tmp_path: Path, kind: Type) -> None:
    data = np.random.default_rng(0).normal(size=(6, COLUMNS)).astype(np.float32)
    got = read(one_tensor(tmp_path / "m.gguf", gguf.quantize(data, kind), kind))
    worst = np.abs(data).max() / (100 if kind is Type.Q8_0 else 6)
    assert 0 < np.abs(got - data).max() < worst


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F32, np.float32), (Type.F16, np.float16)])
def test_plain_tensors_stay_bit_for_bit(tmp_path: Path, kind: Type, dtype: type) -> None:
    data = np.random.default_rng(0).normal(size=(3, 32)).astype(dtype)
    file = one_tensor(tmp_path / "m.gguf", data, kind)
    assert file.tensors["t"].converted.dtype == kind.name
    assert np.array_equal(read(file, dtype), data)


def _scales(packed: bytes) -> list[tuple[int, int]]:
    """The eight 6-bit (scale, minimum) pairs of Q4_K and Q5_K, as ggml-quants.c's get_scale_min_k4 unpacks them."""
    pairs = []
    for j in range(8):
        if j < 4:
            pairs.append((packed[j] & 63, packed[j + 4] & 63))
        else:
            low, high = packed[j + 4] & 15, packed[j + 4] >> 4
            pairs.append((low | (packed[j - 4] >> 6) << 4, high | (packed[j] >> 6) << 4))
    return pairs


def _q4_or_q5_k(block: bytes, five: bool) -> list[float]:
    d, dmin = struct.unpack("<2e", block[:4])
    scales, high = _scales(block[4:16]), block[16:48]
    low = block[48:] if five else block[16:]
    values = []
    for j, (scale, least) in enumerate(scales):
        for i in range(32):
            byte = low[32 * (j // 2) + i]
            nibble = byte >> 4 if j % 2 else byte & 15
            if five:
                nibble += 16 * (high[i] >> j & 1)
            values.append(d * scale * nibble - dmin * least)
    return values


def _q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (d,) = struct.unpack("<e", block[208:])
    values = [0.0] * 256
    for half in range(2):
        for i in range(32):
            for quarter in range(4):
                nibble = low[64 * half + i + 32 * (quarter % 2)]
                nibble = nibble >> 4 if quarter > 1 else nibble & 15
                q = (nibble | (high[32 * half + i] >> 2 * quarter & 3) << 4) - 32
                at = 128 * half + 32 * quarter + i
                values[at] = d * scales[at // 16] * q
    return values


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (Type.Q4_K, lambda block: _q4_or_q5_k(block, False)),
        (Type.Q5_K, lambda block: _q4_or_q5_k(block, True)),
        (Type.Q6_K, _q6_k),
    ],
    ids=["Q4_K", "Q5_K", "Q6_K"],
)
def test_k_blocks_mean_what_ggml_says(tmp_path: Path, kind: Type, plain: object) -> None:
    """Random bits in every field but the half-precision scales, which are set; decoded one number at a time."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    raw = np.random.default_rng(1).integers(0, 256, size=(5, size), dtype=np.uint8)
    halves = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    raw[:, -2:] = halves[:2]
    if kind is not Type.Q6_K:
        raw[:, :4] = halves
    got = read(one_tensor(tmp_path / "m.gguf", raw, kind))
    want = np.array([plain(row.tobytes()) for row in raw], np.float32)  # type: ignore[operator]
    assert got.shape == (5, 256)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_metadata_is_plain_values(tmp_path: Path) -> None:
    meta = one_tensor(tmp_path / "m.gguf", np.zeros((1, 32), np.float32), Type.F32).metadata
    assert meta["general.architecture"] == "llama"
    assert (meta["a.list"], meta["a.numbers"], meta["a.truth"]) == (["x", "é", ""], [1.5, 2.5], True)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    one_tensor(path, np.ones((2, 32), np.float32), Type.F32)
    whole = path.read_bytes()
    data_end = Gguf.open(path).tensors["t"].offset + 2 * 32 * 4
    for length in range(data_end):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptModel):
            Gguf.open(path)


def test_a_damaged_header_is_an_error_and_no_loop(tmp_path: Path) -> None:
    """Any byte of the header changed to any of a few others: opened, or refused in our own words."""
    path = tmp_path / "m.gguf"
    one_tensor(path, np.ones((2, 32), np.float32), Type.F32)
    whole = path.read_bytes()
    for at in range(len(whole) - 2 * 32 * 4):
        for value in (0x00, 0x7F, 0xFF):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            try:
                Gguf.open(path)
            except (CorruptModel, UnknownArchitecture) as error:
                assert error.message


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    size = gguf.GGML_QUANT_SIZES[Type.IQ4_NL][1]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((1, size), np.uint8), raw_dtype=Type.IQ4_NL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownArchitecture, match=r"tensor t .* type 20"):
        Gguf.open(path)
