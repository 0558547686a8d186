// Calls every kernel once or more with made-up numbers, and prints what they compute: a line for each case.
//
// test_cpp.py compiles it for this machine and for another one, and compares what both print.

#include <cstdio>
#include <vector>

#include "fused.cpp"
#include "linear.cpp"
#include "paged_attention.cpp"
#include "prefill.cpp"

// Numbers from -1 to 1, the same on every machine.
static float next_number() {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (state >> 8) / 8388608.0f - 1.0f;
}

template <class T> std::vector<T> numbers(int64_t n) {
    std::vector<T> x(n);
    for (T& item : x) store(&item, all(next_number()), 1);
    return x;
}

template <class T> void print(const char* name, const std::vector<T>& x) {
    std::printf("%s", name);
    for (const T& item : x) std::printf(" %.7g", load(&item, 1)[0]);
    std::printf("\n");
}

template <class T> void run_all(int dtype) {
    for (int64_t tokens : {1, 2, 3, 4, 5, 6, 13}) {
        const int64_t inputs = 7 + tokens, outputs = 21 + 16 * tokens, panels = (outputs + PANEL - 1) / PANEL;
        const auto x = numbers<T>(tokens * inputs), weight = numbers<T>(outputs * inputs), bias = numbers<T>(outputs);
        const int64_t columns = COLUMNS<T>, pairs = (inputs + columns - 1) / columns;
        std::vector<T> packed(panels * pairs * PANEL * columns), y(tokens * outputs);
        for (int64_t o = 0; o < outputs; o++)
            for (int64_t i = 0; i < inputs; i++) {
                const int64_t pair = (o / PANEL * pairs + i / columns) * PANEL + o % PANEL;
                packed[pair * columns + i % columns] = weight[o * inputs + i];
            }
        linear(x.data(), packed.data(), bias.data(), y.data(), tokens, inputs, outputs, dtype);
        print("linear", y);
    }
    for (int64_t size : {1, 8, 33, 100}) {
        const auto x = numbers<T>(3 * size), weight = numbers<T>(size), gate_up = numbers<T>(6 * size);
        std::vector<T> out(3 * size);
        rms_norm(x.data(), weight.data(), out.data(), 3, size, size, 1e-6f, dtype);
        print("rms_norm", out);
        silu_mul(gate_up.data(), out.data(), 3, size, dtype);
        print("silu_mul", out);
        auto qk = numbers<T>(2 * 3 * 2 * size);
        const auto weights = numbers<T>(4 * size), cos = numbers<T>(2 * 2 * size), sin = numbers<T>(2 * size);
        norm_rotate(
            qk.data(), weights.data(), weights.data() + 2 * size, cos.data(), sin.data(), 1e-6f, 2, 3, 2, size,
            3 * 2 * size, dtype
        );
        print("norm_rotate", qk);
    }
    // Two sequences of 11 and 9 keys in blocks of 4, which share their first two blocks: three runs.
    for (int64_t dim : {8, 20, 64, 96, 256}) {
        const int64_t kv_heads = 2, heads = 6, block_size = 4, cache_head = block_size * dim;
        auto k_cache = numbers<T>(8 * kv_heads * cache_head), v_cache = numbers<T>(8 * kv_heads * cache_head);
        const auto k = numbers<T>(2 * kv_heads * dim), v = numbers<T>(2 * kv_heads * dim), q = numbers<T>(2 * heads * dim);
        const int64_t slots[] = {3 * block_size + 2, 6 * block_size};
        store_kv(
            k.data(), v.data(), k_cache.data(), v_cache.data(), slots, 2, kv_heads * dim, kv_heads * dim, kv_heads, dim,
            block_size, kv_heads * cache_head, cache_head, dtype
        );
        const int64_t blocks[] = {5, 2, 3, 6}, first_block[] = {0, 2, 3}, num_keys[] = {8, 3, 1};
        const int64_t first_row[] = {0, 2, 3, 4}, row_seq[] = {0, 1, 0, 1}, first_of_seq[] = {0, 2, 4}, rows_by_seq[] = {0, 2, 1, 3};
        std::vector<T> out(2 * heads * dim);
        const Runs runs = {3, 2, blocks, first_block, num_keys, first_row, row_seq, first_of_seq, rows_by_seq};
        paged_decode(
            q.data(), k_cache.data(), v_cache.data(), out.data(), &runs, heads, kv_heads, dim, block_size, heads * dim,
            kv_heads * cache_head, cache_head, 0.3f, dtype
        );
        print("paged_decode", out);
        // Three queries at the end of a context of 11 keys.
        const auto queries = numbers<T>(3 * heads * dim);
        std::vector<T> outs(3 * heads * dim);
        paged_prefill(
            queries.data(), k_cache.data(), v_cache.data(), outs.data(), blocks, 3, 11, heads, kv_heads, dim, block_size,
            heads * dim, kv_heads * cache_head, cache_head, 0.3f, dtype
        );
        print("paged_prefill", outs);
    }
}

int main() {
    run_all<float>(0);
    run_all<BFloat16>(1);
#ifdef HAS_FLOAT16
    run_all<Float16>(2);
#endif
}
