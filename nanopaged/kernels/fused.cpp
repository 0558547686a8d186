// The small operations of a layer in C++, one pass over memory each. They compute what `decoder.py` does.

#include <cmath>

#include "vectors.h"

// x / √(mean(x²) + ε) · w for each row of x [num_rows, size].
template <class T>
void rms_norm_kernel(const T* x, const T* weight, T* out, int64_t num_rows, int64_t size, int64_t x_row, float eps) {
#pragma omp parallel for if (num_rows * size > MIN_WORK)
    for (int64_t row = 0; row < num_rows; row++) {
        const T* source = x + row * x_row;
        Vec squares = {};
        for (int64_t i = 0; i < size; i += LANES) squares += load(source + i, size - i) * load(source + i, size - i);
        const float scale = 1.0f / std::sqrt(sum(squares) / size + eps);
        for (int64_t i = 0; i < size; i += LANES)
            store(out + row * size + i, load(source + i, size - i) * scale * load(weight + i, size - i), size - i);
    }
}

// Normalise (if there are weights) and rotate the heads of each token, in place. From num_q on: keys.
//
// half = 2: a head x₀ x₁ x₂ x₃ is the pairs (x₀, x₂), (x₁, x₃), each rotated by an angle of its own.
template <class T>
void norm_rotate_kernel(
    T* qk, const T* q_weight, const T* k_weight, const T* cos, const T* sin, float eps, int64_t num_tokens,
    int64_t num_heads, int64_t num_q, int64_t half, int64_t qk_token
) {
#pragma omp parallel for collapse(2) if (num_tokens * num_heads * half > MIN_WORK)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++) {
            T *first = qk + token * qk_token + head * 2 * half, *second = first + half;
            const T* weight = head < num_q ? q_weight : k_weight;
            float scale = 1.0f;
            if (weight) {
                Vec squares = {};
                for (int64_t i = 0; i < half; i += LANES) {
                    const Vec a = load(first + i, half - i), b = load(second + i, half - i);
                    squares += a * a + b * b;
                }
                scale = 1.0f / std::sqrt(sum(squares) / (2 * half) + eps);
            }
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t n = half - i;
                Vec a = load(first + i, n) * scale, b = load(second + i, n) * scale;
                if (weight) a *= load(weight + i, n), b *= load(weight + half + i, n);
                const Vec c = load(cos + token * 2 * half + i, n), s = load(sin + token * half + i, n);
                store(first + i, a * c - b * s, n);
                store(second + i, b * c + a * s, n);
            }
        }
}

// silu(gate) · up for each row of gate_up [num_tokens, 2 · width], with silu(x) = x / (1 + e^-x).
template <class T> void silu_mul_kernel(const T* gate_up, T* out, int64_t num_tokens, int64_t width) {
#pragma omp parallel for if (num_tokens * width > MIN_WORK)
    for (int64_t row = 0; row < num_tokens; row++) {
        const T *gates = gate_up + row * 2 * width, *ups = gates + width;
        for (int64_t i = 0; i < width; i += LANES) {
            const Vec gate = load(gates + i, width - i), silu = gate / (1.0f + exp2(gate * -1.44269504f));
            store(out + row * width + i, silu * load(ups + i, width - i), width - i);
        }
    }
}

// ── launching the kernels ──────────────────────────────────────────────────────────────────────────

extern "C" int rms_norm(
    const void* x, const void* weight, void* out, int64_t num_rows, int64_t size, int64_t x_row, float eps, int dtype
) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        rms_norm_kernel((const T*)x, (const T*)weight, (T*)out, num_rows, size, x_row, eps);
    });
}

extern "C" int norm_rotate(
    void* qk, const void* q_weight, const void* k_weight, const void* cos, const void* sin, float eps,
    int64_t num_tokens, int64_t num_heads, int64_t num_q, int64_t half, int64_t qk_token, int dtype
) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        norm_rotate_kernel(
            (T*)qk, (const T*)q_weight, (const T*)k_weight, (const T*)cos, (const T*)sin, eps, num_tokens, num_heads,
            num_q, half, qk_token
        );
    });
}

extern "C" int silu_mul(const void* gate_up, void* out, int64_t num_tokens, int64_t width, int dtype) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        silu_mul_kernel((const T*)gate_up, (T*)out, num_tokens, width);
    });
}
