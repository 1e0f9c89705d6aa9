// Small float32 row operations: vectors, exp2, RMS norm, rotary embedding, activation.
// They must never let a row's bits depend on anything but the row: every sum has a fixed order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "linear.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace dspark {

// One native register of floats, written with compiler vectors so that the same source serves every processor.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec splat(float x) { return x - Vec{}; }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// 2 ** x for x <= 127, relative error about 1e-7; 0 below -126; exactly 1 at 0. Minimax polynomial on [-1/2, 1/2].
inline Vec exp2_fraction(Vec r) {
    Vec p = splat(1.535336189e-4f);
    p = p * r + 1.339887442e-3f;
    p = p * r + 9.618437358e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472029e-1f;
    return p * r + 1.0f;
}

inline Vec scale_by_exponent(Vec value, IntVec exponent) {
    const IntVec bits = (exponent + 127) << 23;
    Vec power;
    std::memcpy(&power, &bits, sizeof power);
    return value * power;
}

#if defined(__AVX512F__)
inline Vec exp2_of(Vec x) {
    const __m512 value = (__m512)x;
    const __m512 whole = _mm512_roundscale_ps(value, 0);
    const __m512 fraction = (__m512)exp2_fraction(x - (Vec)whole);
    const __mmask16 normal = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(normal, fraction, whole);
}
#else
inline Vec exp2_of(Vec x) {
    const Vec clamped = maximum(x, splat(-126.0f));
    const Vec shifted = clamped + 12582912.0f;  // 1.5 * 2**23: the sum's last bits are the nearest integer
    const Vec whole = shifted - 12582912.0f;
    IntVec exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    const Vec result = scale_by_exponent(exp2_fraction(clamped - whole), exponent - 0x4B400000);
    return x < -126.0f ? Vec{} : result;
}
#endif

// e ** x for |x| <= 87, clamped outside. The product with log2(e) is split so that large |x| keeps its accuracy.
inline Vec exp_of(Vec x) {
    const Vec clamped = maximum(x < 87.0f ? x : splat(87.0f), splat(-87.0f));
    const Vec shifted = clamped * 1.44269504f + 12582912.0f;
    const Vec whole = shifted - 12582912.0f;
    IntVec exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    const Vec rest = (clamped - whole * 0.693359375f) - whole * -2.12194440e-4f;  // x - n ln 2 in two steps
    return scale_by_exponent(exp2_fraction(rest * 1.44269504f), exponent - 0x4B400000);
}

// out = x * weight / sqrt(mean(x**2) + eps); out may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    Vec sum[4] = {};
    int i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes)
        for (int j = 0; j < 4; ++j) {
            const Vec v = load(x + i + j * kLanes);
            sum[j] += v * v;
        }
    for (; i + kLanes <= n; i += kLanes) {
        const Vec v = load(x + i);
        sum[0] += v * v;
    }
    const Vec all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    float total = 0.0f;
    for (int j = 0; j < kLanes; ++j) total += all[j];
    for (; i < n; ++i) total += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(total / float(n) + eps);
    for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

// Half-rotation rotary embedding in place: x (n,), cos and sin (n,) of the row's position.
inline void rotate(float* x, const float* cos, const float* sin, int n) {
    const int half = n / 2;
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cos + i) - b * load(sin + i));
        store(x + half + i, b * load(cos + half + i) + a * load(sin + half + i));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[half + i] + a * sin[half + i];
    }
}

enum Activation { kSilu = 0, kGeluTanh = 1 };

// gelu(x) = x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x**3)), which is the tanh form.
template <int activation>
inline Vec activate(Vec x) {
    Vec z = x;
    if (activation == kGeluTanh) z = (x + x * x * x * 0.044715f) * 1.5957691216f;
    return x / (exp_of(-z) + 1.0f);
}

template <int activation>
inline void gate_columns(const float* gate, const float* up, int n, float* out) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, activate<activation>(load(gate + i)) * load(up + i));
    if (i < n) {
        float g[kLanes] = {}, u[kLanes] = {};
        std::memcpy(g, gate + i, size_t(n - i) * 4);
        std::memcpy(u, up + i, size_t(n - i) * 4);
        const Vec result = activate<activation>(load(g)) * load(u);
        std::memcpy(out + i, &result, size_t(n - i) * 4);
    }
}

// out = activation(gate) * up over n columns; out may be gate.
inline void gate(int activation, const float* gate_row, const float* up_row, int n, float* out) {
    if (activation == kSilu)
        gate_columns<kSilu>(gate_row, up_row, n, out);
    else
        gate_columns<kGeluTanh>(gate_row, up_row, n, out);
}

}  // namespace dspark
