// Sixteen floats at a time: two vectors of AVX2, and the conversions into them. GCC's vector types give the arithmetic;
// intrinsics stand only where the compiler would convert item by item.
#pragma once
#include <immintrin.h>
#include <cstdint>
#include <cstring>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "these kernels need AVX2, FMA and F16C"
#endif

typedef float f32x8 __attribute__((vector_size(32)));

constexpr int64_t LANES = 16;

template <class V> inline V read(const void* from) {
    V value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

struct Lanes {
    f32x8 low, high;
    void store(float* to) const {
        std::memcpy(to, &low, sizeof low);
        std::memcpy(to + 8, &high, sizeof high);
    }
};

// Eight items from memory as floats.
inline f32x8 floats(const float* from) { return read<f32x8>(from); }
inline f32x8 halves(const void* from) { return _mm256_cvtph_ps(read<__m128i>(from)); }
inline f32x8 brains(const void* from) {  // bf16: the upper half of a float
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(read<__m128i>(from)), 16));
}
inline f32x8 bytes(const void* from) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)))); }

// Eight bytes' low nibbles, and their high ones.
inline Lanes nibbles(const void* from) {
    const __m256i items = _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(items, _mm256_set1_epi32(15))), _mm256_cvtepi32_ps(_mm256_srli_epi32(items, 4))};
}

inline float sum(f32x8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// e^x to about one unit in the last place: 2^n times a polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2] (the classic
// range reduction; coefficients of Cephes' expf). Below -87 it is e^-87, which is nothing in every sum here.
inline f32x8 exponential(f32x8 x) {
    x = _mm256_min_ps(_mm256_max_ps(x, f32x8{} - 87.0f), f32x8{} + 88.0f);
    const f32x8 n = _mm256_round_ps(x * 1.44269504088896341f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const f32x8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    f32x8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * r) * r + r + 1.0f;
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return p * reinterpret_cast<f32x8>(_mm256_castsi256_ps(power));
}
