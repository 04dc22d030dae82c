// Low-rank changes of a linear layer's output, y += (x A) B, each row with its own A and B or none.
//
// Each number is one chain of fused multiply-adds in a fixed order: its bits do not depend on other rows, on the position
// of the row, or on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include "gemm_lanes.hpp"

namespace {

constexpr int64_t MAX_RANK = 256, ALONE = 1 << 16;  // multiplications up to which one thread computes alone

struct Entry {
    const float* a;  // [in, rank rounded up to 16]
    const float* b;  // [rank, out]
    int64_t first, out, rank;
};

// y[row] += x[row] · w for ROWS rows of `depth` numbers and w [depth, columns].
template <int ROWS>
void add_product(const float* const* x, const float* w, int64_t depth, int64_t columns, float* const* y) {
    int64_t column = 0;
    for (; column + LANES <= columns; column += LANES) {
        Floats sums[ROWS];
        for (int row = 0; row < ROWS; row++) sums[row] = load(y[row] + column);
        for (int64_t k = 0; k < depth; k++) {
            Floats weights = load(w + k * columns + column);
#pragma GCC unroll 12
            for (int row = 0; row < ROWS; row++) sums[row] = fused(all(x[row][k]), weights, sums[row]);
        }
        for (int row = 0; row < ROWS; row++) store(y[row] + column, sums[row]);
    }
    for (; column < columns; column++)
        for (int row = 0; row < ROWS; row++)
            for (int64_t k = 0; k < depth; k++)
                y[row][column] = std::fma(x[row][k], w[k * columns + column], y[row][column]);
}

template <int ROWS = ROW_TILE>
void add_products(int64_t rows, const float* const* x, const float* w, int64_t depth, int64_t columns,
                  float* const* y) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return add_products<ROWS - 1>(rows, x, w, depth, columns, y);
    add_product<ROWS>(x, w, depth, columns, y);
}

void change(const float* x, int64_t in, float* y, int64_t out, const int32_t* rows, int64_t count,
            const Entry& entry) {
    int64_t width = (entry.rank + 15) / 16 * 16;
    alignas(64) float inner[ROW_TILE * MAX_RANK];
    std::memset(inner, 0, count * width * sizeof(float));
    const float *from[ROW_TILE], *between[ROW_TILE];
    float *shrunk[ROW_TILE], *to[ROW_TILE];
    for (int64_t row = 0; row < count; row++) {
        from[row] = x + rows[row] * in;
        between[row] = shrunk[row] = inner + row * width;
        to[row] = y + rows[row] * out + entry.first;
    }
    add_products(count, from, entry.a, in, width, shrunk);
    add_products(count, between, entry.b, entry.rank, entry.out, to);
}

}  // namespace

// `rows`: those with an adapter, sorted by it; `numbers`: the adapter of each of these. The entries of adapter n are
// `starts[n]` to `starts[n + 1]`.
extern "C" void diptych_lora(const float* x, int64_t in, float* y, int64_t out, const int32_t* rows,
                             const int32_t* numbers, int64_t count, const int32_t* starts, const Entry* entries,
                             int64_t threads) {
    std::vector<int64_t> tiles;  // where each begins: up to ROW_TILE rows with the same adapter
    for (int64_t row = 0; row < count; row++)
        if (!row || numbers[row] != numbers[row - 1] || row - tiles.back() == ROW_TILE) tiles.push_back(row);
    tiles.push_back(count);
    int64_t work = count * (in + out) * 16, num_tiles = int64_t(tiles.size()) - 1;
#pragma omp parallel for schedule(dynamic) num_threads(int(std::clamp<int64_t>(work / ALONE, 1, threads)))
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        int64_t row = tiles[tile];
        for (int32_t at = starts[numbers[row]]; at < starts[numbers[row] + 1]; at++)
            change(x, in, y, out, rows + row, tiles[tile + 1] - row, entries[at]);
    }
}
