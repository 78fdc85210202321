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

// 2^x with a relative error of 2.6e-6, or 7.5e-8 with `Fine`: x = n + f, and a minimax polynomial for
// 2^f with f from 0 to 1. Overflows to infinity, underflows to about 1e-38 or less, NaN stays NaN.
template <bool Fine>
COMPILEPASS_INLINE Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // 0 for an infinity
#else
  x = smaller(splat(128.5f), larger(splat(-125.0f), x));
  const Vec shifted = (x - 0.5f) + kRounder;
  const Vec f = x - (shifted - kRounder);
#endif
  Vec p;
  if constexpr (Fine) {
    p = f * 1.8775767e-3f + 8.9893397e-3f;
    p = p * f + 5.5826318e-2f;
    p = p * f + 2.4015361e-1f;
    p = p * f + 6.9315308e-1f;
    p = p * f + 9.9999994e-1f;
  } else {
    p = f * 1.3534168e-2f + 5.2011460e-2f;
    p = p * f + 2.4144275e-1f;
    p = p * f + 6.9300383e-1f;
    p = p * f + 1.0000026f;
  }
#if defined(__AVX512DQ__)
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);  // by 2^floor(x)
#else
  return times_power_of_two(p, shifted);
#endif
}

// The exponential that results of type T need: float32 that of base e to the last digit; the types of
// 16 bits one of base 2, which costs half. `kOfE` is the exponent of e to that base.
template <class T>
struct Power {
  static constexpr float kOfE = 1.44269504f;
  static COMPILEPASS_INLINE Vec of(Vec x) { return exp2<std::is_same_v<T, Float16>>(x); }
};
template <>
struct Power<float> {
  static constexpr float kOfE = 1.0f;
  static COMPILEPASS_INLINE Vec of(Vec x) { return exp(x); }
};

// x sigmoid(u), for a `power` of -u times Power<T>::kOfE.
template <class T>
COMPILEPASS_INLINE Vec times_sigmoid(Vec x, Vec power) {
  return x / (1.0f + Power<T>::of(power));
}

// Activations take a tag of the type that their result is rounded to.

struct Silu {
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
    return times_sigmoid<T>(x, x * -Power<T>::kOfE);
  }
};

// 0.5 (1 + tanh u) is sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
    constexpr float k = -Power<T>::kOfE;
    return times_sigmoid<T>(x, x * (1.59576912f * k + (0.0713548162f * k) * (x * x)));
  }
};

struct QuickGelu {
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
    return times_sigmoid<T>(x, x * (-1.702f * Power<T>::kOfE));
  }
};

struct SquaredRelu {
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
    const Vec positive = larger(splat(0.0f), x);
    return positive * positive;
  }
};

struct FatRelu {
  float threshold;
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
    return x <= threshold ? Vec{} : x;
  }
};

// gpt-oss's gate.
struct ClampedSwiglu {
  float alpha, limit;
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec gate, Vec value, T) const {
    gate = smaller(splat(limit), gate);
    value = larger(splat(-limit), smaller(splat(limit), value));
    return (value + 1.0f) * times_sigmoid<T>(gate, gate * (-alpha * Power<T>::kOfE));
  }
};

// x Phi(x), with erfc by the rational Chebyshev fit of Numerical Recipes (erfcc, relative error
// 1.2e-7 everywhere), so that the negative tail keeps its digits.
struct GeluErf {
  template <class T>
  COMPILEPASS_INLINE Vec operator()(Vec x, T) const {
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
    const Vec tail = 0.5f * t * Power<T>::of((p - z * z) * Power<T>::kOfE);
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
      const auto activated = [&](Vec v) { return activation(v, T{}); };
      return Storage<T>::round(each(activated, load(gate + i, part))) * load(up + i, part);
    };
  }
};

// gate(even, odd) of the neighbours of a row.
template <class T, class Gate>
struct GatedNeighbours {
  static constexpr bool kOneByOne = true;  // two vectors a step would have to be put in order
  const T* x;
  int64_t width;  // of a row of results
  Gate gate;
  auto row(int64_t r) const {
    return [gate = gate, from = x + 2 * r * width](int64_t i, auto part) {
      const Pairs pairs = load_pairs(from + 2 * i, part);
      return gate(pairs.first, pairs.second, T{});
    };
  }
};

}  // namespace compilepass
