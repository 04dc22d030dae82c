// Rounds rows of x to 8 bits for integer products.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

// `count` numbers with one scale, then zeros up to `padded`. A number that is not finite makes the scale NaN.
inline void quantize(const float* x, int64_t count, int64_t padded, int8_t* numbers, float& scale, int32_t& sum) {
    uint32_t largest_bits = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        largest_bits = std::max(largest_bits, bits & 0x7fffffff);  // as integers, NaN is the largest
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    bool usable = largest > 1e-30f && std::isfinite(largest);
    int32_t total = 0;
    if (usable) {
        float inverse = 127.0f / largest;
        for (int64_t i = 0; i < count; i++) {
            int32_t number = int32_t(std::nearbyint(x[i] * inverse));
            numbers[i] = int8_t(number);
            total += number;
        }
    }
    std::fill(numbers + (usable ? count : 0), numbers + padded, int8_t(0));
    scale = usable ? largest / 127.0f : largest <= 1e-30f ? 0.0f : NAN;
    sum = total;
}
