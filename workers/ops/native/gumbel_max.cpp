// Samples one token from each row by Gumbel-max, over all tokens; see workers/executor/gumbel_max.py.
//
// A token with weight w = e^((score - largest) / temperature) and uniform number u has the value w / -log(1 - u). Since
// u <= -log(1 - u), a token whose w / u is below the best value so far cannot win. This test uses an upper bound of w,
// linear between powers of two; only tokens that pass it are computed in float64. A result is returned only if it leads by
// far more than the rounding differences between math libraries; the caller decides the others. So the token does not
// depend on the compiler, the CPU or the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr int ROUNDS = 10, GROUP = 64;   // tokens tested at once
constexpr float SLACK = 0.999f;          // more than the float32 rounding of weights and numbers
constexpr double CLEAR = 1.0 - 1e-5;     // the second-best value must be below this part of the best
constexpr float CERTAIN = 0.027f;        // the likeliest token's smallest value: 1 / -log(2^-53)

// Four words of numpy's Philox4x64 stream: those of tokens 4 (counter - 1) and following.
struct Philox {
    uint64_t keys[ROUNDS][2];

    Philox(uint64_t seed, uint64_t position) {
        for (auto& key : keys) {
            key[0] = seed, key[1] = position;
            seed += 0x9E3779B97F4A7C15, position += 0xBB67AE8584CAA73B;
        }
    }

    void words(uint64_t counter, uint64_t* to) const {
        uint64_t a = counter, b = 0, c = 0, d = 0;
#pragma GCC unroll 10
        for (auto& key : keys) {
            auto left = (unsigned __int128)a * 0xD2E7470EE14C6C93, right = (unsigned __int128)c * 0xCA5A826395121157;
            a = uint64_t(right >> 64) ^ b ^ key[0], b = uint64_t(right);
            c = uint64_t(left >> 64) ^ d ^ key[1], d = uint64_t(left);
        }
        to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    }
};

double uniform_of(uint64_t word) { return std::max(double(word >> 11) * 0x1p-53, 0x1p-54); }  // never 0

// The winning token, or -1 if it is too close.
int64_t clear_token(const float* scores, int64_t size, float largest, float temperature, const Philox& philox) {
    if (!std::isfinite(largest)) return -1;
    float slope = 1.44269504f / temperature, lowest = -126.0f / slope, bar = CERTAIN;
    double best = 0.0, second = 0.0;
    int64_t token = -1;
    for (int64_t first = 0; first < size; first += GROUP) {
        uint64_t words[GROUP];
        float bounds[GROUP], rest[GROUP];
        const float* group = scores + first;
        if (size - first < GROUP) {
            std::fill(std::copy(group, scores + size, rest), rest + GROUP, -INFINITY);
            group = rest;
        }
        for (int i = 0; i < GROUP; i += 4) philox.words((first + i) / 4 + 1, words + i);
        int passing = 0;
        for (int i = 0; i < GROUP; i++) {
            float power = std::max(group[i] - largest, lowest) * slope;
            int32_t bits = int32_t((power + 127.0f) * 0x1p23f);  // 1 + f >= 2^f
            float bound;
            std::memcpy(&bound, &bits, sizeof bound);
            bounds[i] = bound - float(int32_t(words[i] >> 33)) * (0x1p-31f * bar);
            passing += bounds[i] >= 0.0f;
        }
        if (!passing) continue;
        for (int i = 0; i < GROUP; i++) {
            if (bounds[i] < 0.0f) continue;
            double weight = std::exp(double((group[i] - largest) / temperature));
            double reached = weight / -std::log1p(-uniform_of(words[i]));
            second = std::max(second, std::min(reached, best));
            if (reached > best) best = reached, token = first + i;
        }
        bar = std::max(bar, float(best) * SLACK);
    }
    return second < best * CLEAR ? token : -1;
}

}  // namespace

extern "C" {

// scores[row]: `size` numbers. tokens[row]: a token, or -1 if only the exact formula can decide.
void diptych_gumbel_max(const float* const* scores, const float* largest, const float* temperatures,
                        const uint64_t* seeds, const uint64_t* positions, int64_t* tokens, int64_t rows, int64_t size,
                        int64_t threads) {
#pragma omp parallel for num_threads(std::max<int64_t>(1, std::min(threads, rows)))
    for (int64_t row = 0; row < rows; row++)
        tokens[row] =
            clear_token(scores[row], size, largest[row], temperatures[row], Philox(seeds[row], positions[row]));
}

// The uniform numbers of tokens 0 ... size - 1.
void diptych_uniforms(double* uniforms, uint64_t seed, uint64_t position, int64_t size) {
    Philox philox(seed, position);
    for (int64_t first = 0; first < size; first += 4) {
        uint64_t words[4];
        philox.words(first / 4 + 1, words);
        for (int64_t i = first; i < std::min(first + 4, size); i++) uniforms[i] = uniform_of(words[i - first]);
    }
}
}
