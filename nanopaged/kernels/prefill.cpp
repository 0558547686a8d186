// Paged attention of a prefill on a CPU: many queries of one sequence, each of which sees the keys up to its own position.
//
// The keys and values of a KV head are packed as the weights of two linear layers (`panels.h`). The scores of a tile are
// the product of its queries and keys, and its output is the product of weights and values:
//
//                     keys 0-255   256-511             a tile has 32 queries, each with all query heads of a KV head,
//     queries 480-    tile         tile, in which      and 256 keys. The loop over tiles of keys keeps the largest score
//             511                  query 480 sees      m and the sums of a softmax, as in `paged_attention.cpp`.
//                                  keys 256-480
//
// This is the tiling of FlashAttention (Dao et al., arXiv 2205.14135), with a CPU's caches in the place of shared memory.

#include <cmath>
#include <vector>

#include "panels.h"

constexpr int64_t TILE_QUERIES = 32;
constexpr int64_t TILE_KEYS = 256;  // a multiple of PANEL

struct Prefill {
    int64_t num_queries, context_len, num_heads, num_kv_heads, head_dim, block_size, q_token, cache_block, cache_head;
    const int64_t* table;
    float scale_log2;
    const void *q, *k_cache, *v_cache;  // q [num_queries, num_heads, head_dim], `q_token` from one token to the next
    void* out;                          // [num_queries, num_heads, head_dim], contiguous
};

// The context of one KV head, as the weights of two linear layers.
template <class T> struct Context {
    std::vector<T> keys;    // outputs are positions, inputs are the numbers of a head
    std::vector<T> values;  // the other way round
    // A value that is not finite must not reach the queries before it, whose weight for it is 0, because 0 · NaN is NaN.
    // So it is packed as zeros, and the queries from its position on become NaN.
    int64_t first_not_finite;
};

template <class T> Context<T> pack(const Prefill& p, int64_t kv_head) {
    const int64_t dim = p.head_dim, length = p.context_len;
    const int64_t key_panel = panel_size<T>(dim), value_panel = panel_size<T>(length);
    const int64_t column = COLUMNS<T> * PANEL;  // numbers that lie together: a column, or an interleaved pair of columns
    Context<T> context;
    context.keys.resize((length + PANEL - 1) / PANEL * key_panel);
    context.values.resize((dim + PANEL - 1) / PANEL * value_panel);
    context.first_not_finite = length;
    for (int64_t position = 0; position < length; position++) {
        // block_size = 4, table [7, 2]: position 6 is in block 2, offset 2
        const int64_t block = p.table[position / p.block_size], offset = position % p.block_size;
        const int64_t row = block * p.cache_block + kv_head * p.cache_head + offset * dim;
        const T *k = (const T*)p.k_cache + row, *v = (const T*)p.v_cache + row;
        T* key = &context.keys[position / PANEL * key_panel + position % PANEL * COLUMNS<T>];
        T* value = &context.values[position / COLUMNS<T> * column + position % COLUMNS<T>];
        for (int64_t i = 0; i < dim; i++) key[i / COLUMNS<T> * column + i % COLUMNS<T>] = k[i];
        Vec zeros = {};
        for (int64_t i = 0; i < dim; i += LANES) zeros += load(v + i, dim - i) * 0.0f;
        if (sum(zeros) == 0.0f)
            for (int64_t i = 0; i < dim; i++) value[i / PANEL * value_panel + i % PANEL * COLUMNS<T>] = v[i];
        else
            context.first_not_finite = std::min(context.first_not_finite, position);
    }
    return context;
}

// The weights 2^(S - m) of one query for a tile of keys, of which it sees the first `num_seen`. S are the scores times
// scale · log2(e). Updates the maximum m and the sum of the weights l, and returns the factor of the sums so far.
template <class F>
float softmax(const float* scores, F* weights, int64_t num_keys, int64_t num_seen, float scale_log2, float& m, float& l) {
    const Vec lanes = lane_numbers();
    Vec top = all(m), total = {};
    for (int64_t i = 0; i < num_seen; i += LANES) {
        const Vec score = load(scores + i, num_keys - i) * scale_log2;
        top = maximum(top, lanes < (float)(num_seen - i) ? score : all(-INFINITY));
    }
    const float m_new = maximum(top), rescale = exp2(all(m - m_new))[0];
    for (int64_t i = 0; i < num_keys; i += LANES) {
        const Vec score = load(scores + i, num_keys - i) * scale_log2;
        const Vec weight = lanes < (float)(num_seen - i) ? exp2(score - m_new) : Vec{};
        store(weights + i, weight, num_keys - i);
        total += weight;
    }
    m = m_new;
    l = l * rescale + sum(total);
    return rescale;
}

template <class T> void prefill_kernel(const Prefill& p, const Context<T>& context, int64_t kv_head, int64_t first_token) {
    const int64_t dim = p.head_dim, group = p.num_heads / p.num_kv_heads;
    const int64_t num_tokens = std::min(TILE_QUERIES, p.num_queries - first_token), num_q = num_tokens * group;
    const int64_t first = p.context_len - p.num_queries + first_token, end = first + num_tokens;  // positions
    std::vector<Factor<T>> q(num_q * dim), weights(num_q * TILE_KEYS);
    std::vector<float> scores(num_q * TILE_KEYS), part(num_q * dim), acc(num_q * dim);
    std::vector<float> m(num_q, -INFINITY), l(num_q), rescale(num_q);
    for (int64_t i = 0; i < num_q; i++) {  // the heads of a token lie together
        const T* row = (const T*)p.q + (first_token + i / group) * p.q_token + (kv_head * group + i % group) * dim;
        for (int64_t c = 0; c < dim; c += LANES) store(&q[i * dim + c], load(row + c, dim - c), dim - c);
    }
    const int64_t key_panel = panel_size<T>(dim), value_panel = panel_size<T>(p.context_len);
    for (int64_t key = 0; key < end; key += TILE_KEYS) {
        const int64_t num_keys = std::min(TILE_KEYS, end - key);
        const T *keys = &context.keys[key / PANEL * key_panel], *values = &context.values[key * PANEL];
        const Product<T, float> qk = {q.data(), keys, nullptr, scores.data(), num_q, dim, num_keys, key_panel};
        multiply_all(qk);
        for (int64_t i = 0; i < num_q; i++) {
            const int64_t num_seen = std::min(num_keys, first + i / group + 1 - key), row = i * num_keys;
            rescale[i] = softmax(&scores[row], &weights[row], num_keys, num_seen, p.scale_log2, m[i], l[i]);
        }
        const Product<T, float> pv = {weights.data(), values, nullptr, part.data(), num_q, num_keys, dim, value_panel};
        multiply_all(pv);
        for (int64_t i = 0; i < num_q; i++)
            for (int64_t c = i * dim; c < (i + 1) * dim; c++) acc[c] = acc[c] * rescale[i] + part[c];
    }
    for (int64_t i = 0; i < num_q; i++) {
        const float divisor = first + i / group < context.first_not_finite ? l[i] : NAN;
        T* out = (T*)p.out + ((first_token + i / group) * p.num_heads + kv_head * group + i % group) * dim;
        for (int64_t c = 0; c < dim; c += LANES) store(out + c, load(&acc[i * dim + c], dim - c) / divisor, dim - c);
    }
}

template <class T> void launch_prefill(const Prefill& p) {
    std::vector<Context<T>> contexts(p.num_kv_heads);
#pragma omp parallel
    {
#pragma omp for
        for (int64_t kv_head = 0; kv_head < p.num_kv_heads; kv_head++) contexts[kv_head] = pack<T>(p, kv_head);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t kv_head = 0; kv_head < p.num_kv_heads; kv_head++)
            for (int64_t token = 0; token < p.num_queries; token += TILE_QUERIES)
                prefill_kernel(p, contexts[kv_head], kv_head, token);
    }
}

extern "C" int paged_prefill(
    const void* q, const void* k_cache, const void* v_cache, void* out, const int64_t* table, int64_t num_queries,
    int64_t context_len, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t q_token,
    int64_t cache_block, int64_t cache_head, float scale_log2, int dtype
) {
    const Prefill p = {
        num_queries, context_len, num_heads, num_kv_heads, head_dim, block_size, q_token, cache_block, cache_head, table,
        scale_log2, q, k_cache, v_cache, out
    };
    return with_dtype(dtype, [&](auto zero) { launch_prefill<decltype(zero)>(p); });
}
