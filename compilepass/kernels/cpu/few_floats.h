// A few rows times weights of the same floating dtype, which are read once, from first to last.
//
// The time is that of reading the weights, and a machine reads fastest in one stream. So there are
// no tiles: each row of weights in turn meets all rows of x, which stay in the first-level cache as
// floats, laid out as the vectors of weights are.
#pragma once

#include <algorithm>
#include <memory>

#include <torch/csrc/stable/ops.h>

#include "rows.h"

namespace compilepass {

constexpr int64_t kFewest = 2;  // rows of x; for more, what packs the weights is as fast

// out = x @ w^T + bias; bias may be null.
template <class T>
struct FloatLinear {
  const T* x;
  const T* w;
  const float* bias;
  T* out;
  int64_t rows, width, columns;
};

// The dot products of R rows of x, `stride` apart, with one row of w, with U steps at a time.
template <int R, int U, class T>
COMPILEPASS_INLINE void float_dots(
    const float* x, int64_t stride, const T* w, int64_t width, float (&sums)[R]) {
  Vec lanes[R][U] = {};
  const auto meet = [&](int64_t k, int u, Vec weights) {
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) lanes[r][u] += load(x + r * stride + k, Whole{}) * weights;
  };
  int64_t k = 0;
  for (; k + U * Twice::count <= width; k += U * Twice::count) {
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      const Two weights = load(w + k + u * Twice::count, Twice{});
      meet(k + u * Twice::count, u, weights.a);
      meet(k + u * Twice::count + kLanes, u, weights.b);
    }
  }
  for (; k + Twice::count <= width; k += Twice::count) {
    const Two weights = load(w + k, Twice{});
    meet(k, 0, weights.a);
    meet(k + kLanes, 0, weights.b);
  }
  for_each_vec(width - k, [&](int64_t i, auto part) { meet(k + i, 0, load(w + k + i, part)); });
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int u = 1; u < U; ++u) lanes[r][0] += lanes[r][u];
    sums[r] = sum(lanes[r][0]);
  }
}

template <int R, class T>
void multiply_rows(const FloatLinear<T>& a) {
  // as whole vectors, in the order in which two of T are loaded; what lacks is 0
  const int64_t stride = (a.width + kLanes - 1) / kLanes * kLanes;
  const std::unique_ptr<float[]> x(new float[R * stride]());
  for (int64_t r = 0; r < a.rows; ++r) {
    for_each_two(a.width, [&](int64_t k, auto part) {
      float* to = x.get() + r * stride + k;
      const auto v = load(a.x + r * a.width + k, part);
      std::memcpy(to, &v, sizeof(v));
    });
  }
  constexpr int64_t chunk = 4 * kLanes;
  const int64_t chunks = (a.columns + chunk - 1) / chunk;
  const int64_t grain = std::max<int64_t>(1, 2 * kElementsPerThread / (chunk * a.width));
  torch::stable::parallel_for(0, chunks, grain, [&](int64_t begin, int64_t end) {
    float sums[R][chunk];
    for (int64_t at = begin * chunk; at < std::min(end * chunk, a.columns); at += chunk) {
      const int64_t columns = std::min(chunk, a.columns - at);
      for (int64_t c = 0; c < columns; ++c) {
        float column[R];
        const T* w = a.w + (at + c) * a.width;
        float_dots<R, R == 1 ? 4 : 2>(x.get(), stride, w, a.width, column);
        for (int r = 0; r < R; ++r) sums[r][c] = column[r];
      }
      for (int64_t r = 0; r < a.rows; ++r) {
        for_each_vec(columns, [&](int64_t c, auto part) {
          Vec v = load(sums[r] + c, part);
          if (a.bias) v += load(a.bias + at + c, part);
          store(a.out + r * a.columns + at + c, plain_nan(v), part);
        });
      }
    }
  });
}

template <class T>
void multiply_floats(const FloatLinear<T>& a) {
  a.rows > 1 ? multiply_rows<2>(a) : multiply_rows<1>(a);
}

}  // namespace compilepass
