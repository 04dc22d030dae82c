// The gated delta rule over paged state, and the causal convolution before it. See delta_rule.py for the formulas.
//
// State is computed in the block where it stays. A head (or KV head) of a sequence is computed by one thread, token
// after token: its bits do not depend on other sequences, on threads, or on how the prompt was cut.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct Paged {
    float* states;
    int64_t block_stride, head_stride;
    const int32_t *starts, *contexts, *tables;
    int64_t table_stride, block_size;

    float* state(int64_t sequence, int64_t position, int64_t head) const {
        int64_t block = tables[sequence * table_stride + position / block_size];
        return states + block * block_stride + head * head_stride;
    }

    // Calls step(row, position) for each token, and enter(previous position or -1, position) where its block begins to
    // be used.
    template <class Enter, class Step>
    void run(int64_t sequence, Enter enter, Step step) const {
        int64_t first = starts[sequence], end = starts[sequence + 1];
        int64_t position = contexts[sequence] - (end - first);
        for (int64_t row = first; row < end; row++, position++) {
            if (row == first || position % block_size == 0) enter(position - 1, position);
            step(row);
        }
    }
};

float silu(float x) { return x / (1.0f + std::exp(-x)); }

}  // namespace

extern "C" {

// mixed and output [tokens, kv_heads, channels], weight [kv_heads, taps, channels], state [taps - 1, channels].
void diptych_causal_conv(const float* mixed, const float* weight, float* output, int64_t kv_heads, int64_t channels,
                         int64_t taps, float* states, int64_t block_stride, int64_t head_stride, const int32_t* starts,
                         const int32_t* contexts, const int32_t* tables, int64_t table_stride, int64_t sequences,
                         int64_t block_size, int64_t threads) {
    Paged paged{states, block_stride, head_stride, starts, contexts, tables, table_stride, block_size};
    int64_t kept = (taps - 1) * channels;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t head = 0; head < kv_heads; head++) {
            float* state = nullptr;
            const float* w = weight + head * taps * channels;
            auto enter = [&](int64_t before, int64_t position) {
                float* target = paged.state(sequence, position, head);
                if (before < 0) std::memset(target, 0, kept * sizeof(float));
                else if (float* source = paged.state(sequence, before, head); source != target)
                    std::memcpy(target, source, kept * sizeof(float));
                state = target;
            };
            paged.run(sequence, enter, [&](int64_t row) {
                const float* x = mixed + (row * kv_heads + head) * channels;
                float* y = output + (row * kv_heads + head) * channels;
                for (int64_t i = 0; i < channels; i++) {
                    float sum = 0.0f;
                    for (int64_t tap = 0; tap < taps - 1; tap++) sum += w[tap * channels + i] * state[tap * channels + i];
                    y[i] = silu(sum + w[kept + i] * x[i]);
                }
                if (taps > 1) {
                    std::memmove(state, state + channels, (kept - channels) * sizeof(float));
                    std::memcpy(state + kept - channels, x, channels * sizeof(float));
                }
            });
        }
}

// query and key [tokens, key_heads, key_dim], value and output [tokens, heads, dim], a and b [tokens, heads],
// state [heads / kv_heads, key_dim, dim].
void diptych_delta_rule(const float* query, const float* key, const float* value, const float* a, const float* b,
                        const float* rate, const float* bias, float* output, int64_t kv_heads, int64_t key_heads,
                        int64_t heads, int64_t key_dim, int64_t dim, float* states, int64_t block_stride,
                        int64_t head_stride, const int32_t* starts, const int32_t* contexts, const int32_t* tables,
                        int64_t table_stride, int64_t sequences, int64_t block_size, int64_t threads) {
    Paged paged{states, block_stride, head_stride, starts, contexts, tables, table_stride, block_size};
    int64_t size = key_dim * dim, group = heads / kv_heads;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t head = 0; head < heads; head++) {
            float* state = nullptr;
            auto enter = [&](int64_t before, int64_t position) {
                int64_t offset = head % group * size;
                float* target = paged.state(sequence, position, head / group) + offset;
                if (before < 0) std::memset(target, 0, size * sizeof(float));
                else if (float* source = paged.state(sequence, before, head / group) + offset; source != target)
                    std::memcpy(target, source, size * sizeof(float));
                state = target;
            };
            paged.run(sequence, enter, [&](int64_t row) {
                int64_t reader = row * key_heads + head * key_heads / heads, place = row * heads + head;
                const float *q = query + reader * key_dim, *k = key + reader * key_dim, *v = value + place * dim;
                float* o = output + place * dim;
                float x = a[place] + bias[head];
                float decay = std::exp(rate[head] * (x > 20.0f ? x : std::log1p(std::exp(x))));
                float beta = 1.0f / (1.0f + std::exp(-b[place]));
                for (int64_t i = 0; i < dim; i++) o[i] = 0.0f;
                for (int64_t j = 0; j < key_dim; j++) {
                    float* s = state + j * dim;
                    for (int64_t i = 0; i < dim; i++) {
                        s[i] *= decay;
                        o[i] += s[i] * k[j];  // what the state has for this key
                    }
                }
                // o becomes the output once its numbers are no longer read: first the change, in a buffer on the stack.
                constexpr int64_t WIDTH = 64;
                for (int64_t low = 0; low < dim; low += WIDTH) {
                    int64_t width = dim - low < WIDTH ? dim - low : WIDTH;
                    float delta[WIDTH];
                    for (int64_t i = 0; i < width; i++) {
                        delta[i] = (v[low + i] - o[low + i]) * beta;
                        o[low + i] = 0.0f;
                    }
                    for (int64_t j = 0; j < key_dim; j++) {
                        float* s = state + j * dim + low;
                        for (int64_t i = 0; i < width; i++) {
                            s[i] += k[j] * delta[i];
                            o[low + i] += s[i] * q[j];
                        }
                    }
                }
            });
        }
}
}
