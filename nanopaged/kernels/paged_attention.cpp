// Paged attention in C++: store new K/V in slots, decode over blocks. The CPU's twin of `paged_attention.py`.
//
// A decode reads every key and value of its context where it lies; the block table says in which block. Names
// are those of the Triton kernels: `cache_block` and `cache_head` are strides, in elements, from one block or
// head to the next. All arithmetic is in float32.

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "vectors.h"

constexpr int TILE = 32;  // keys whose scores are computed together
constexpr int TILE_VECS = TILE / LANES;

// The runs of a decode step, the same for all layers. `cpp.py` has the same fields in the same order.
//
// A *run* is a part of a block table, and the sequences that read it: one, or several that share the blocks.
// Each pair of a run and a sequence gets a partial result, a *row*.
//
//     tables  0: [5, 2, 7]   1: [5, 2, 9]          block_size = 4, contexts of 11 and 9 keys
//
//     run         0      1    2
//     blocks     5 2     7    9      num_keys  8 3 1
//     sequences  0 1     0    1      rows      0 1 | 2 | 3
struct Runs {
    int64_t num_runs, num_seqs;
    const int64_t *blocks, *first_block, *num_keys;  // of all runs; of each run, its first entry and its keys
    const int64_t *first_row, *row_seq;              // [num_runs + 1], [num_rows]: the sequence of each row
    const int64_t *first_of_seq, *rows_by_seq;       // [num_seqs + 1], [num_rows]: the rows of each sequence
};

// The decode of a layer.
struct Decode : Runs {
    int64_t num_heads, num_kv_heads, head_dim, block_size, q_seq, cache_block, cache_head;
    float scale_log2;
    const void *q, *k_cache, *v_cache;  // q [num_seqs, num_heads, head_dim]
    void* out;                          // [num_seqs, num_heads, head_dim], contiguous
    float *partial, *lse;               // [num_rows, num_heads, DIM_PAD], [num_rows, num_heads]: `launch_decode`
};

// Copy TILE keys (or values) of one head, from position `first` on, to `tile`, as float32. VECS = DIM_PAD / LANES.
template <class T, int VECS>
inline void load_tile(Vec* tile, const T* cache, const int64_t* table, int64_t first, int64_t end, const Decode& d) {
    const int64_t stop = std::min(first + TILE, end);
    for (int64_t position = first; position < stop;) {
        // A tile spans several blocks. block_size = 4, positions 6 7 8 9, table [7, 2, 5]:
        // blocks 2 2 5 5, offsets 2 3 0 1
        const int64_t block = table[position / d.block_size], offset = position % d.block_size;
        const int64_t num_keys = std::min(d.block_size - offset, stop - position);
        const T* row = cache + block * d.cache_block + offset * d.head_dim;
        if (position + TILE < end) {
            // The next tile comes from memory while this one is computed. It comes into the second cache (locality 2),
            // because the first one waits for few lines together.
            const int64_t next = position + TILE;
            const T* soon = cache + table[next / d.block_size] * d.cache_block + next % d.block_size * d.head_dim;
            const int64_t size = num_keys * d.head_dim;
            for (int64_t i = 0; i < size; i += CACHE_LINE / sizeof(T)) __builtin_prefetch(soon + i, 0, 2);
        }
        if (d.head_dim == VECS * LANES)
            for (int key = 0; key < num_keys; key++, row += VECS * LANES)
                for (int v = 0; v < VECS; v++) *tile++ = load(row + LANES * v);
        else
            for (int key = 0; key < num_keys; key++, row += d.head_dim)
                for (int v = 0; v < VECS; v++) *tile++ = load(row + LANES * v, d.head_dim - LANES * v);
        position += num_keys;
    }
    // The rest of the tile keeps zeros, or keys of an earlier tile, which get the weight 0. An unwritten slot may hold
    // NaN, and 0 · NaN is NaN.
}

// Partial attention of the query heads of one KV head over one run, for each sequence that reads it.
//
// With S = scale · log2(e) · q Kᵀ over the run's keys: partial = Σ 2^(S - m) V / l and lse = m + log2(l), where
// m = max S and l = Σ 2^(S - m). The loop over tiles of keys keeps m, l and Σ.
template <class T, int VECS> void decode_kernel(const Decode& d, int64_t run, int64_t kv_head) {
    const int64_t *table = d.blocks + d.first_block[run], *row_seq = d.row_seq + d.first_row[run];
    const T* k_cache = (const T*)d.k_cache + kv_head * d.cache_head;
    const T* v_cache = (const T*)d.v_cache + kv_head * d.cache_head;
    const int64_t end = d.num_keys[run], group = d.num_heads / d.num_kv_heads;
    const int64_t num_q = (d.first_row[run + 1] - d.first_row[run]) * group;  // queries that read these keys
    std::vector<Vec> tile(TILE * VECS), q(num_q * VECS), acc(num_q * VECS), p(num_q * TILE_VECS);
    std::vector<float> m(num_q, -INFINITY), l(num_q, 0.0f);
    for (int64_t i = 0; i < num_q; i++) {
        const T* row = (const T*)d.q + row_seq[i / group] * d.q_seq + (kv_head * group + i % group) * d.head_dim;
        for (int v = 0; v < VECS; v++) q[i * VECS + v] = load(row + LANES * v, d.head_dim - LANES * v) * d.scale_log2;
    }
    const Vec lanes = lane_numbers();
    for (int64_t first = 0; first < end; first += TILE) {
        load_tile<T, VECS>(tile.data(), k_cache, table, first, end, d);
        for (int64_t i = 0; i < num_q; i++) {
            Vec *scores = &p[i * TILE_VECS], *query = &q[i * VECS], *sum_pv = &acc[i * VECS];
            Vec top = all(m[i]), total = {};
            for (int t = 0; t < TILE_VECS; t++) {
                Vec products[LANES];
#pragma GCC unroll 16
                for (int key = 0; key < LANES; key++) {
                    const Vec* k = &tile[(t * LANES + key) * VECS];
                    products[key] = query[0] * k[0];
                    for (int v = 1; v < VECS; v++) products[key] += query[v] * k[v];
                }
                scores[t] = lanes < (float)(end - first - t * LANES) ? sums(products) : all(-INFINITY);
                top = maximum(top, scores[t]);
            }
            const float m_new = maximum(top), rescale = exp2(all(m[i] - m_new))[0];
            for (int t = 0; t < TILE_VECS; t++) total += scores[t] = exp2(scores[t] - m_new);
            l[i] = l[i] * rescale + sum(total);
            for (int v = 0; v < VECS; v++) sum_pv[v] *= rescale;
            m[i] = m_new;
        }
        load_tile<T, VECS>(tile.data(), v_cache, table, first, end, d);
        for (int64_t i = 0; i < num_q; i++) {
            const float* weights = (const float*)&p[i * TILE_VECS];
            Vec even[VECS], odd[VECS] = {};  // two sums, so that an addition does not wait for the one before
            for (int v = 0; v < VECS; v++) even[v] = acc[i * VECS + v];
            for (int key = 0; key < TILE; key += 2)
                for (int v = 0; v < VECS; v++) {
                    even[v] += weights[key] * tile[key * VECS + v];
                    odd[v] += weights[key + 1] * tile[(key + 1) * VECS + v];
                }
            for (int v = 0; v < VECS; v++) acc[i * VECS + v] = even[v] + odd[v];
        }
    }
    for (int64_t i = 0; i < num_q; i++) {
        const int64_t row = d.first_row[run] + i / group, target = row * d.num_heads + kv_head * group + i % group;
        for (int v = 0; v < VECS; v++) store(d.partial + (target * VECS + v) * LANES, acc[i * VECS + v] / l[i]);
        d.lse[target] = m[i] + std::log2(l[i]);
    }
}

// Combine the rows of one sequence and query head: Σ w_r · partial_r / Σ w_r with w_r = 2^(lse_r - max).
template <class T, int VECS> void reduce_kernel(const Decode& d, int64_t seq, int64_t head) {
    const int64_t *begin = d.rows_by_seq + d.first_of_seq[seq], *end = d.rows_by_seq + d.first_of_seq[seq + 1];
    float top = -INFINITY, total = 0.0f;
    for (const int64_t* row = begin; row < end; row++) top = std::max(top, d.lse[*row * d.num_heads + head]);
    Vec out[VECS] = {};
    for (const int64_t* row = begin; row < end; row++) {
        const int64_t source = *row * d.num_heads + head;
        const float weight = std::exp2(d.lse[source] - top);
        for (int v = 0; v < VECS; v++) out[v] += weight * load(d.partial + (source * VECS + v) * LANES);
        total += weight;
    }
    T* target = (T*)d.out + (seq * d.num_heads + head) * d.head_dim;
    for (int v = 0; v < VECS; v++) store(target + LANES * v, out[v] / total, d.head_dim - LANES * v);
}

// ── launching the kernels ──────────────────────────────────────────────────────────────────────────

template <class T, int VECS> void launch_decode(Decode d) {
    const int64_t num_rows = d.first_row[d.num_runs] * d.num_heads;
    const std::unique_ptr<float[]> memory(new float[num_rows * (VECS * LANES + 1)]);
    d.partial = memory.get(), d.lse = d.partial + num_rows * VECS * LANES;
#pragma omp parallel
    {
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t run = 0; run < d.num_runs; run++)
            for (int64_t kv_head = 0; kv_head < d.num_kv_heads; kv_head++) decode_kernel<T, VECS>(d, run, kv_head);
#pragma omp for collapse(2)
        for (int64_t seq = 0; seq < d.num_seqs; seq++)
            for (int64_t head = 0; head < d.num_heads; head++) reduce_kernel<T, VECS>(d, seq, head);
    }
}

// DIM_PAD is the next power of two, as in Triton: the loops over it are unrolled.
template <class T> void launch_decode(const Decode& d) {
    if (d.head_dim <= 16) return launch_decode<T, 16 / LANES>(d);
    if (d.head_dim <= 32) return launch_decode<T, 32 / LANES>(d);
    if (d.head_dim <= 64) return launch_decode<T, 64 / LANES>(d);
    if (d.head_dim <= 128) return launch_decode<T, 128 / LANES>(d);
    launch_decode<T, 256 / LANES>(d);
}

// Write the new keys and values of a batch [num_tokens, num_heads, head_dim] to their slots.
template <class T>
void store_kernel(
    const T* k, const T* v, T* k_cache, T* v_cache, const int64_t* slots, int64_t num_tokens, int64_t k_token,
    int64_t v_token, int64_t num_heads, int64_t head_dim, int64_t block_size, int64_t cache_block, int64_t cache_head
) {
#pragma omp parallel for if (num_tokens * num_heads * head_dim > MIN_WORK)
    for (int64_t token = 0; token < num_tokens; token++) {
        // block_size = 4, slot 9: block 2, offset 1
        int64_t target = slots[token] / block_size * cache_block + slots[token] % block_size * head_dim;
        for (int64_t head = 0; head < num_heads; head++, target += cache_head) {
            std::memcpy(k_cache + target, k + token * k_token + head * head_dim, head_dim * sizeof(T));
            std::memcpy(v_cache + target, v + token * v_token + head * head_dim, head_dim * sizeof(T));
        }
    }
}

extern "C" int paged_decode(
    const void* q, const void* k_cache, const void* v_cache, void* out, const Runs* runs, int64_t num_heads,
    int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t q_seq, int64_t cache_block, int64_t cache_head,
    float scale_log2, int dtype
) {
    const Decode d = {
        *runs, num_heads, num_kv_heads, head_dim, block_size, q_seq, cache_block, cache_head, scale_log2, q, k_cache,
        v_cache, out
    };
    return with_dtype(dtype, [&](auto zero) { launch_decode<decltype(zero)>(d); });
}

extern "C" int store_kv(
    const void* k, const void* v, void* k_cache, void* v_cache, const int64_t* slots, int64_t num_tokens,
    int64_t k_token, int64_t v_token, int64_t num_heads, int64_t head_dim, int64_t block_size, int64_t cache_block,
    int64_t cache_head, int dtype
) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        store_kernel(
            (const T*)k, (const T*)v, (T*)k_cache, (T*)v_cache, slots, num_tokens, k_token, v_token, num_heads,
            head_dim, block_size, cache_block, cache_head
        );
    });
}
