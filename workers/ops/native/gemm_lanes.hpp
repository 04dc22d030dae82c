// The widest float vectors with fused multiply-add that this CPU has, under one name.
//
// LANES: numbers per vector. A panel of a matrix is two vectors wide. ROW_TILE rows of accumulators fit the registers.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
constexpr int LANES = 16, ROW_TILE = 12;
using Floats = __m512;
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats lower_bfloats(const char* pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline Floats upper_bfloats(const char* pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), _mm512_set1_epi32(0xffff0000)));
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
constexpr int LANES = 8, ROW_TILE = 6;
using Floats = __m256;
inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
inline Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats lower_bfloats(const char* pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)pairs), 16));
}
inline Floats upper_bfloats(const char* pairs) {
    __m256i bits = _mm256_loadu_si256((const __m256i*)pairs);
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xffff0000)));
}
#else
constexpr int LANES = 4, ROW_TILE = 4;
typedef float Floats __attribute__((vector_size(16)));
inline Floats all(float value) { return Floats{value, value, value, value}; }
inline Floats zeros() { return all(0.0f); }
inline Floats load(const float* from) { return Floats{from[0], from[1], from[2], from[3]}; }
inline void store(float* to, Floats value) { for (int lane = 0; lane < LANES; lane++) to[lane] = value[lane]; }
inline Floats fused(Floats a, Floats b, Floats c) {
    Floats sum;
    for (int lane = 0; lane < LANES; lane++) sum[lane] = std::fma(a[lane], b[lane], c[lane]);
    return sum;
}
inline Floats from_bits(const char* pairs, int shift, uint32_t mask) {
    uint32_t bits[LANES];
    std::memcpy(bits, pairs, sizeof bits);
    for (auto& each : bits) each = each << shift & mask;
    Floats numbers;
    std::memcpy(&numbers, bits, sizeof bits);
    return numbers;
}
inline Floats lower_bfloats(const char* pairs) { return from_bits(pairs, 16, 0xffff0000); }
inline Floats upper_bfloats(const char* pairs) { return from_bits(pairs, 0, 0xffff0000); }
#endif

constexpr int PANEL = 2 * LANES;
