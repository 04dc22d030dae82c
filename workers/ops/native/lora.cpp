// Low-rank changes of a linear layer's output, y += (x Aᵀ) B, each row with its own A and B or none.
//
// Each row is computed alone in a fixed order: its bits do not depend on other rows or the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t ALONE = 1 << 14;  // multiplications up to which one thread computes alone
constexpr int LANES = 16;           // partial sums of a dot product

struct Entry {
    const float* a;  // [rank, in]
    const float* b;  // [rank, out]
    int64_t first, out, rank;
};

float dot(const float* x, const float* a, int64_t size) {
    float lanes[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = std::fma(x[i + lane], a[i + lane], lanes[lane]);
    for (int lane = 0; i < size; i++, lane++) lanes[lane] = std::fma(x[i], a[i], lanes[lane]);
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

void change_row(const float* x, float* y, int64_t in, const Entry& entry) {
    float* __restrict__ target = y + entry.first;
    for (int64_t rank = 0; rank < entry.rank; rank++) {
        const float inner = dot(x, entry.a + rank * in, in);
        const float* __restrict__ b = entry.b + rank * entry.out;
        for (int64_t i = 0; i < entry.out; i++) target[i] = std::fma(inner, b[i], target[i]);
    }
}

}  // namespace

// `numbers` [rows]: each row's adapter, or -1; the entries of adapter n are `starts[n]` to `starts[n + 1]`.
extern "C" void diptych_lora(const float* x, int64_t in, float* y, int64_t out, int64_t rows, const int32_t* numbers,
                             const int32_t* starts, const Entry* entries, int64_t threads) {
    int64_t work = rows * (in + out) * 8;
#pragma omp parallel for schedule(dynamic) num_threads(int(std::clamp<int64_t>(work / ALONE, 1, threads)))
    for (int64_t row = 0; row < rows; row++) {
        int32_t number = numbers[row];
        if (number < 0) continue;
        for (int32_t at = starts[number]; at < starts[number + 1]; at++)
            change_row(x + row * in, y + row * out, in, entries[at]);
    }
}
