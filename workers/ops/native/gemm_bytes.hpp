// Vectors of sums of four byte products, for integer matrix products.
//
// Weights are stored plus BYTE_ZERO, since instructions differ in which factor is unsigned.
#pragma once
#include <cstring>
#include "gemm_lanes.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
using Ints = __m512i;
inline Ints all_ints(int32_t value) { return _mm512_set1_epi32(value); }
inline Ints load_ints(const char* from) { return _mm512_loadu_si512(from); }
inline Floats to_floats(Ints value) { return _mm512_cvtepi32_ps(value); }
inline Ints lower_nibbles(Ints bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline Ints upper_nibbles(Ints bytes) { return lower_nibbles(_mm512_srli_epi16(bytes, 4)); }
inline Floats halves(const char* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline Floats bytes(const char* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
}
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
constexpr int INT_ROW_TILE = 6;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
using Ints = __m256i;
inline Ints all_ints(int32_t value) { return _mm256_set1_epi32(value); }
inline Ints load_ints(const char* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Floats to_floats(Ints value) { return _mm256_cvtepi32_ps(value); }
inline Ints lower_nibbles(Ints bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
inline Ints upper_nibbles(Ints bytes) { return lower_nibbles(_mm256_srli_epi16(bytes, 4)); }
inline Floats halves(const char* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline Floats bytes(const char* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
}
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
constexpr int INT_ROW_TILE = 4;
#else
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
inline Ints all_ints(int32_t value) { return Ints{} + value; }
inline Ints load_ints(const char* from) {
    Ints value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }
inline Ints lower_nibbles(Ints bytes) { return bytes & 0x0f0f0f0f; }
inline Ints upper_nibbles(Ints bytes) { return (bytes >> 4) & 0x0f0f0f0f; }
inline float half_to_float(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                : std::ldexp(float(exponent ? fraction | 1024 : fraction), (exponent ? exponent : 1) - 25);
    return bits >> 15 ? -size : size;
}
inline Floats halves(const char* from) {
    uint16_t bits[LANES];
    std::memcpy(bits, from, sizeof bits);
    Floats value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = half_to_float(bits[lane]);
    return value;
}
inline Floats bytes(const char* from) {
    Floats value;
    for (int lane = 0; lane < LANES; lane++) value[lane] = uint8_t(from[lane]);
    return value;
}
inline Floats times(Floats a, Floats b) { return a * b; }
constexpr int INT_ROW_TILE = 4;
#endif

inline int32_t four_of(const int8_t* x) {
    int32_t numbers;
    std::memcpy(&numbers, x, 4);
    return numbers;
}

// Each lane of `sum` plus its four weights times the four numbers behind `x`; nibbles are weights below 16.
#if defined(__AVX512VNNI__)
constexpr int BYTE_ZERO = 128;
template <bool NIBBLES>
inline Ints add_products(Ints sum, Ints weights, const int8_t* x) {
    return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four_of(x)));
}
#elif defined(__AVX512BW__)
constexpr int BYTE_ZERO = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sum, Ints weights, const int8_t* x) {
    Ints factors = _mm512_set1_epi32(four_of(x)), pairs;
    if constexpr (NIBBLES) {
        pairs = _mm512_maddubs_epi16(weights, factors);
    } else {
        Ints negated = _mm512_mask_sub_epi8(factors, _mm512_movepi8_mask(weights), _mm512_setzero_si512(), factors);
        pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(weights), negated);
    }
    return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#elif defined(__AVXVNNI__)
constexpr int BYTE_ZERO = 128;
template <bool NIBBLES>
inline Ints add_products(Ints sum, Ints weights, const int8_t* x) {
    return _mm256_dpbusd_avx_epi32(sum, weights, _mm256_set1_epi32(four_of(x)));
}
#elif defined(__AVX2__)
constexpr int BYTE_ZERO = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sum, Ints weights, const int8_t* x) {
    Ints factors = _mm256_set1_epi32(four_of(x));
    Ints pairs = NIBBLES ? _mm256_maddubs_epi16(weights, factors)
                         : _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(factors, weights));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
constexpr int BYTE_ZERO = 0;
template <bool NIBBLES>
inline Ints add_products(Ints sum, Ints weights, const int8_t* x) {
    int8_t each[4 * LANES];
    std::memcpy(each, &weights, sizeof each);
    for (int lane = 0; lane < LANES; lane++)
        for (int byte = 0; byte < 4; byte++) sum[lane] += each[4 * lane + byte] * x[byte];
    return sum;
}
#endif
