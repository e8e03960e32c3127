// Weights as they lie in memory: tiles of sixteen outputs, cut along the inputs into blocks of 32. A format says how
// the bytes of one block of a tile become floats; everything else here is the same for all. GGUF's block formats are
// kept as they are in the file, only reordered, so that a product reads a fifth of the bytes of fp32 and yet has the
// very weights that dequantizing gives: scale times an integer of eight bits or less is exact in fp32.
#pragma once
#include "lanes.h"

constexpr int64_t BLOCK = 32;

// Each format: BYTES of a block of a tile; a reader whose (k) gives the sixteen weights of the block's k-th input; and
// pack(), which writes output `lane` of the block from a row of the source.
struct F32 {
    static constexpr int64_t BYTES = BLOCK * LANES * 4, SOURCE_ITEM = 4;
    const float* at;
    explicit F32(const uint8_t* block) : at(reinterpret_cast<const float*>(block)) {}
    Lanes operator()(int64_t k) const { return {floats(at + k * LANES), floats(at + k * LANES + 8)}; }
    static void pack(const uint8_t* row, int64_t first, int64_t count, int64_t lane, uint8_t* block) {
        for (int64_t k = 0; k < count; ++k) std::memcpy(block + (k * LANES + lane) * 4, row + (first + k) * 4, 4);
    }
};

struct Half {  // what F16 and BF16 share: two bytes an item
    static constexpr int64_t BYTES = BLOCK * LANES * 2, SOURCE_ITEM = 2;
    static void pack(const uint8_t* row, int64_t first, int64_t count, int64_t lane, uint8_t* block) {
        for (int64_t k = 0; k < count; ++k) std::memcpy(block + (k * LANES + lane) * 2, row + (first + k) * 2, 2);
    }
};

struct F16 : Half {
    const uint8_t* at;
    explicit F16(const uint8_t* block) : at(block) {}
    Lanes operator()(int64_t k) const { return {halves(at + k * 32), halves(at + k * 32 + 16)}; }
};

struct BF16 : Half {
    const uint8_t* at;
    explicit BF16(const uint8_t* block) : at(block) {}
    Lanes operator()(int64_t k) const { return {brains(at + k * 32), brains(at + k * 32 + 16)}; }
};

// A block of the GGUF source is one row's: scale (and offset) as fp16, then 32 integers. Here: sixteen scales, sixteen
// offsets, then the integers of all sixteen rows, input by input.
struct Q8_0 {
    static constexpr int64_t BYTES = LANES * 2 + BLOCK * LANES, SOURCE_BLOCK = 34;
    const Lanes scale;
    const uint8_t* at;
    explicit Q8_0(const uint8_t* block) : scale{halves(block), halves(block + 16)}, at(block + LANES * 2) {}
    Lanes operator()(int64_t k) const {
        const uint8_t* from = at + k * LANES;
        return {bytes(from) * scale.low, bytes(from + 8) * scale.high};
    }
    static void pack(const uint8_t* row, int64_t first, int64_t, int64_t lane, uint8_t* block) {
        const uint8_t* source = row + first / BLOCK * SOURCE_BLOCK;
        std::memcpy(block + lane * 2, source, 2);
        for (int64_t k = 0; k < BLOCK; ++k) block[LANES * 2 + k * LANES + lane] = source[2 + k];
    }
};

// Q4_1, and Q4_0 as Q4_1 with an offset of -8 scales. Two inputs' nibbles share a byte of the source (k and k + 16);
// here the low nibbles are lanes 0 to 7 and the high ones lanes 8 to 15.
template <bool OFFSET> struct Q4 {
    static constexpr int64_t BYTES = 2 * LANES * 2 + BLOCK * LANES / 2, SOURCE_BLOCK = OFFSET ? 20 : 18;
    const Lanes scale, offset;
    const uint8_t* at;
    explicit Q4(const uint8_t* block)
        : scale{halves(block), halves(block + 16)}, offset{halves(block + 32), halves(block + 48)}, at(block + LANES * 4) {}
    Lanes operator()(int64_t k) const {
        const Lanes items = nibbles(at + k * (LANES / 2));
        return {items.low * scale.low + offset.low, items.high * scale.high + offset.high};
    }
    static void pack(const uint8_t* row, int64_t first, int64_t, int64_t lane, uint8_t* block) {
        const uint8_t* source = row + first / BLOCK * SOURCE_BLOCK;
        const _Float16 scale = read<_Float16>(source);
        const _Float16 offset = OFFSET ? read<_Float16>(source + 2) : static_cast<_Float16>(-8.0f * static_cast<float>(scale));
        std::memcpy(block + lane * 2, &scale, 2);
        std::memcpy(block + LANES * 2 + lane * 2, &offset, 2);
        const uint8_t* nibbles = source + SOURCE_BLOCK - BLOCK / 2;
        for (int64_t k = 0; k < BLOCK; ++k) {
            const uint8_t value = k < BLOCK / 2 ? nibbles[k] & 15 : nibbles[k - BLOCK / 2] >> 4;
            block[LANES * 4 + k * (LANES / 2) + lane % 8] |= lane < 8 ? value : value << 4;
        }
    }
};
typedef Q4<false> Q4_0;
typedef Q4<true> Q4_1;

// A weight [outputs, inputs]: `data` is [tiles of 16 outputs, blocks of 32 inputs, BYTES], padded with zeros.
template <class Format> struct Packed {
    const uint8_t* data;
    int64_t outputs, inputs;
    int64_t tiles() const { return (outputs + LANES - 1) / LANES; }
    int64_t blocks() const { return (inputs + BLOCK - 1) / BLOCK; }
    const uint8_t* block(int64_t tile, int64_t index) const { return data + (tile * blocks() + index) * Format::BYTES; }
};
