// A few float32 rows times weights of a byte each, which are read once, where they lie.
//
// Transposing a block of weights (widened.h) pays where many rows pass by; here the time is that of
// reading them. A vector of weights is widened in registers and meets all rows, and the lanes of the
// sums are added up at the end of a row.
#pragma once

#include "vec.h"

namespace compilepass {

constexpr int kFew = kLanes == 16 ? 4 : 2;  // rows that share a vector of weights
constexpr int kSide = 4;                    // rows of w side by side

// sums[r][c] = dot(x row r, w row c), over R rows of x and C of w.
template <class Weight, int R, int C>
COMPILEPASS_INLINE void dots(
    const float* x, const uint8_t* w, int64_t width, float* sums, int64_t stride) {
  Vec lanes[R][C] = {};
  const auto step = [&](int64_t k, auto part) {
    Vec values[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) values[c] = Weight::load(w + c * width + k, part);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec row = load(x + r * width + k, part);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) lanes[r][c] += row * values[c];
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= width; k += kLanes) step(k, Whole{});
  if (k < width) step(k, Rest{width - k});
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) sums[r * stride + c] = sum(lanes[r][c]);
  }
}

// `rows` rows of x (at most R) against `columns` rows of w, kSide at a time.
template <class Weight, int R>
void few_rows(
    int64_t rows, const float* x, const uint8_t* w, int64_t width, int64_t columns, float* sums,
    int64_t stride) {
  if constexpr (R > 1) {
    if (rows < R) return few_rows<Weight, R - 1>(rows, x, w, width, columns, sums, stride);
  }
  int64_t c = 0;
  for (; c + kSide <= columns; c += kSide) {
    dots<Weight, R, kSide>(x, w + c * width, width, sums + c, stride);
  }
  for (; c < columns; ++c) dots<Weight, R, 1>(x, w + c * width, width, sums + c, stride);
}

}  // namespace compilepass
