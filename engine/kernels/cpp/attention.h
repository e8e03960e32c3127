// Causal attention over the paged cache, for the one query of a decode step as for the many of a prefill: blocks of
// queries meet runs of sixteen keys; the softmax is kept up to date as keys come (arXiv:1805.02867), so that no row of
// scores is ever held, and a query's result does not depend on how its prompt was cut. The keys are read where they lie: a position's slot is looked up in the sequence's block table.
#pragma once
#include <cmath>
#include "product.h"

constexpr int64_t KEYS = LANES;        // positions at once
constexpr int64_t QUERIES = 96;        // rows (query, head of the group) of one unit of work at most
constexpr int64_t MOST_HEAD_SIZE = 256;

struct Span {  // one sequence's part of a step, as the runner writes it
    int64_t begin, count, start, row;
};

struct Paged {  // one layer's cache, [KV heads, slots, size] twice, and how positions are found in it
    const float *keys, *values;
    int64_t head_stride;  // floats from one KV head to the next
    const int64_t* table; // [rows, table_stride]: block of a row's n-th run of positions
    int64_t table_stride, block_size;
};

struct Heads {
    int64_t all, kv, size;
    float scale;
    int64_t window;  // 0: none
};

// sums [rows, 16] = q [rows, size] · the sixteen keys at `from`
inline void scores(const float* q, int64_t rows, int64_t size, const float* const* from, float* turned, float* sums) {
    for (int64_t key = 0; key < KEYS; ++key)
        for (int64_t d = 0; d < size; ++d) turned[d * KEYS + key] = from[key][d];
    std::fill_n(sums, rows * KEYS, 0.0f);
    multiply_rows(rows, q, size, turned, KEYS, size, sums, KEYS);
}

// Attention of `count` queries of one KV head's group, from `first` of the span on.
inline void attend_unit(const Paged& cache, const Heads& heads, const Span& span, int64_t kv_head, int64_t first,
                        int64_t count, const float* q, int64_t q_stride, float* out) {
    const int64_t size = heads.size, group = heads.all / heads.kv, rows = count * group;
    alignas(64) float mine[QUERIES * MOST_HEAD_SIZE], sums[QUERIES * MOST_HEAD_SIZE];
    alignas(64) float weights[QUERIES * KEYS], turned[MOST_HEAD_SIZE * KEYS], gathered[KEYS * MOST_HEAD_SIZE];
    float greatest[QUERIES], total[QUERIES];
    for (int64_t r = 0; r < rows; ++r) {
        const float* from = q + (span.begin + first + r / group) * q_stride + (kv_head * group + r % group) * size;
        for (int64_t d = 0; d < size; ++d) mine[r * size + d] = from[d] * heads.scale;
        greatest[r] = -INFINITY;
        total[r] = 0.0f;
    }
    std::fill_n(sums, rows * size, 0.0f);
    const float* keys = cache.keys + kv_head * cache.head_stride;
    const float* values = cache.values + kv_head * cache.head_stride;
    const int64_t* table = cache.table + span.row * cache.table_stride;
    const int64_t end = span.start + first + count;  // no query here looks further
    // Runs of keys begin at multiples of KEYS, so that a query meets the same runs whatever its neighbours are.
    const int64_t oldest = heads.window ? std::max<int64_t>(0, span.start + first + 1 - heads.window) / KEYS * KEYS : 0;
    for (int64_t at = oldest; at < end; at += KEYS) {
        const int64_t wide = std::min(KEYS, end - at);
        const float* from[KEYS];
        for (int64_t key = 0; key < KEYS; ++key) {
            const int64_t position = at + std::min(key, wide - 1);  // past the end: any valid key, masked below
            const int64_t slot = table[position / cache.block_size] * cache.block_size + position % cache.block_size;
            from[key] = keys + slot * size;
            std::memcpy(gathered + key * size, values + slot * size, size * sizeof(float));
        }
        scores(mine, rows, size, from, turned, weights);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t position = span.start + first + r / group;
            float* row = weights + r * KEYS;
            const int64_t low = heads.window ? std::max<int64_t>(0, position + 1 - heads.window - at) : 0;
            const int64_t high = std::min(wide, position + 1 - at);
            for (int64_t key = 0; key < KEYS; ++key)
                if (key < low || key >= high) row[key] = -INFINITY;
            float most = greatest[r];
            for (int64_t key = 0; key < KEYS; ++key) most = std::max(most, row[key]);
            if (most == -INFINITY) {  // nothing seen yet
                std::fill_n(row, KEYS, 0.0f);
                continue;
            }
            const Lanes e = {exponential(floats(row) - most), exponential(floats(row + 8) - most)};
            e.store(row);
            for (int64_t key = 0; key < KEYS; ++key)
                if (key < low || key >= high) row[key] = 0.0f;
            if (most > greatest[r]) {
                const float shrink = greatest[r] == -INFINITY ? 0.0f : std::exp(greatest[r] - most);
                total[r] *= shrink;
                for (int64_t d = 0; d < size; ++d) sums[r * size + d] *= shrink;
                greatest[r] = most;
            }
            total[r] += sum(floats(row) + floats(row + 8));
        }
        for (int64_t d = 0; d < size; d += LANES) multiply_rows(rows, weights, KEYS, gathered + d, size, KEYS, sums + d, size);
    }
    for (int64_t r = 0; r < rows; ++r) {
        float* to = out + (span.begin + first + r / group) * heads.all * size + (kv_head * group + r % group) * size;
        for (int64_t d = 0; d < size; ++d) to[d] = sums[r * size + d] / total[r];
    }
}

// q: rows of `q_stride` floats, queries' heads first; out [T, heads, size].
inline void attend(Pool& pool, const Paged& cache, const Heads& heads, const Span* spans, int64_t span_count,
                   const float* q, int64_t q_stride, float* out) {
    struct Unit {
        const Span* span;
        int64_t kv_head, first, count;
    };
    std::vector<Unit> units;
    const int64_t most = std::max<int64_t>(1, QUERIES / (heads.all / heads.kv) / 4);  // 24 rows: units enough for all
    for (int64_t s = 0; s < span_count; ++s)
        for (int64_t first = 0; first < spans[s].count; first += most)
            for (int64_t head = 0; head < heads.kv; ++head)
                units.push_back({&spans[s], head, first, std::min(most, spans[s].count - first)});
    pool.each(static_cast<int64_t>(units.size()), [&](int64_t i) {
        const Unit& u = units[i];
        attend_unit(cache, heads, *u.span, u.kv_head, u.first, u.count, q, q_stride, out);
    });
}
