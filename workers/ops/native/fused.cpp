// The operations between a layer's matrix products, each in one pass: norms, gates, rotary embedding.
//
// Each row is computed alone in a fixed order: its bits do not depend on other rows or the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t ALONE = 1 << 14;  // numbers up to which one thread computes alone
constexpr int LANES = 16;           // partial sums: enough for all vector widths, and the same on every CPU

int team(int64_t numbers, int64_t threads) {
    return int(std::clamp<int64_t>(numbers / ALONE, 1, threads));
}

// e^x with an error of at most 2 ulp; x is clamped to [-87, 88].
inline __attribute__((always_inline)) float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;  // NaN passes
    float power = std::nearbyint(x * 1.44269504f);
    float rest = std::fma(power, -0.693145752f, x);  // ln 2 in two parts; products with the first are exact
    rest = std::fma(power, -1.42860677e-6f, rest);
    float sum = 1.0f / 5040;
    sum = std::fma(sum, rest, 1.0f / 720);
    sum = std::fma(sum, rest, 1.0f / 120);
    sum = std::fma(sum, rest, 1.0f / 24);
    sum = std::fma(sum, rest, 1.0f / 6);
    sum = std::fma(sum, rest, 0.5f);
    sum = std::fma(sum, rest, 1.0f);
    sum = std::fma(sum, rest, 1.0f);
    int32_t bits = (int32_t(power) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return sum * scale;
}

float sum_of_squares(const float* x, int64_t size) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = std::fma(x[i + lane], x[i + lane], lanes[lane]);
    for (int lane = 0; i < size; i++, lane++) lanes[lane] = std::fma(x[i], x[i], lanes[lane]);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

void norm_row(const float* x, const float* weight, float* y, int64_t size, float eps) {
    float scale = 1.0f / std::sqrt(sum_of_squares(x, size) / float(size) + eps);
    if (weight)
        for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale * weight[i];
    else
        for (int64_t i = 0; i < size; i++) y[i] = x[i] * scale;
}

}  // namespace

extern "C" {

// y = x / rms(x) * weight (null: 1) for rows of `size`.
void diptych_rms_norm(const float* x, int64_t x_stride, const float* weight, float* y, int64_t rows, int64_t size,
                      float eps, int64_t threads) {
#pragma omp parallel for num_threads(team(rows * size, threads))
    for (int64_t row = 0; row < rows; row++) norm_row(x + row * x_stride, weight, y + row * size, size, eps);
}

// sum = x + delta; y = norm(sum).
void diptych_add_rms_norm(const float* x, const float* delta, const float* weight, float* sum, float* y, int64_t rows,
                          int64_t size, float eps, int64_t threads) {
#pragma omp parallel for num_threads(team(rows * size, threads))
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t i = row * size; i < (row + 1) * size; i++) sum[i] = x[i] + delta[i];
        norm_row(sum + row * size, weight, y + row * size, size, eps);
    }
}

// y = activation(gate) * up, where x [rows, 2 * size] holds gate, then up. kind 0: silu; 1: gelu by
// tanh; 2: (up + 1) * gate * sigmoid(1.702 * gate), both clamped.
void diptych_gated(const float* x, float* y, int64_t rows, int64_t size, int64_t kind, int64_t threads) {
#pragma omp parallel for num_threads(team(4 * rows * size, threads))
    for (int64_t row = 0; row < rows; row++) {
        const float *gate = x + row * 2 * size, *up = gate + size;
        float* answer = y + row * size;
        if (kind == 0)
            for (int64_t i = 0; i < size; i++) answer[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
        else if (kind == 2)
            for (int64_t i = 0; i < size; i++) {
                float number = std::min(gate[i], 7.0f);  // NaN passes
                answer[i] = number / (1.0f + exponential(-1.702f * number)) * (std::clamp(up[i], -7.0f, 7.0f) + 1.0f);
            }
        else  // (1 + tanh u) / 2 = 1 / (1 + e^-2u)
            for (int64_t i = 0; i < size; i++) {
                float number = gate[i], twice = number * std::fma(0.0713548163f * number, number, 1.59576912f);
                answer[i] = number / (1.0f + exponential(-twice)) * up[i];
            }
    }
}

// y [tokens, heads, dim]: each pair (x[i], x[i + half]) of x rotated by its token's angle; cos and sin are [tokens, half].
void diptych_rotate(const float* x, int64_t token_stride, int64_t head_stride, const float* cos, const float* sin,
                    float* y, int64_t tokens, int64_t heads, int64_t dim, int64_t half, int64_t threads) {
#pragma omp parallel for num_threads(team(tokens * heads * dim, threads))
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + token * token_stride + head * head_stride, *c = cos + token * half,
                        *s = sin + token * half;
            float* to = y + (token * heads + head) * dim;
            for (int64_t i = 0; i < half; i++) {
                to[i] = from[i] * c[i] - from[half + i] * s[i];
                to[half + i] = from[half + i] * c[i] + from[i] * s[i];
            }
            std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(float));
        }
}
}
