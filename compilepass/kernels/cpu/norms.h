// Normed rows, as sources of rows (rows.h): one pass for the sum of squares, one for the values.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "rows.h"

namespace compilepass {

// How a normed value and its weight make a result: the value rounded to T first, as in Llama, or
// only the result, with the weight around `offset`.
template <class T>
struct RoundedFirst {
  template <class V>
  COMPILEPASS_INLINE V operator()(V normed, V weight) const {
    return weight * Storage<T>::round(normed);
  }
};
struct RoundedLast {
  float offset;
  template <class V>
  COMPILEPASS_INLINE V operator()(V normed, V weight) const {
    return normed * (weight + offset);
  }
};

// The weight and what is done with it.
template <class T, class Apply>
struct Weight {
  const T* values;
  Apply apply;
};

// Calls body with what a norm's variant does with its weight.
template <class T, class Body>
void with_weight(const std::string& variant, const T* weight, const Body& body) {
  if (variant == "llama") return body(Weight<T, RoundedFirst<T>>{weight, {}});
  const float offset = variant == "gemma" ? 1.0f : 0.0f;
  STD_TORCH_CHECK(
      variant == "gemma" || variant == "torch", "variant is 'llama', 'torch' or 'gemma', not '",
      variant, "'.");
  body(Weight<T, RoundedLast>{weight, {offset}});
}

// The sum of the squares of what `first` yields, along a row.
template <class First>
COMPILEPASS_INLINE float sum_of_squares(int64_t width, First first) {
  Vec squares{};
  for_each_two(width, [&](int64_t i, auto part) {
    const auto v = first(i, part);
    squares += folded(v * v);
  });
  return sum(squares);
}

template <class T>
COMPILEPASS_INLINE float sum_of_squares(const T* row, int64_t width) {
  if constexpr (kHasDot<T>) {
    Vec squares{};
    for_each_two(width, [&](int64_t i, auto part) {
      typename Storage<T>::Raws raws{};
      std::memcpy(&raws, row + i, part.count * sizeof(T));
      squares = Storage<T>::dot(squares, raws, raws);
    });
    return sum(squares);
  } else {
    return sum_of_squares(width, [row](int64_t i, auto part) { return load(row + i, part); });
  }
}

COMPILEPASS_INLINE float inverse_rms(float squares, int64_t width, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// apply(value / rms, weight), where `first` yields the row's values on the first of two passes and
// `values` is where the second finds them.
template <class T, class Apply, class First>
COMPILEPASS_INLINE auto normed_row(
    const T* values, const Weight<T, Apply>& weight, float eps, int64_t width, First first) {
  const float scale = inverse_rms(sum_of_squares(width, first), width, eps);
  return [=](int64_t i, auto part) {
    return weight.apply(load(values + i, part) * scale, load(weight.values + i, part));
  };
}

template <class T, class Apply>
struct Norm {
  const T* x;
  Weight<T, Apply> weight;
  float eps;
  int64_t width;
  auto row(int64_t r) const {
    const T* from = x + r * width;
    return normed_row(from, weight, eps, width, [from](int64_t i, auto part) {
      return load(from + i, part);
    });
  }
};

// x + residual of a row, stored as the total.
template <class Added>
COMPILEPASS_INLINE auto sum_of(const Added& source, int64_t r) {
  const int64_t at = r * source.width;
  return [=, x = source.x, residual = source.residual, total = source.total](
             int64_t i, auto part) {
    const auto v = load(x + at + i, part) + load(residual + at + i, part);
    return store(total + at + i, v, part);
  };
}

template <class T, class Apply>
struct AddNorm {
  const T* x;
  const T* residual;
  T* total;
  Weight<T, Apply> weight;
  float eps;
  int64_t width;
  auto row(int64_t r) const {
    return normed_row(total + r * width, weight, eps, width, sum_of(*this, r));
  }
};

// A layer norm's parameters, null where it has none.
template <class T>
struct Affine {
  const T* weight;
  const T* bias;
  template <class V, class Part>
  COMPILEPASS_INLINE V apply(V normed, int64_t i, Part part) const {
    if (weight) normed = normed * load(weight + i, part);
    return bias ? normed + load(bias + i, part) : normed;
  }
};

// (value - mean) / deviation, with `first` and `values` as for normed_row.
template <class T, class First>
COMPILEPASS_INLINE auto centred_row(
    const T* values, const Affine<T>& affine, float eps, int64_t width, First first) {
  const int64_t sample = std::min<int64_t>(width, Twice::count);
  Vec shares{};  // and not a sum, which could overflow
  for_each_two(sample, [&](int64_t i, auto part) {
    shares += folded(first(i, part) * (1.0f / static_cast<float>(sample)));
  });
  const float near = sum(shares);  // enough to keep the digits of values far from zero
  double rest = 0, square = 0;
  constexpr int64_t kChunk = 512;  // a float adds up no more than that, or digits of the mean go
  for (int64_t start = 0; start < width; start += kChunk) {
    Vec rests{}, squares{};
    for_each_two(std::min(kChunk, width - start), [&](int64_t i, auto part) {
      const auto v = within(first(start + i, part) - near, part);
      rests += folded(v);
      squares += folded(v * v);
    });
    rest += sum(rests);
    square += sum(squares);
  }
  rest /= static_cast<double>(width);
  const double variance = square / static_cast<double>(width) - rest * rest;
  const float scale = 1.0f / std::sqrt(static_cast<float>(std::max(variance, 0.0)) + eps);
  const float shift = -static_cast<float>(rest) * scale;
  return [=](int64_t i, auto part) {
    return affine.apply((load(values + i, part) - near) * scale + shift, i, part);
  };
}

template <class T>
struct LayerNorm {
  const T* x;
  Affine<T> affine;
  float eps;
  int64_t width;
  auto row(int64_t r) const {
    const T* from = x + r * width;
    return centred_row(from, affine, eps, width, [from](int64_t i, auto part) {
      return load(from + i, part);
    });
  }
};

template <class T>
struct AddLayerNorm {
  const T* x;
  const T* residual;
  T* total;
  Affine<T> affine;
  float eps;
  int64_t width;
  auto row(int64_t r) const {
    return centred_row(total + r * width, affine, eps, width, sum_of(*this, r));
  }
};

}  // namespace compilepass
