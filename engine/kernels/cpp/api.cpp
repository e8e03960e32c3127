// What engine/kernels/native.py calls: plain functions on plain memory. Sizes count items, not bytes; arrays are
// contiguous unless a stride is given. Nothing is checked here: the caller has.
#include <new>

#include "attention.h"

namespace {

// Calls `body` with a null pointer of the format that the number names: the order of native.py's FORMATS.
template <class Body> void with_format(int64_t format, const Body& body) {
    switch (format) {
        case 0: return body(static_cast<F32*>(nullptr));
        case 1: return body(static_cast<F16*>(nullptr));
        case 2: return body(static_cast<BF16*>(nullptr));
        case 3: return body(static_cast<Q8_0*>(nullptr));
        case 4: return body(static_cast<Q4_0*>(nullptr));
        case 5: return body(static_cast<Q4_1*>(nullptr));
    }
}

}  // namespace

extern "C" {

// Threads, the caller's included; they live as long as the process.
void* inferd_pool(int64_t threads) { return new Pool(static_cast<int>(threads)); }

int64_t inferd_packed_bytes(int64_t format, int64_t outputs, int64_t inputs) {
    int64_t bytes = 0;
    with_format(format, [&]<class Format>(Format*) {
        const Packed<Format> w{nullptr, outputs, inputs};
        bytes = w.tiles() * w.blocks() * Format::BYTES;
    });
    return bytes;
}

// source: `outputs` rows of `row_bytes` bytes, as in the checkpoint; to: zeros, inferd_packed_bytes of them.
void inferd_pack(void* pool, int64_t format, const uint8_t* source, int64_t row_bytes, int64_t outputs, int64_t inputs,
                 uint8_t* to) {
    with_format(format, [&]<class Format>(Format*) {
        const Packed<Format> w{to, outputs, inputs};
        static_cast<Pool*>(pool)->each(w.tiles(), [&](int64_t tile) {
            for (int64_t lane = 0; lane < LANES && tile * LANES + lane < outputs; ++lane)
                for (int64_t index = 0; index < w.blocks(); ++index)
                    Format::pack(source + (tile * LANES + lane) * row_bytes, index * BLOCK,
                                 std::min(BLOCK, inputs - index * BLOCK), lane, to + (w.block(tile, index) - to));
        });
    });
}

void inferd_product(void* pool, int64_t format, const uint8_t* data, int64_t outputs, int64_t inputs, const float* x,
                    int64_t rows, const float* bias, float* y) {
    with_format(format, [&]<class Format>(Format*) {
        product(*static_cast<Pool*>(pool), Packed<Format>{data, outputs, inputs}, x, rows, bias, y);
    });
}

// Rows `which` of a packed table as floats: to [count, inputs].
void inferd_rows(int64_t format, const uint8_t* data, int64_t outputs, int64_t inputs, const int64_t* which, int64_t count,
                 float* to) {
    with_format(format, [&]<class Format>(Format*) {
        const Packed<Format> w{data, outputs, inputs};
        for (int64_t i = 0; i < count; ++i)
            for (int64_t k = 0; k < inputs; ++k) {
                const Lanes values = Format(w.block(which[i] / LANES, k / BLOCK))(k % BLOCK);
                const int64_t lane = which[i] % LANES;
                to[i * inputs + k] = lane < 8 ? values.low[lane] : values.high[lane - 8];
            }
    });
}

// x / sqrt(mean(x^2) + eps) * weight, for each of `rows` rows of `size`.
void inferd_rms_norm(const float* x, int64_t rows, int64_t size, const float* weight, float eps, float* y) {
    for (int64_t r = 0; r < rows; ++r, x += size, y += size) {
        f32x8 squares = {};
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) squares += floats(x + i) * floats(x + i);
        float mean = sum(squares);
        for (; i < size; ++i) mean += x[i] * x[i];
        const float factor = 1.0f / std::sqrt(mean / static_cast<float>(size) + eps);
        for (i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
    }
}

// gate_up [rows, 2 * size] -> y [rows, size] = silu(first half) * second half
void inferd_silu_mul(const float* gate_up, int64_t rows, int64_t size, float* y) {
    for (int64_t r = 0; r < rows; ++r, gate_up += 2 * size, y += size) {
        int64_t i = 0;
        for (; i + 8 <= size; i += 8) {
            const f32x8 gate = floats(gate_up + i);
            const f32x8 value = gate / (1.0f + exponential(-gate)) * floats(gate_up + size + i);
            std::memcpy(y + i, &value, sizeof value);
        }
        for (; i < size; ++i) y[i] = gate_up[i] / (1.0f + std::exp(-gate_up[i])) * gate_up[size + i];
    }
}

// Rotates `heads` heads of each row of x in place (halves convention); cos and sin [rows, size].
void inferd_rotate(float* x, int64_t rows, int64_t row_stride, int64_t heads, int64_t size, const float* cos,
                   const float* sin) {
    const int64_t half = size / 2;
    for (int64_t r = 0; r < rows; ++r, cos += size, sin += size)
        for (int64_t h = 0; h < heads; ++h) {
            float* low = x + r * row_stride + h * size;
            float* high = low + half;
            for (int64_t i = 0; i < half; ++i) {
                const float a = low[i], b = high[i];
                low[i] = a * cos[i] - b * sin[i];
                high[i] = b * cos[half + i] + a * sin[half + i];
            }
        }
}

// values: rows of `row_stride` floats, [KV heads, size] each -> cache [KV heads, slots, size] at `slots`.
void inferd_store(const float* values, int64_t rows, int64_t row_stride, int64_t kv_heads, int64_t size,
                  const int64_t* slots, float* cache, int64_t head_stride) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < kv_heads; ++h)
            std::memcpy(cache + h * head_stride + slots[r] * size, values + r * row_stride + h * size, size * sizeof(float));
}

// Not 0: there was no memory for the list of its work, and nothing was done.
int inferd_attend(void* pool, const float* keys, const float* values, int64_t head_stride, const int64_t* table,
                   int64_t table_stride, int64_t block_size, int64_t heads, int64_t kv_heads, int64_t size, float scale,
                   int64_t window, const int64_t* spans, int64_t span_count, const float* q, int64_t q_stride, float* out) {
    try {
        attend(*static_cast<Pool*>(pool), Paged{keys, values, head_stride, table, table_stride, block_size},
               Heads{heads, kv_heads, size, scale, window}, reinterpret_cast<const Span*>(spans), span_count, q, q_stride, out);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
}
