// Attention over a paged pool [block, kv_head, layer, k|v, slot, number], and writing K and V into it. A slot has head_dim
// numbers; in a quantized pool (int8, fp8) their scale follows, a float. With one vector instead of k|v, V is K: a
// latent.
//
//     a job    = one KV head of one sequence, some of its queries; row = query * group + head within the group
//     its keys = tiles of TILE positions, counted from position 0 of the sequence
//
//     each tile:  K transposed, V straight -> scratch, in float32
//                 scores = rows · K  ->  weights = exp(scores - max)  ->  (max, sum, weights · V), a `Partial`
//     then:       the partials of a row are merged in the order of their tiles, as in flash attention
//
// A row's bits depend only on its own query and keys: each score is one chain of fused multiply-adds over the head's
// dimensions, each sum over keys runs in their order, tiles begin at fixed positions, and a masked key adds an exact
// zero. So decodes, prompt chunks, and all batches, chunk sizes and numbers of threads give the same bits.
//
// The merge may begin with another pool's leading tiles, a span: its result is a state (max, sum, values) of each query
// and head, from which the merge of the later tiles continues with the same bits. States may come late: all partials are
// computed first, and the merges that need them wait.
#include <omp.h>
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>
#include "gemm_lanes.hpp"

namespace {

constexpr int64_t TILE = 128;        // keys; a multiple of LANES
constexpr int64_t ROWS = 128;        // per job, at least one query: amortizes transposing K
constexpr int64_t JOBS_A_THREAD = 4; // with fewer, each tile becomes a job of its own
constexpr int64_t ALONE = 1 << 12;   // cost up to which one thread computes alone
constexpr int64_t KEPT = 1 << 22;    // numbers of partials that are kept for merges that wait for states
constexpr float NEVER = -INFINITY;
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_LANES = 4;  // accumulators that fit the registers
#else
constexpr int BLOCK_ROWS = 6, BLOCK_LANES = 2;
#endif
constexpr int64_t KEY_PANEL = BLOCK_LANES * LANES;  // keys whose K fits the L1 cache while all rows are computed

typedef int32_t Ints __attribute__((vector_size(sizeof(Floats))));

inline Ints all_ints(int32_t value) { return Ints{} + value; }

// Number formats of the pool.

struct Float32 {
    float number;
};
struct Bfloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};
struct Int8 {
    static constexpr float LARGEST = 127.0f;
    int8_t number;  // times the slot's scale
};
struct Fp8 {  // e4m3
    static constexpr float LARGEST = 448.0f;
    uint8_t bits;  // times the slot's scale; never NaN
};

template <class Number>
constexpr bool SCALED = std::is_same_v<Number, Int8> || std::is_same_v<Number, Fp8>;
template <class Number>
constexpr int64_t slot_size_of(int64_t head_dim) {  // in numbers
    return head_dim + (SCALED<Number> ? sizeof(float) : 0);
}

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(Float32 from) { return from.number; }
inline float widen(Int8 from) { return from.number; }
inline float widen(Fp8 from) {
    return as_float(uint32_t(from.bits & 0x80) << 24 | as_bits(as_float(uint32_t(from.bits & 0x7f) << 20) * 0x1p120f));
}
inline float widen(Bfloat16 from) { return as_float(uint32_t(from.bits) << 16); }
inline float widen(Float16 from) {
    uint32_t sign = uint32_t(from.bits & 0x8000) << 16, rest = uint32_t(from.bits & 0x7fff) << 13;
    if (rest >= 0x0f800000) return as_float(sign | (rest + 0x70000000));     // infinity or NaN
    return as_float(sign | as_bits(as_float(rest) * 0x1p112f));              // exact, subnormals too
}

inline void narrow(float from, Float32* to) { to->number = from; }
inline void narrow(float from, Bfloat16* to) {
    uint32_t bits = as_bits(from);
    to->bits = std::isnan(from) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float from, Float16* to) {
    uint32_t sign = as_bits(from) >> 16 & 0x8000, size = as_bits(from) & 0x7fffffff;
    if (size > 0x7f800000) {
        to->bits = sign | 0x7e00;
    } else if (size >= 0x477ff000) {  // would round to infinity, which would make the sequence NaN
        to->bits = sign | 0x7bff;
    } else if (size < 0x38800000) {   // subnormal: adding 0.5 rounds at the right bit
        to->bits = sign | (as_bits(as_float(size) + 0.5f) - 0x3f000000);
    } else {
        to->bits = sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
    }
}

// Numbers of a quantized slot are at most LARGEST.
inline void narrow(float from, Int8* to) { to->number = int32_t(std::nearbyint(from)); }
inline void narrow(float from, Fp8* to) {
    uint32_t sign = as_bits(from) >> 24 & 0x80, size = as_bits(from) & 0x7fffffff;
    uint32_t normal = (size - 0x3c000000 + 0x7ffff + (size >> 20 & 1)) >> 20;
    uint32_t subnormal = as_bits(as_float(size) + 0x1p14f) - 0x46800000;  // adding 2^14 rounds at the right bit
    to->bits = sign | (size < 0x3c800000 ? subnormal : normal);
}

template <class Number>
inline void narrow_slot(const float* from, int64_t dim, Number* to) {
    if constexpr (!SCALED<Number>) {
        for (int64_t at = 0; at < dim; at++) narrow(from[at], to + at);
    } else {  // NaN and infinity, which compare as the largest bits, make the scale one of them
        uint32_t most = 0;
        for (int64_t at = 0; at < dim; at++) most = std::max(most, as_bits(from[at]) & 0x7fffffff);
        float scale = as_float(most) * (1.0f / Number::LARGEST);
        scale = scale < FLT_MIN ? FLT_MIN : scale;
        const float factor = 1.0f / scale;
        for (int64_t at = 0; at < dim; at++) {
            float number = from[at] * factor;
            narrow(number == number ? number : 0.0f, to + at);
        }
        std::memcpy(to + dim, &scale, sizeof scale);
    }
}

template <class Number>
inline Floats load_wide(const Number* from) {
    float numbers[LANES];
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = widen(from[lane]);
    return load(numbers);
}
inline Floats load_wide(const Float32* from) { return load(&from->number); }
#if defined(__AVX512F__)
inline Floats load_wide(const Bfloat16* from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
inline Floats load_wide(const Float16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Floats load_wide(const Int8* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline Floats load_wide(const Fp8* from) {  // as float16, 2^8 times smaller
    __m256i bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(int16_t(0xbfff)))) * all(256.0f);
}
#elif defined(__AVX2__)
inline Floats load_wide(const Bfloat16* from) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
inline Floats load_wide(const Int8* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
#if defined(__F16C__)
inline Floats load_wide(const Float16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Floats load_wide(const Fp8* from) {  // as float16, 2^8 times smaller
    __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))), 7);
    return _mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(int16_t(0xbfff)))) * all(256.0f);
}
#endif
#endif

// LANES rows of LANES numbers become columns.
inline void transpose(Floats (&rows)[LANES]) {
#if defined(__AVX512F__)
    Floats pairs[16], quads[16];
    for (int row = 0; row < 16; row += 2) {
        pairs[row] = _mm512_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm512_unpackhi_ps(rows[row], rows[row + 1]);
    }
    auto both = [](Floats a, Floats b, bool high) {
        __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
    for (int row = 0; row < 16; row += 4) {
        for (int half = 0; half < 2; half++) {
            quads[row + 2 * half] = both(pairs[row + half], pairs[row + 2 + half], false);
            quads[row + 2 * half + 1] = both(pairs[row + half], pairs[row + 2 + half], true);
        }
    }
    for (int row = 0; row < 4; row++) {
        Floats even = _mm512_shuffle_f32x4(quads[row], quads[row + 4], 0x88);
        Floats odd = _mm512_shuffle_f32x4(quads[row], quads[row + 4], 0xdd);
        Floats even_end = _mm512_shuffle_f32x4(quads[row + 8], quads[row + 12], 0x88);
        Floats odd_end = _mm512_shuffle_f32x4(quads[row + 8], quads[row + 12], 0xdd);
        rows[row] = _mm512_shuffle_f32x4(even, even_end, 0x88);
        rows[row + 4] = _mm512_shuffle_f32x4(odd, odd_end, 0x88);
        rows[row + 8] = _mm512_shuffle_f32x4(even, even_end, 0xdd);
        rows[row + 12] = _mm512_shuffle_f32x4(odd, odd_end, 0xdd);
    }
#elif defined(__AVX2__)
    Floats pairs[8], quads[8];
    for (int row = 0; row < 8; row += 2) {
        pairs[row] = _mm256_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm256_unpackhi_ps(rows[row], rows[row + 1]);
    }
    for (int row = 0; row < 8; row += 4) {
        for (int half = 0; half < 2; half++) {
            quads[row + 2 * half] = _mm256_shuffle_ps(pairs[row + half], pairs[row + 2 + half], 0x44);
            quads[row + 2 * half + 1] = _mm256_shuffle_ps(pairs[row + half], pairs[row + 2 + half], 0xee);
        }
    }
    for (int row = 0; row < 4; row++) {
        rows[row] = _mm256_permute2f128_ps(quads[row], quads[row + 4], 0x20);
        rows[row + 4] = _mm256_permute2f128_ps(quads[row], quads[row + 4], 0x31);
    }
#else
    for (int row = 0; row < LANES; row++)
        for (int lane = row + 1; lane < LANES; lane++) {
            float kept = rows[row][lane];
            rows[row][lane] = rows[lane][row];
            rows[lane][row] = kept;
        }
#endif
}

// e^x with an error of 1 ulp, exactly 1 at 0, and 0 below -86; x is at most 80.
inline Floats exponential(Floats x) {
    Ints vanishes = x < all(-86.0f);
    x = vanishes ? all(-86.0f) : x;
    const Floats magic = all(12582912.0f);  // adding it leaves the nearest integer in the lowest bits
    Floats shifted = fused(x, all(1.44269504f), magic);
    Floats whole = shifted - magic;
    Floats rest = fused(whole, all(1.90465432e-9f), fused(whole, all(-0.693147182f), x));  // ln 2 in two parts
    Floats power = all(1.9875691500e-4f);
    power = fused(power, rest, all(1.3981999507e-3f));
    power = fused(power, rest, all(8.3334519073e-3f));
    power = fused(power, rest, all(4.1665795894e-2f));
    power = fused(power, rest, all(1.6666665459e-1f));
    power = fused(power, rest, all(5.0000001201e-1f));
    power = fused(power, rest * rest, rest) + all(1.0f);
    Floats scaled = (Floats)((Ints)power + ((Ints)shifted << 23));
    return vanishes ? zeros() : scaled;
}

inline Floats tangent(Floats x) {  // hyperbolic
    Floats size = (Floats)((Ints)x & all_ints(0x7fffffff));
    size = size < all(10.0f) ? size : all(10.0f);
    Floats far = all(1.0f) - all(2.0f) / (exponential(size + size) + all(1.0f));
    far = (Floats)((Ints)far | ((Ints)x & all_ints(0x80000000)));
    Floats square = x * x;
    Floats near = all(-5.70498872745e-3f);
    near = fused(near, square, all(2.06390887954e-2f));
    near = fused(near, square, all(-5.37397155531e-2f));
    near = fused(near, square, all(1.33314422036e-1f));
    near = fused(near, square, all(-3.33332819422e-1f));
    near = fused(near * square, x, x);
    return size < all(0.625f) ? near : far;
}

inline float sum_of(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(value);
#elif defined(__AVX2__)
    __m128 sums = _mm_add_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
    return _mm_cvtss_f32(_mm_add_ss(sums, _mm_movehdup_ps(sums)));
#else
    return (value[0] + value[2]) + (value[1] + value[3]);
#endif
}

inline float max_of(Floats value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(value);
#elif defined(__AVX2__)
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(value), _mm256_extractf128_ps(value, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
#else
    return std::max(std::max(value[0], value[2]), std::max(value[1], value[3]));
#endif
}

// The right operand of a product, row by row: in scratch memory, or in the pool.
struct Dense {
    const float* numbers;
    int64_t stride;
    Floats at(int64_t row, int64_t column) const { return load(numbers + row * stride + column); }
};
template <class Number>
struct Scattered {
    const Number* const* rows;
    int64_t offset;
    Floats at(int64_t row, int64_t column) const { return load_wide(rows[row] + offset + column); }
};

// c [R, N * LANES] = a [R, depth] · b [depth, N * LANES]; each number is one chain over depth.
template <int R, int N, class Matrix>
void multiply(const float* a, int64_t a_stride, Matrix b, int64_t depth, float* c, int64_t c_stride) {
    Floats sums[R][N];
    for (auto& row : sums)
        for (auto& sum : row) sum = zeros();
    for (int64_t k = 0; k < depth; k++) {
        Floats columns[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) columns[n] = b.at(k, n * LANES);
#pragma GCC unroll 6
        for (int row = 0; row < R; row++) {
            Floats factor = all(a[row * a_stride + k]);
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) sums[row][n] = fused(factor, columns[n], sums[row][n]);
        }
    }
    for (int row = 0; row < R; row++)
        for (int n = 0; n < N; n++) store(c + row * c_stride + n * LANES, sums[row][n]);
}

template <class Matrix>
using Multiply = void (*)(const float*, int64_t, Matrix, int64_t, float*, int64_t);

template <int R, class Matrix>
Multiply<Matrix> of_lanes(int64_t lanes) {
    if constexpr (BLOCK_LANES == 4) {
        if (lanes == 4) return multiply<R, 4, Matrix>;
        if (lanes == 3) return multiply<R, 3, Matrix>;
    }
    return lanes == 2 ? multiply<R, 2, Matrix> : multiply<R, 1, Matrix>;
}

template <class Matrix>
Multiply<Matrix> multiplier(int64_t rows, int64_t lanes) {
    switch (rows) {
        case 1: return of_lanes<1, Matrix>(lanes);
        case 2: return of_lanes<2, Matrix>(lanes);
        case 3: return of_lanes<3, Matrix>(lanes);
        case 4: return of_lanes<4, Matrix>(lanes);
        case 5: return of_lanes<5, Matrix>(lanes);
        default: return of_lanes<6, Matrix>(lanes);
    }
}

inline int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

struct Call {
    const float* query;
    int64_t query_token_stride, query_head_stride;
    float* output;  // [tokens, heads, head_dim]
    const void* pool;
    int64_t layer, layers, heads, kv_heads, vectors, block_size, head_dim;
    const int32_t* block_tables;
    int64_t table_stride;
    float scale;
    int64_t window;  // keys that a query sees, its own included; 0: all; -n: those of its own chunk of n positions
    float softcap;
    int64_t slot_size = 0;            // in numbers
    const float* sinks = nullptr;     // [heads]: scores of a last key without a value; null: none
    const int32_t* begins = nullptr;  // [sequences], multiples of TILE: earlier keys are not in the pool; null: all are
    const float* states = nullptr;    // [tokens, heads, 2 + head_dim] of the keys before `begins`, or before the span
    const float* (*wait)() = nullptr; // for the states, which are not there yet; null: they are
    int64_t first = 0;                // position of a span's first key in its sequence
    int64_t span_tiles = 0;           // of a span, which ends before the first query; the output is the state after it

    int64_t group() const { return heads / kv_heads; }
    int64_t wide_dim() const { return round_up(head_dim, LANES); }
    int64_t half_block() const { return block_size * slot_size; }
    int64_t to_value() const { return (vectors - 1) * half_block(); }  // numbers between a token's K and V
};

// Memory of one thread; grows, never shrinks.
struct Scratch {
    std::unique_ptr<float, decltype(&std::free)> memory{nullptr, std::free};
    int64_t size = 0, used = 0;

    void reserve(int64_t numbers) {
        used = 0;
        if (numbers <= size) return;
        size = round_up(numbers, 1024);
        memory.reset(static_cast<float*>(std::aligned_alloc(64, size * sizeof(float))));
    }
    float* take(int64_t numbers) {
        float* begin = memory.get() + used;
        used += round_up(numbers, 16);
        return begin;
    }
};

// Attention of `rows` rows to some of the keys: the largest score, the sum of the weights, and weights · V.
struct Partial {
    float *most, *sum, *values;  // [rows], [rows], [rows, wide_dim]; rows rounded up to LANES

    static int64_t numbers(int64_t rows, int64_t wide_dim) { return round_up(rows, LANES) * (2 + wide_dim); }
    Partial(float* memory, int64_t rows)
        : most(memory), sum(most + round_up(rows, LANES)), values(sum + round_up(rows, LANES)) {}

    void clear(int64_t rows, int64_t wide_dim) {
        std::fill_n(most, round_up(rows, LANES), NEVER);
        std::fill_n(sum, round_up(rows, LANES), 0.0f);
        std::fill_n(values, rows * wide_dim, 0.0f);
    }

    // Merge the partial of later keys into this one.
    void join(const Partial& later, int64_t rows, int64_t wide_dim) {
        for (int64_t first = 0; first < rows; first += LANES) {
            Floats mine = load(most + first), its = load(later.most + first);
            Floats both = mine > its ? mine : its;
            Floats base = both == all(NEVER) ? zeros() : both;
            Floats keep = exponential(mine - base), take = exponential(its - base);
            store(most + first, both);
            store(sum + first, fused(take, load(later.sum + first), keep * load(sum + first)));
            for (int64_t row = first; row < std::min(rows, first + LANES); row++) {
                Floats kept = all(keep[row - first]), taken = all(take[row - first]);
                float* to = values + row * wide_dim;
                const float* from = later.values + row * wide_dim;
                for (int64_t dim = 0; dim < wide_dim; dim += LANES)
                    store(to + dim, fused(taken, load(from + dim), kept * load(to + dim)));
            }
        }
    }
};

// One KV head of one sequence, `queries` of its queries, and tiles [tile, end) of their keys.
struct Job {
    int64_t token, sequence, kv_head, position, queries, tile, end;
    int64_t parts;  // offset of its partials in shared memory, or -1: the job has all tiles of its queries

    int64_t rows(const Call& call) const { return queries * call.group(); }
    int64_t cost(const Call& call) const { return (end - tile) * TILE * (rows(call) + 16); }
};

// Positions of keys that a row attends to: [low, high).
struct Range {
    int64_t low, high;
    Range within(int64_t tile) const {  // relative to the tile
        return {std::clamp<int64_t>(low - tile * TILE, 0, TILE), std::clamp<int64_t>(high - tile * TILE, 0, TILE)};
    }
};

inline Range seen(const Call& call, int64_t position) {
    int64_t low = 0;
    if (call.window > 0) low = position - call.window + 1;
    if (call.window < 0) low = position - (call.first + position) % -call.window;
    return {std::max<int64_t>(0, low), position + 1};
}

struct Workspace {
    float *query, *keys, *values, *scores;  // [rows, dim], [dim, KEY_PANEL], [TILE, wide_dim], [rows, TILE]
    Partial part, all;

    static int64_t numbers(const Call& call, int64_t rows) {
        int64_t dim = call.wide_dim();
        return rows * (dim + TILE) + 2 * dim * TILE + 2 * Partial::numbers(rows, dim) + 8 * 16;
    }
    Workspace(Scratch& scratch, const Call& call, int64_t rows)
        : query(scratch.take(rows * call.wide_dim())),
          keys(scratch.take(call.wide_dim() * KEY_PANEL)),
          values(scratch.take(TILE * call.wide_dim())),
          scores(scratch.take(rows * TILE)),
          part(scratch.take(Partial::numbers(rows, call.wide_dim())), rows),
          all(scratch.take(Partial::numbers(rows, call.wide_dim())), rows) {}
};

inline int64_t state_at(const Call& call, const Job& job, int64_t row) {
    int64_t token = job.token + row / call.group(), head = job.kv_head * call.group() + row % call.group();
    return (token * call.heads + head) * (2 + call.head_dim);
}

// Set `all` to the partials of the keys before the job's first tile.
void begin_merge(const Call& call, const Job& job, Partial& all) {
    all.clear(job.rows(call), call.wide_dim());
    if (call.states == nullptr || (call.begins != nullptr && call.begins[job.sequence] == 0)) return;
    for (int64_t row = 0; row < job.rows(call); row++) {
        const float* from = call.states + state_at(call, job, row);
        all.most[row] = from[0];
        all.sum[row] = from[1];
        std::copy_n(from + 2, call.head_dim, all.values + row * call.wide_dim());
    }
}

void write_state(const Call& call, const Job& job, const Partial& all) {
    for (int64_t row = 0; row < job.rows(call); row++) {
        float* to = call.output + state_at(call, job, row);
        to[0] = all.most[row];
        to[1] = all.sum[row];
        std::copy_n(all.values + row * call.wide_dim(), call.head_dim, to + 2);
    }
}

void gather_queries(const Call& call, const Job& job, float* query) {
    for (int64_t row = 0; row < job.rows(call); row++) {
        int64_t token = job.token + row / call.group(), head = job.kv_head * call.group() + row % call.group();
        const float* from = call.query + token * call.query_token_stride + head * call.query_head_stride;
        for (int64_t dim = 0; dim < call.head_dim; dim++) query[row * call.head_dim + dim] = from[dim] * call.scale;
    }
}

// Pointers to the K of each position that the job attends to, from its first tile on. Others are not set.
template <class Number>
void find_keys(const Call& call, const Job& job, const Number** keys) {
    const int32_t* table = call.block_tables + job.sequence * call.table_stride;
    const int64_t begin = job.tile * TILE, first = std::max(begin, seen(call, job.position).low);
    const int64_t last = std::min(job.end * TILE, job.position + job.queries) - 1;
    for (int64_t position = first; position <= last;) {
        int64_t block = position / call.block_size, slot = position % call.block_size;
        int64_t half = ((table[block] * call.kv_heads + job.kv_head) * call.layers + call.layer) * call.vectors;
        auto key = static_cast<const Number*>(call.pool) + half * call.half_block();
        for (; slot < call.block_size && position <= last; slot++, position++)
            keys[position - begin] = key + slot * call.slot_size;
    }
}

inline void prefetch(const void* begin, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += 64) __builtin_prefetch(static_cast<const char*>(begin) + at, 0, 2);
}

// Transpose K of `keys` into `to` [dim, PANEL]. Unused columns hold another key.
template <class Number>
void transpose_keys(const Number* const* keys, Range range, int64_t dim, float* to) {
    for (int64_t first = range.low / LANES * LANES; first < range.high; first += LANES) {
        const Number* from[LANES];
        for (int lane = 0; lane < LANES; lane++) from[lane] = keys[std::clamp(first + lane, range.low, range.high - 1)];
        int64_t column = 0;
        for (; column + LANES <= dim; column += LANES) {
            Floats rows[LANES];
            for (int lane = 0; lane < LANES; lane++) rows[lane] = load_wide(from[lane] + column);
            transpose(rows);
            for (int lane = 0; lane < LANES; lane++) store(to + (column + lane) * KEY_PANEL + first, rows[lane]);
        }
        for (; column < dim; column++)
            for (int lane = 0; lane < LANES; lane++) to[column * KEY_PANEL + first + lane] = widen(from[lane][column]);
    }
}

template <class Number>
void copy_values(const Number* const* keys, Range range, int64_t offset, int64_t dim, float* to, int64_t wide) {
    for (int64_t key = range.low; key < range.high; key++) {
        const Number* from = keys[key] + offset;
        int64_t column = 0;
        for (; column + LANES <= dim; column += LANES) store(to + key * wide + column, load_wide(from + column));
        for (; column < dim; column++) to[key * wide + column] = widen(from[column]);
        for (; column < wide; column++) to[key * wide + column] = 0.0f;
    }
}

// Scales of K and V of a tile's keys; 0 for those that no row attends to.
struct Scales {
    float keys[TILE] = {}, values[TILE] = {};

    template <class Number>
    Scales(const Call& call, const Number* const* rows, Range visible) {
        for (int64_t key = visible.low; key < visible.high; key++) {
            std::memcpy(keys + key, rows[key] + call.head_dim, sizeof(float));
            std::memcpy(values + key, rows[key] + call.to_value() + call.head_dim, sizeof(float));
        }
    }
};
struct Unscaled {
    template <class Number>
    Unscaled(const Call&, const Number* const*, Range) {}
};

// Turn the scores [0, high) of one row into weights; masked keys weigh 0. Scores are scaled as K is, weights as V.
template <class ScalesOfTile>
inline void weigh(const Call& call, float* scores, Range keys, int64_t width, const ScalesOfTile& scales,
                  float* most_of_row, float* sum_of_row) {
    constexpr bool is_scaled = std::is_same_v<ScalesOfTile, Scales>;
    Ints lane_at;
    for (int lane = 0; lane < LANES; lane++) lane_at[lane] = lane;
    Floats most = all(NEVER);
    for (int64_t key = 0; key < width; key += LANES) {
        Floats score = load(scores + key);
        if constexpr (is_scaled) score = score * load(scales.keys + key);
        if (call.softcap != 0.0f) score = all(call.softcap) * tangent(score / all(call.softcap));
        if (key < keys.low || key + LANES > keys.high) {
            Ints at = lane_at + int32_t(key);
            score = (at >= int32_t(keys.low)) & (at < int32_t(keys.high)) ? score : all(NEVER);
        }
        store(scores + key, score);
        most = most > score ? most : score;
    }
    float greatest = max_of(most);
    Floats base = all(greatest == NEVER ? 0.0f : greatest), sum = zeros();
    for (int64_t key = 0; key < width; key += LANES) {
        Floats weight = exponential(load(scores + key) - base);
        sum += weight;
        if constexpr (is_scaled) weight = weight * load(scales.values + key);
        store(scores + key, weight);
    }
    *most_of_row = greatest;
    *sum_of_row = sum_of(sum);
}

template <class Number>
void attend_tile(const Call& call, const Job& job, int64_t tile, const Number* const* keys, Workspace& work,
                 Partial& part) {
    const int64_t rows = job.rows(call), group = call.group(), dim = call.head_dim, wide = call.wide_dim();
    auto keys_of = [&](int64_t row) { return seen(call, job.position + row / group).within(tile); };
    const Range visible{keys_of(0).low, keys_of(rows - 1).high};
    keys += (tile - job.tile) * TILE;

    for (int64_t panel = 0; panel < TILE; panel += KEY_PANEL) {
        const Range inside{std::max(visible.low - panel, int64_t(0)), std::min(visible.high - panel, KEY_PANEL)};
        if (inside.low >= inside.high) continue;
        for (int64_t key = panel + inside.low; key < panel + inside.high; key++) {
            prefetch(keys[key], call.slot_size * sizeof(Number));  // one key at a time would not use the memory's bandwidth
            prefetch(keys[key] + call.to_value(), call.slot_size * sizeof(Number));
        }
        transpose_keys(keys + panel, inside, dim, work.keys);
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
            int64_t height = std::min<int64_t>(BLOCK_ROWS, rows - row);
            int64_t low = keys_of(row).low, high = keys_of(row + height - 1).high;
            if (high <= panel || low >= panel + KEY_PANEL || low >= high) continue;
            int64_t lanes = std::min<int64_t>(BLOCK_LANES, (high - panel + LANES - 1) / LANES);
            multiplier<Dense>(height, lanes)(work.query + row * dim, dim, {work.keys, KEY_PANEL}, dim,
                                             work.scores + row * TILE + panel, TILE);
        }
    }
    const std::conditional_t<SCALED<Number>, Scales, Unscaled> scales(call, keys, visible);
    for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        int64_t height = std::min<int64_t>(BLOCK_ROWS, rows - row);
        int64_t width = round_up(keys_of(row + height - 1).high, LANES);
        for (int64_t each = row; each < row + height; each++)
            weigh(call, work.scores + each * TILE, keys_of(each), width, scales, part.most + each, part.sum + each);
    }
    const bool in_place = rows <= BLOCK_ROWS && dim == wide;
    if (!in_place) copy_values(keys, visible, call.to_value(), dim, work.values, wide);
    for (int64_t column = 0; column < wide; column += BLOCK_LANES * LANES)
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
            int64_t height = std::min<int64_t>(BLOCK_ROWS, rows - row);
            int64_t low = keys_of(row).low, depth = std::max<int64_t>(0, keys_of(row + height - 1).high - low);
            int64_t lanes = std::min<int64_t>(BLOCK_LANES, (wide - column) / LANES);
            const float* weights = work.scores + row * TILE + low;
            float* to = part.values + row * wide + column;
            if (in_place) {
                Scattered<Number> values{keys + low, call.to_value() + column};
                multiplier<Scattered<Number>>(height, lanes)(weights, TILE, values, depth, to, wide);
            } else {
                Dense values{work.values + low * wide + column, wide};
                multiplier<Dense>(height, lanes)(weights, TILE, values, depth, to, wide);
            }
        }
}

void write_output(const Call& call, const Job& job, const Partial& all) {
    if (call.span_tiles > 0) return write_state(call, job, all);
    for (int64_t row = 0; row < job.rows(call); row++) {
        int64_t token = job.token + row / call.group(), head = job.kv_head * call.group() + row % call.group();
        const float* from = all.values + row * call.wide_dim();
        float* to = call.output + (token * call.heads + head) * call.head_dim;
        float share = 1.0f / all.sum[row];
        if (call.sinks != nullptr) {
            const float above = all.most[row] - call.sinks[head], less = std::exp(-std::fabs(above));
            share = above > 0.0f ? 1.0f / (all.sum[row] + less) : less / (all.sum[row] * less + 1.0f);
        }
        for (int64_t dim = 0; dim < call.head_dim; dim++) to[dim] = from[dim] * share;
    }
}

template <class Number>
void run(const Call& call, const Job& job, float* shared) {
    thread_local Scratch scratch;
    thread_local std::vector<const Number*> keys;
    const int64_t rows = job.rows(call), wide = call.wide_dim();
    scratch.reserve(Workspace::numbers(call, rows));
    Workspace work(scratch, call, rows);
    gather_queries(call, job, work.query);
    keys.resize((job.end - job.tile) * TILE);
    find_keys(call, job, keys.data());
    if (job.parts >= 0) {
        Partial part(shared + job.parts, rows);
        attend_tile(call, job, job.tile, keys.data(), work, part);
        return;
    }
    begin_merge(call, job, work.all);
    for (int64_t tile = job.tile; tile < job.end; tile++) {
        attend_tile(call, job, tile, keys.data(), work, work.part);
        work.all.join(work.part, rows, wide);
    }
    write_output(call, job, work.all);
}

// Merge the partials of a job that was split into tiles, in order.
void join_parts(const Call& call, const Job& job, float* shared) {
    const int64_t rows = job.rows(call), wide = call.wide_dim();
    std::vector<float> memory(Partial::numbers(rows, wide));
    Partial all(memory.data(), rows);
    begin_merge(call, job, all);
    for (int64_t tile = job.tile; tile < job.end; tile++) {
        Partial part(shared + job.parts + (tile - job.tile) * Partial::numbers(rows, wide), rows);
        all.join(part, rows, wide);
    }
    write_output(call, job, all);
}

std::vector<Job> jobs_of(const Call& call, const int32_t* query_starts, const int32_t* context_lens, int64_t sequences) {
    std::vector<Job> jobs;
    const int64_t step = std::max<int64_t>(1, ROWS / call.group());
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
        int64_t start = query_starts[sequence], length = query_starts[sequence + 1] - start;
        int64_t position = context_lens[sequence] - length;
        for (int64_t first = 0; first < length; first += step) {
            int64_t queries = std::min(step, length - first), at = position + first;
            int64_t tile = seen(call, at).low / TILE, end = (at + queries - 1) / TILE + 1;
            if (call.begins != nullptr) tile = std::max<int64_t>(tile, call.begins[sequence] / TILE);
            if (call.span_tiles > 0) end = call.span_tiles, tile = std::min(tile, end);
            Job job{start + first, sequence, 0, at, queries, tile, end, -1};
            for (job.kv_head = 0; job.kv_head < call.kv_heads; job.kv_head++) jobs.push_back(job);
        }
    }
    return jobs;
}

template <class Number>
void attend(Call call, const int32_t* query_starts, const int32_t* context_lens, int64_t sequences) {
    call.slot_size = slot_size_of<Number>(call.head_dim);
    std::vector<Job> whole = jobs_of(call, query_starts, context_lens, sequences), jobs, last;
    int64_t work = 0, numbers = 0;
    for (const Job& job : whole) work += job.cost(call);
    const int threads = work <= ALONE ? 1 : omp_get_max_threads();
    const bool few = threads > 1 && int64_t(whole.size()) < threads * JOBS_A_THREAD;
    for (Job& job : whole) {
        const bool waits = call.wait != nullptr && call.begins[job.sequence] > 0;
        const int64_t part = Partial::numbers(job.rows(call), call.wide_dim());
        if (few || (waits && numbers + (job.end - job.tile) * part <= KEPT)) {
            job.parts = numbers;
            for (Job piece = job; piece.tile < job.end; piece.tile++, numbers += part) {
                piece.end = piece.tile + 1;
                piece.parts = numbers;
                jobs.push_back(piece);
            }
        }
        (waits || job.parts >= 0 ? last : jobs).push_back(job);
    }
    std::stable_sort(jobs.begin(), jobs.end(), [&](const Job& a, const Job& b) { return a.cost(call) > b.cost(call); });
    thread_local Scratch kept;
    kept.reserve(numbers);
    float* shared = kept.take(numbers);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (size_t at = 0; at < jobs.size(); at++) run<Number>(call, jobs[at], shared);
        if (call.wait != nullptr) {
#pragma omp master
            call.states = call.wait();
#pragma omp barrier
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t at = 0; at < last.size(); at++) {
            if (last[at].parts >= 0) join_parts(call, last[at], shared);
            else run<Number>(call, last[at], shared);
        }
    }
}

template <class Number>
void write(const float* key, const float* value, int64_t key_stride, int64_t value_stride, void* pool, int64_t layer,
           int64_t layers, int64_t kv_heads, int64_t vectors, int64_t block_size, int64_t head_dim,
           const int64_t* slots, int64_t tokens) {
    const int64_t slot_size = slot_size_of<Number>(head_dim);
#pragma omp parallel for schedule(static) if (tokens >= 64)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < kv_heads; head++) {
            int64_t block = slots[token] / block_size, slot = slots[token] % block_size;
            int64_t half = ((block * kv_heads + head) * layers + layer) * vectors;
            Number* to = static_cast<Number*>(pool) + (half * block_size + slot) * slot_size;
            narrow_slot(key + token * key_stride + head * head_dim, head_dim, to);
            if (vectors == 2)
                narrow_slot(value + token * value_stride + head * head_dim, head_dim, to + block_size * slot_size);
        }
}

void attend_to(int64_t kind, const Call& call, const int32_t* query_starts, const int32_t* context_lens,
               int64_t sequences) {
    if (kind == 0) attend<Float32>(call, query_starts, context_lens, sequences);
    if (kind == 1) attend<Bfloat16>(call, query_starts, context_lens, sequences);
    if (kind == 2) attend<Float16>(call, query_starts, context_lens, sequences);
    if (kind == 3) attend<Int8>(call, query_starts, context_lens, sequences);
    if (kind == 4) attend<Fp8>(call, query_starts, context_lens, sequences);
}

}  // namespace

// `kind` of the pool's numbers: 0 float32, 1 bfloat16, 2 float16, 3 int8, 4 fp8. Strides count numbers; the last axis
// is dense.
// `wait` returns the states of sequences with `begins`, and is called on the caller's thread; null: all keys are here.

extern "C" const int64_t diptych_attention_tile = TILE;

extern "C" void diptych_attend(const float* query, int64_t query_token_stride, int64_t query_head_stride, float* output,
                               int64_t heads, const void* pool, int64_t kind, int64_t layer, int64_t layers,
                               int64_t kv_heads, int64_t vectors, int64_t block_size, int64_t head_dim,
                               const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                               int64_t table_stride, int64_t sequences, float scale, int64_t window, float softcap,
                               const float* sinks, const int32_t* begins, const float* (*wait)()) {
    Call call{query,  query_token_stride, query_head_stride, output,       pool,         layer, layers, heads, kv_heads,
              vectors, block_size, head_dim, block_tables, table_stride, scale, window, softcap};
    call.sinks = sinks;
    call.begins = begins;
    call.wait = wait;
    attend_to(kind, call, query_starts, context_lens, sequences);
}

// `position` of the first of `tokens` queries, counted from the span's first key, which is the sequence's key `first`.
// `num_keys` is a multiple of TILE.
extern "C" void diptych_attend_span(const float* query, int64_t query_token_stride, int64_t query_head_stride,
                                    float* output, int64_t heads, const void* pool, int64_t kind, int64_t layer,
                                    int64_t layers, int64_t kv_heads, int64_t vectors, int64_t block_size,
                                    int64_t head_dim, int64_t tokens, int64_t position, int64_t first,
                                    const int32_t* block_table, int64_t num_keys, float scale, int64_t window,
                                    float softcap, const float* states) {
    Call call{query,  query_token_stride, query_head_stride, output, pool,  layer,  layers, heads, kv_heads,
              vectors, block_size, head_dim, block_table, 0, scale, window, softcap};
    call.states = states;
    call.first = first;
    call.span_tiles = num_keys / TILE;
    const int32_t query_starts[] = {0, int32_t(tokens)}, context_len = int32_t(position + tokens);
    attend_to(kind, call, query_starts, &context_len, 1);
}

extern "C" void diptych_write_kv(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                 void* pool, int64_t kind, int64_t layer, int64_t layers, int64_t kv_heads,
                                 int64_t vectors, int64_t block_size, int64_t head_dim, const int64_t* slots,
                                 int64_t tokens) {
    constexpr decltype(&write<Int8>) kinds[] = {write<Float32>, write<Bfloat16>, write<Float16>, write<Int8>, write<Fp8>};
    kinds[kind](key, value, key_stride, value_stride, pool, layer, layers, kv_heads, vectors, block_size, head_dim,
                  slots, tokens);
}
