// y = x W^T + b for W in tiles (packed.h): the only arithmetic that matters, once for all formats.
//
// Every output is one sum over the inputs in their order, however many rows there are: a row's result does not depend, to
// the last bit, on what shares its batch. Speed comes from many sums side by side, never from splitting one.
#pragma once
#include <algorithm>
#include "packed.h"
#include "pool.h"

constexpr int64_t ROWS_AT_ONCE = 6; // 12 accumulators, 2 weights and an input fill the 16 vector registers of AVX2
constexpr int64_t STRIP = 128;      // inputs decoded at once: 8 KiB, so that they stay in the first cache
constexpr int64_t ROW_BLOCK = 96;   // rows that share a decoded strip

// sums[r] += x[r] · b for R rows: b is [count, 16] with `stride` floats from one input to the next.
template <int R>
inline void multiply(const float* x, int64_t x_stride, const float* b, int64_t stride, int64_t count, float* sums,
                     int64_t sums_stride) {
    f32x8 low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        low[r] = read<f32x8>(sums + r * sums_stride);
        high[r] = read<f32x8>(sums + r * sums_stride + 8);
    }
    for (int64_t k = 0; k < count; ++k) {
        const f32x8 left = read<f32x8>(b + k * stride), right = read<f32x8>(b + k * stride + 8);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const float a = x[r * x_stride + k];
            low[r] += a * left;
            high[r] += a * right;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        std::memcpy(sums + r * sums_stride, &low[r], 32);
        std::memcpy(sums + r * sums_stride + 8, &high[r], 32);
    }
}

inline void multiply_rows(int64_t rows, const float* x, int64_t x_stride, const float* b, int64_t stride, int64_t count,
                          float* sums, int64_t sums_stride) {
    for (int64_t r = 0; r < rows; r += ROWS_AT_ONCE) {
        const float* from = x + r * x_stride;
        float* to = sums + r * sums_stride;
        switch (std::min(rows - r, ROWS_AT_ONCE)) {
            case 1: multiply<1>(from, x_stride, b, stride, count, to, sums_stride); break;
            case 2: multiply<2>(from, x_stride, b, stride, count, to, sums_stride); break;
            case 3: multiply<3>(from, x_stride, b, stride, count, to, sums_stride); break;
            case 4: multiply<4>(from, x_stride, b, stride, count, to, sums_stride); break;
            case 5: multiply<5>(from, x_stride, b, stride, count, to, sums_stride); break;
            default: multiply<6>(from, x_stride, b, stride, count, to, sums_stride);
        }
    }
}

// T tiles for a few rows (R <= 4): decoded weights never leave the registers. sums: [T, R, 16].
template <class Format, int R, int T>
inline void straight(const Packed<Format>& w, int64_t tile, const float* x, float* sums) {
    f32x8 low[T][R] = {}, high[T][R] = {};
    for (int64_t index = 0; index < w.blocks(); ++index) {
        const float* from = x + index * BLOCK;
        const int64_t count = std::min(BLOCK, w.inputs - index * BLOCK);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) __builtin_prefetch(w.block(tile + t, index) + 2 * Format::BYTES);
        const Format first(w.block(tile, index)), last(w.block(tile + T - 1, index));
        for (int64_t k = 0; k < count; ++k)
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) {
                const Lanes weights = t == 0 ? first(k) : last(k);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const float a = from[r * w.inputs + k];
                    low[t][r] += a * weights.low;
                    high[t][r] += a * weights.high;
                }
            }
    }
#pragma GCC unroll 2
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) Lanes{low[t][r], high[t][r]}.store(sums + (t * R + r) * LANES);
}

// One tile for many rows, strip by strip.
template <class Format>
inline void by_strips(const Packed<Format>& w, int64_t tile, const float* x, int64_t rows, float* sums) {
    alignas(64) float strip[STRIP * LANES];
    std::fill_n(sums, rows * LANES, 0.0f);
    for (int64_t first = 0; first < w.inputs; first += STRIP) {
        const int64_t count = std::min(STRIP, w.inputs - first);
        for (int64_t at = 0; at < count; at += BLOCK) {
            const Format block(w.block(tile, (first + at) / BLOCK));
            for (int64_t k = 0; k < BLOCK; ++k) block(k).store(strip + (at + k) * LANES);
        }
        multiply_rows(rows, x + first, w.inputs, strip, LANES, count, sums, LANES);
    }
}

// y[r][outputs of `tile`] = sums[r] + bias, for rows of 16 sums.
template <class Format>
inline void write(const Packed<Format>& w, int64_t tile, const float* sums, int64_t rows, const float* bias, float* y) {
    const int64_t first = tile * LANES, wide = std::min(LANES, w.outputs - first);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t lane = 0; lane < wide; ++lane)
            y[r * w.outputs + first + lane] = sums[r * LANES + lane] + (bias ? bias[first + lane] : 0.0f);
}

// Tiles [tile, last) for up to ROW_BLOCK rows.
template <class Format>
inline void run_of_tiles(const Packed<Format>& w, int64_t tile, int64_t last, const float* x, int64_t rows,
                         const float* bias, float* y) {
    alignas(64) float sums[ROW_BLOCK * LANES];
    while (tile < last) {
        const bool two = rows == 1 && tile + 1 < last;
        switch (rows) {
            case 1: two ? straight<Format, 1, 2>(w, tile, x, sums) : straight<Format, 1, 1>(w, tile, x, sums); break;
            case 2: straight<Format, 2, 1>(w, tile, x, sums); break;
            case 3: straight<Format, 3, 1>(w, tile, x, sums); break;
            case 4: straight<Format, 4, 1>(w, tile, x, sums); break;
            default: by_strips(w, tile, x, rows, sums);
        }
        write(w, tile++, sums, rows, bias, y);
        if (two) write(w, tile++, sums + LANES, rows, bias, y);
    }
}

// x [rows, inputs], y [rows, outputs], both contiguous; bias [outputs] or null.
template <class Format>
void product(Pool& pool, const Packed<Format>& w, const float* x, int64_t rows, const float* bias, float* y) {
    const int64_t row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    // A unit is some tiles: enough of them that taking one costs nothing beside doing it, and an even number.
    const int64_t even = 2 * (32768 / (w.inputs * std::min(rows, ROW_BLOCK)));
    const int64_t run = std::max<int64_t>(2, std::min<int64_t>(w.tiles() / 32 * 2, even));
    const int64_t runs = (w.tiles() + run - 1) / run;
    pool.each(runs * row_blocks, [&](int64_t unit) {
        const int64_t begin = unit / runs * ROW_BLOCK, tile = unit % runs * run;
        run_of_tiles(w, tile, std::min(w.tiles(), tile + run), x + begin * w.inputs, std::min(ROW_BLOCK, rows - begin), bias,
                     y + begin * w.outputs);
    });
}
