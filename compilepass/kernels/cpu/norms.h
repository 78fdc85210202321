// Normed rows, as sources of rows (rows.h): one pass for the sum of squares, one for the values.
#pragma once

#include <cmath>

#include "rows.h"

namespace compilepass {

// How a normed value and its weight make a result: the value rounded to T first, as in Llama, or
// only the result, with the weight around `offset`.
template <class T>
struct RoundedFirst {
  COMPILEPASS_INLINE Vec operator()(Vec normed, Vec weight) const {
    return weight * Storage<T>::round(normed);
  }
};
struct RoundedLast {
  float offset;
  COMPILEPASS_INLINE Vec operator()(Vec normed, Vec weight) const {
    return normed * (weight + offset);
  }
};

// The weight and what is done with it.
template <class T, class Apply>
struct Weight {
  const T* values;
  Apply apply;
};

// apply(value / rms, weight), where `first` yields the row's values on the first of two passes and
// `values` is where the second finds them.
template <class T, class Apply, class First>
COMPILEPASS_INLINE auto normed_row(
    const T* values, const Weight<T, Apply>& weight, float eps, int64_t width, First first) {
  Vec squares{};
  for_each_vec(width, [&](int64_t i, auto part) {
    const Vec v = first(i, part);
    squares += v * v;
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
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

template <class T, class Apply>
struct AddNorm {
  const T* x;
  const T* residual;
  T* total;
  Weight<T, Apply> weight;
  float eps;
  int64_t width;
  auto row(int64_t r) const {
    const int64_t at = r * width;
    const T* sums = total + at;
    return normed_row(sums, weight, eps, width, [this, at](int64_t i, auto part) {
      const Vec v = load(x + at + i, part) + load(residual + at + i, part);
      return store(total + at + i, v, part);
    });
  }
};

}  // namespace compilepass
