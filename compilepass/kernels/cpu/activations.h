// Activations of vectors, and gated rows made of them: polynomials, no calls of the scalar math library.
#pragma once

#include "rows.h"

namespace compilepass {

// e^x with an error of about 1 ulp: x = n ln 2 + r, and Cephes' polynomial (expf.c) for e^r.
// Overflows to infinity where expf does, underflows to about 1e-38, NaN stays NaN.
COMPILEPASS_INLINE Vec exp(Vec x) {
  x = smaller(splat(89.0f), larger(splat(-87.3365447f), x));
  const Vec shifted = x * 1.44269504f + kRounder;
  const Vec n = shifted - kRounder;
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return times_power_of_two(p, shifted);
}

COMPILEPASS_INLINE Vec times_sigmoid(Vec x, Vec argument) {
  return x / (1.0f + exp(-argument));
}

struct Silu {
  COMPILEPASS_INLINE Vec operator()(Vec x) const { return times_sigmoid(x, x); }
};

// 0.5 (1 + tanh u) is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  COMPILEPASS_INLINE Vec operator()(Vec x) const {
    return times_sigmoid(x, x * (1.59576912f + 0.0713548162f * (x * x)));
  }
};

struct QuickGelu {
  COMPILEPASS_INLINE Vec operator()(Vec x) const { return times_sigmoid(x, 1.702f * x); }
};

struct SquaredRelu {
  COMPILEPASS_INLINE Vec operator()(Vec x) const {
    const Vec positive = larger(splat(0.0f), x);
    return positive * positive;
  }
};

struct FatRelu {
  float threshold;
  COMPILEPASS_INLINE Vec operator()(Vec x) const { return x <= threshold ? Vec{} : x; }
};

// gpt-oss's gate.
struct ClampedSwiglu {
  float alpha, limit;
  COMPILEPASS_INLINE Vec operator()(Vec gate, Vec value) const {
    gate = smaller(splat(limit), gate);
    value = larger(splat(-limit), smaller(splat(limit), value));
    return (value + 1.0f) * times_sigmoid(gate, alpha * gate);
  }
};

// x Phi(x), with erfc by the rational Chebyshev fit of Numerical Recipes (erfcc, relative error
// 1.2e-7 everywhere), so that the negative tail keeps its digits.
struct GeluErf {
  COMPILEPASS_INLINE Vec operator()(Vec x) const {
    const Vec z = bit_cast<Vec>(bit_cast<IntVec>(x) & 0x7fffffff) * 0.707106781f;
    const Vec t = 1.0f / (1.0f + 0.5f * z);
    Vec p = t * 0.17087277f - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    const Vec tail = 0.5f * t * exp(p - z * z);
    return x * (x > 0.0f ? 1.0f - tail : tail);
  }
};

// activation(gate) * up.
template <class T, class Activation>
struct Gated {
  Spaced<T> gate, up;
  Activation activation;
  auto row(int64_t r) const {
    return [activation = activation, gate = gate.row(r), up = up.row(r)](int64_t i, auto part) {
      return Storage<T>::round(activation(load(gate + i, part))) * load(up + i, part);
    };
  }
};

// gate(even, odd) of the neighbours of a row.
template <class T, class Gate>
struct GatedNeighbours {
  const T* x;
  int64_t width;  // of a row of results
  Gate gate;
  auto row(int64_t r) const {
    return [gate = gate, from = x + 2 * r * width](int64_t i, auto part) {
      const Pairs pairs = load_pairs(from + 2 * i, part);
      return gate(pairs.first, pairs.second);
    };
  }
};

}  // namespace compilepass
